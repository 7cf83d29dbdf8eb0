"""Plans of whole runs, with what was measured earlier."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from planning_cases import CELL, INF, MIB, PLENTY, SPEC, plan_of

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import (
    RunShape,
    kv_cache_bytes,
)
from edgespec.memory.device import accelerators, device
from edgespec.memory.plan.plan import Settings
from edgespec.memory.plan.request import Request
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import DEFAULT_ROUNDS, RoundHistory
from edgespec.models.spec import ModelSpec
from edgespec.setup.planning import make_run_plan, speed_model
from edgespec.setup.stored import rounds_key, settings_key, settings_of, stored_curve, stored_rounds


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody measures this machine's bandwidth: 20 GB/s."""
    monkeypatch.setattr("edgespec.setup.planning.memory_bandwidth", lambda: 20e9)


@pytest.mark.usefixtures("quiet")
def test_the_drafters_tables_are_part_of_the_plan() -> None:
    """18 bytes a token for 65,536 tokens, and three tables of 65,536 entries of 4 bytes, twice."""
    tables = 18 * 65_536 + 2 * 3 * 4 * 65_536
    found = make_run_plan(SPEC, Request(), PLENTY).component_bytes
    assert found["drafter_tables"] == tables
    plain = make_run_plan(SPEC, Request(drafter="none"), PLENTY)
    assert "drafter_tables" not in plain.component_bytes


@pytest.mark.usefixtures("quiet")
def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 20 * MIB)
    monkeypatch.setattr(accelerators, "accelerators", lambda: ())
    with pytest.raises(DoesNotFitError, match="free: 20 MiB"):
        make_run_plan(SPEC, Request())


@pytest.mark.usefixtures("quiet")
def test_step_times_belong_to_a_file_and_its_settings() -> None:
    """Whatever changes a step's time changes the key; context, budget and drafter do not."""

    def key(spec: ModelSpec = SPEC, **changes: Any) -> str:
        return settings_key(spec, replace(Settings(2, "f16", "f16", 0, "suffix"), **changes))

    keys = [
        key(),
        key(threads=3),
        key(kv_type_k="bf16"),
        key(kv_type_v="q8_0"),
        key(gpu_layers=5),
        key(replace(SPEC, fingerprint="beef")),
    ]
    assert len(set(keys)) == len(keys)
    plans = [plan_of(), plan_of(context_size=999), plan_of(budget_bytes=1 << 30)]
    assert {settings_key(SPEC, settings_of(plan)) for plan in plans} == {keys[0]}
    assert rounds_key(SPEC, "suffix") != rounds_key(SPEC, "other")
    assert rounds_key(SPEC, "suffix") != rounds_key(replace(SPEC, fingerprint="b"), "suffix")


SETTINGS = Settings(2, "f16", "f16", 0, "suffix")


def test_a_stored_curve_is_found_again() -> None:
    assert stored_curve(SPEC, SETTINGS) is None
    kept = CostCurve([INF, 4.0, 6.0, INF, 7.0], 0.01, 0.002, 0.5)
    cache.store("curves", settings_key(SPEC, SETTINGS), kept.as_json())
    assert stored_curve(SPEC, SETTINGS) == kept
    assert stored_curve(SPEC, replace(SETTINGS, threads=3)) is None


@pytest.mark.parametrize(
    "base",
    [[], [None, None], [None, "x"], None, [None, 10**400]],
    ids=lambda base: str(base)[:20],
)
def test_a_damaged_stored_curve_is_none(base: Any) -> None:
    document = {**CostCurve([INF, 4.0]).as_json(), "base_ms": base}
    cache.store("curves", settings_key(SPEC, SETTINGS), document)
    assert stored_curve(SPEC, SETTINGS) is None


@pytest.mark.usefixtures("quiet")
def test_a_small_budget_does_not_bind_a_later_one() -> None:
    """What an earlier plan had no room for is tried again where the measured sizes are cheap."""
    request = Request(threads=2, budget_bytes=2 << 30)
    times = {"flat": [4.0, 4.2, 4.4, 4.6], "steep": [4.0, 8.0, 12.0, 16.0]}
    drafts = {}
    for name, base in times.items():
        cache.store("curves", settings_key(SPEC, SETTINGS), CostCurve([INF, *base]).as_json())
        drafts[name] = make_run_plan(SPEC, request, PLENTY).draft_max
    assert drafts["flat"] > 3 >= drafts["steep"]


@pytest.mark.usefixtures("quiet")
def test_blanks_in_a_list_of_drafters_do_not_count() -> None:
    plan = make_run_plan(SPEC, Request(drafter=" suffix, recycling"), PLENTY)
    assert plan.drafter == "suffix,recycling"


def test_a_few_rounds_tell_little() -> None:
    """From 500 on those of this file count; before, what is usual."""
    key = rounds_key(SPEC, "suffix")
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
    cache.store("rounds", key, {"rounds": RoundHistory([(4, 4, 499.0)]).rounds()})
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
    cache.store("rounds", key, {"rounds": RoundHistory([(4, 4, 500.0)]).rounds()})
    assert stored_rounds(SPEC, "suffix") == ((4, 4, 500.0),)
    cache.store("rounds", key, {"rounds": "many"})
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS


@pytest.mark.usefixtures("quiet")
def test_speed_is_estimated_from_bandwidth_until_it_is_measured() -> None:
    """2.0 MiB at 20 GB/s are 0.107 ms a token; then the stored curve's 4 ms."""
    estimate = speed_model(SPEC, SETTINGS)
    assert not estimate.is_measured
    assert estimate.tokens_per_s(0, 0) == pytest.approx(20e9 / SPEC.weight_bytes)
    cache.store("curves", settings_key(SPEC, SETTINGS), CostCurve([INF, 4.0, 5.0]).as_json())
    assert speed_model(SPEC, SETTINGS).is_measured
    assert speed_model(SPEC, SETTINGS).tokens_per_s(0, 0) == pytest.approx(250.0)
    assert make_run_plan(SPEC, Request(threads=2), PLENTY).plain_tokens_per_s == pytest.approx(
        250.0
    )


@pytest.mark.usefixtures("quiet")
def test_an_exact_run_knows_the_largest_step_that_rounds_alike() -> None:
    """Measured by an earlier run under the settings of exact runs."""
    request = Request(threads=2, exact=True)
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 31
    exact = Settings(2, "bf16", "f16", 0, "suffix")
    known = {"largest_step": 8, "tried": 32, "depth": 704}
    cache.store("invariance", settings_key(SPEC, exact), known)
    assert make_run_plan(SPEC, request, PLENTY).draft_max == 7
    assert make_run_plan(SPEC, Request(threads=2), PLENTY).draft_max == 31
    for change in ({"largest_step": "eight"}, {"tried": 8}, {"depth": None}):
        cache.store("invariance", settings_key(SPEC, exact), {**known, **change})
        assert make_run_plan(SPEC, request, PLENTY).draft_max == 31, "no limit is known"


def test_planning_imports_no_inference_library_and_no_numpy() -> None:
    code = (
        "import sys, edgespec.setup.planning; "
        "print(sorted({'numpy', 'llama_cpp', 'onnxruntime', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_cache_of_a_plan_is_that_of_the_footprint() -> None:
    plan = plan_of(context_size=1000, exact=True)
    shape = RunShape(1000, plan.batch_size, plan.draft_max + 1, "bf16", "f16")
    assert plan.component_bytes["kv_cache"] == kv_cache_bytes(SPEC, shape) == 1024 * CELL
