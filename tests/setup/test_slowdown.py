"""Steps that take longer than before, and what is said of it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from planning_cases import SPEC

from edgespec.errors import SlowerWarning
from edgespec.memory.device import host
from edgespec.memory.plan.settings import Settings
from edgespec.memory.store import cache
from edgespec.setup import slowdown
from edgespec.setup.slowdown import Build, compare_with_before, way_back

SETTINGS = Settings(2, "f16", "f16", 0, "suffix")
OLD = Build("0.3.35 aaaa", "0.1.0", "kernels 1 avx2")


def use(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setattr(slowdown, "build_in_use", lambda _: build)
    monkeypatch.setattr(host, "llama_build", lambda: build.llama)


def told(step_ms: float, fastest_ms: float, settings: Settings = SETTINGS) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compare_with_before(SPEC, settings, step_ms, lambda: fastest_ms)
    assert all(one.category is SlowerWarning for one in found)
    return "".join(str(one.message) for one in found)


def test_slower_after_an_update_is_told_once_with_a_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, OLD)
    assert told(10.0, 10.0) == ""
    use(monkeypatch, replace(OLD, llama="0.3.36 bbbb"))
    assert told(10.9, 10.9) == "", "a measurement is off by that much"
    assert told(13.0, 10.5) == "", "the fastest of some more steps decides"
    assert told(12.4, 12.5) == (
        "a step takes 12.4 ms, 24% longer than before on this device (10 ms): llama-cpp-python was "
        "0.3.35 then; to go back: pip install llama-cpp-python==0.3.35"
    )
    assert told(5.0, 5.0) == ""
    use(monkeypatch, OLD)
    assert "llama-cpp-python was 0.3.36 then" in told(10.0, 10.0)


def test_the_same_build_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be hot, or beside other programs: nobody can go back from that."""
    use(monkeypatch, OLD)
    assert told(10.0, 10.0) == told(20.0, 20.0) == ""


def test_other_settings_and_files_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OLD)
    told(10.0, 10.0)
    use(monkeypatch, replace(OLD, edgespec="0.2.0"))
    assert told(20.0, 20.0, replace(SETTINGS, threads=1)) == ""
    assert "pip install edgespec==0.1.0" in told(20.0, 20.0)


def test_kernels_that_were_lost_are_named_and_those_turned_off_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, OLD)
    told(10.0, 10.0, replace(SETTINGS, kernels=True))
    use(monkeypatch, replace(OLD, llama="0.3.36 bbbb", kernels=""))
    monkeypatch.setattr(slowdown, "missing_kernels", lambda: "")
    assert told(20.0, 20.0) == ""
    monkeypatch.setattr(slowdown, "missing_kernels", lambda: "llama.cpp has no such list")
    assert told(20.0, 20.0).endswith(
        "edgespec's kernels were used then; now they are not: llama.cpp has no such list"
    )


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(OLD, llama="0.3.35 cccc"), "0.3.35 was built in another way then"),
        (replace(OLD, kernels="kernels 2 avx2"), "edgespec's kernels were of another build then"),
    ],
)
def test_ways_back(now: Build, words: str) -> None:
    assert words in way_back(now, OLD)


@pytest.mark.parametrize("steps", [None, {}, [1], [{"ms": "x"}], [{"ms": 1.0, "who": 1}], "a"])
def test_what_is_damaged_counts_as_nothing(monkeypatch: pytest.MonkeyPatch, steps: object) -> None:
    use(monkeypatch, OLD)
    cache.store("steps", slowdown._key(SPEC, SETTINGS), {"steps": steps})
    assert told(10.0, 10.0) == ""
