"""Processes that share a cache directory: none loses what another one has counted or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_gguf import Q8_0, write_model

from edgespec.drafting.calibration import Calibration, merged_counts
from edgespec.drafting.ledger import merged
from edgespec.memory.store import cache, texts
from edgespec.memory.store.counts import added
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import RoundHistory, merged_rounds

INF = float("inf")
_LIMIT_S = 60.0

# A process that begins with what is stored, counts and writes, and adds that at its end: again and
# again, as many short runs would.
_RUNS = """
import sys
from edgespec.drafting.calibration import Calibration, merged_counts
from edgespec.memory.store import cache, texts
from edgespec.memory.times.speed import RoundHistory, merged_rounds

number, runs = int(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for run in range(runs):
    calibration = Calibration(8, [0] * 8, [0] * 8, [0.5])
    calibration.load_json((cache.load("calibration", "model") or {}).get("suffix"))
    before = calibration.as_json()
    history = RoundHistory.from_json((cache.load("rounds", "model") or {}).get("rounds"))
    rounds = history.rounds()
    for cell in (number, 7):
        calibration.count(cell, True)
        calibration.count(cell, False)
    history.observe(4, 2)
    history.observe(8, 1 + number)
    after = calibration.as_json()
    cache.update(
        "calibration", "model",
        lambda now: {"suffix": merged_counts((now or {}).get("suffix"), before, after)},
    )
    found = history.rounds()
    cache.update(
        "rounds", "model",
        lambda now: {"rounds": merged_rounds((now or {}).get("rounds"), rounds, found)},
    )
    cache.update("kv_losses", "model", lambda now: {**(now or {}), f"{number}-{run}": 0.5})
    texts.add_texts("model", "model.gguf", [("", [number, run])])
"""

# Takes the lock as a change does, and dies in the middle of it or stays there.
_HOLDER = """
import os, sys, time
from edgespec.memory.store import cache

def change(now):
    print("holding", flush=True)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), 9)
    time.sleep(60)

cache.update("counts", "key", change)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline().strip()
    return process


def test_nothing_that_three_processes_count_and_write_at_once_is_lost() -> None:
    runs = 60
    processes = [start(_RUNS, str(number), str(runs)) for number in range(3)]
    for process in processes:  # all at once
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=_LIMIT_S)
        assert process.returncode == 0
    counts = (cache.load("calibration", "model") or {})["suffix"]["cells"]
    assert counts == {
        **{str(number): [runs, 2 * runs] for number in range(3)},
        "7": [3 * runs, 6 * runs],
    }
    rounds = (cache.load("rounds", "model") or {})["rounds"]
    assert rounds == [[4, 2, 3 * runs], *([8, 1 + number, runs] for number in range(3))]
    losses = cache.load("kv_losses", "model") or {}
    assert len(losses) == 1 + 3 * runs
    written = [list(text) for _, text in texts.remembered_texts("model")]
    assert sorted(written) == [[number, run] for number in range(3) for run in range(runs)]
    for number in range(3):  # each in its own order
        own = [text for text in written if text[0] == number]
        assert own == sorted(own)


def add_one(now: dict[str, Any] | None) -> dict[str, Any]:
    return {"count": (now or {}).get("count", 0) + 1}


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_process_that_dies_with_the_lock_leaves_it_free() -> None:
    holder = start(_HOLDER, "dies")
    holder.communicate(timeout=_LIMIT_S)
    began = time.monotonic()
    cache.update("counts", "key", add_one)
    assert time.monotonic() - began < 1.0
    assert (cache.load("counts", "key") or {})["count"] == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_PATIENCE_S", "_patience_s"):
        monkeypatch.setattr(cache, name, 0.3)
    yield


def test_a_lock_that_somebody_keeps_is_waited_for_once_and_not_long(impatient: None) -> None:
    holder = start(_HOLDER, "stays")
    try:
        began = time.monotonic()
        for _ in range(20):
            cache.update("counts", "key", add_one)
        assert time.monotonic() - began < 3.0
        assert (cache.load("counts", "key") or {})["count"] == 20
    finally:
        holder.kill()
        holder.communicate()
    cache.update("counts", "key", add_one)
    assert cache._patience_s == 0.3


def test_threads_of_one_process_wait_for_each_other() -> None:
    def count() -> None:
        for _ in range(50):
            cache.update("counts", "key", add_one)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (cache.load("counts", "key") or {})["count"] == 200


@pytest.mark.parametrize("problem", [OSError(38, "no locks here"), NotImplementedError("flock")])
def test_a_folder_without_locks_is_written_to_all_the_same(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import filelock

    def refuse(*_: Any, **__: Any) -> None:
        raise problem

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    cache.update("counts", "key", add_one)
    cache.update("counts", "key", add_one)
    assert (cache.load("counts", "key") or {})["count"] == 2


def test_a_change_that_fails_frees_the_lock_and_changes_nothing(impatient: None) -> None:
    cache.update("counts", "key", add_one)
    with pytest.raises(ZeroDivisionError):
        cache.update("counts", "key", lambda _now: {"count": 1 // 0})
    cache.update("counts", "key", lambda _now: None)
    began = time.monotonic()
    cache.update("counts", "key", add_one)
    assert time.monotonic() - began < 0.2
    assert (cache.load("counts", "key") or {})["count"] == 2


def test_locks_do_not_pile_up_and_are_no_documents(cache_folder: Path) -> None:
    for number in range(5):
        texts.add_texts(f"model {number}", "model.gguf", [("", [1, 2])])
        cache.remove("texts", f"model {number + 10}")
    assert len(texts.remembered()) == 5
    assert texts.forget() == 5
    assert [path.name for path in cache_folder.rglob("*") if path.is_file()] == ["lock"]


def test_forgetting_removes_half_written_texts_too(cache_folder: Path) -> None:
    """Of a process that was killed; one that lives goes on."""
    texts.add_texts("model", "model.gguf", [("", [1, 2])])
    (path,) = (cache_folder / "texts").glob("*.json")
    dead = path.with_name(f".{path.name}.{2**31 - 2}-0.partial")
    dead.write_text(json.dumps({"texts": [[1, 2, 3]]}))
    assert len(texts.remembered()) == 1
    assert texts.forget() == 1
    assert list((cache_folder / "texts").iterdir()) == []


# ------------------------------------------------------------------------------ merging


def counted(hits: int, misses: int, start: dict[str, Any] | None = None) -> dict[str, Any]:
    calibration = Calibration(2, [0, 0], [0, 0], [0.5])
    calibration.load_json(start)
    for number in range(hits + misses):
        calibration.count(0, number < hits)
    return calibration.as_json()


def test_what_one_process_counts_alone_is_what_it_stores() -> None:
    """Also where it made old counts fade."""
    for before in (counted(0, 0), counted(30, 10), counted(3000, 990)):
        after = counted(300, 200, before)
        assert merged_counts(before, before, after) == after
        assert merged_counts(None, counted(0, 0), after) == after


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 2500), min_size=6, max_size=6))
def test_merged_counts_are_counts_and_nearly_those_of_one_process(counts: list[int]) -> None:
    """Whoever fades old counts; where none does, exactly the sum."""
    before = counted(counts[0], counts[1])
    one, two = (counted(counts[at], counts[at + 1], before) for at in (2, 4))
    found = merged_counts(one, before, two)["cells"].get("0", [0, 0])
    assert merged_counts(two, before, one)["cells"].get("0", [0, 0]) == pytest.approx(
        found, abs=0.01
    )
    assert 0 <= found[0] <= found[1] <= 4000
    hits, tries = sum(counts[::2]), sum(counts)
    if tries <= 4000:
        assert found == [hits, tries]
    elif min(counts) > 100:  # no count vanishes because both processes fade it
        assert found[1] > 900


def test_a_document_of_another_layout_is_replaced() -> None:
    after = counted(3, 1)
    other = {"num_cells": 99, "cells": {"0": [5, 9]}}
    damaged: list[Any] = [
        other, None, 3, {"num_cells": 2, "cells": 7}, {"num_cells": 2, "cells": {"0": "ab"}},
        {"num_cells": 2, "cells": {"0": [9, 3]}}, {"num_cells": 2, "cells": {"0": [1, INF]}},
    ]  # fmt: skip
    for now in damaged:
        assert merged_counts(now, counted(0, 0), after) == after


def test_rounds_add_up_and_fade_once() -> None:
    def observed(rounds: list[tuple[int, int, float]], *more: tuple[int, int]) -> RoundHistory:
        history = RoundHistory(rounds)
        for nodes, emitted in more:
            history.observe(nodes, emitted)
        return history

    before = [(4, 2, 10.0)]
    one = observed(before, (4, 2), (8, 3)).rounds()
    two = observed(before, (4, 2), (1, 1)).rounds()
    assert merged_rounds(one, before, two) == [(1, 1, 1.0), (4, 2, 12.0), (8, 3, 1.0)]
    assert merged_rounds("damaged", [], two) == two
    many = [(4, 2, 19_999.0), (8, 3, 1.0)]
    one, two = (observed(many, (4, 1 + n), (4, 1 + n)).rounds() for n in range(2))
    total = sum(times for _, _, times in merged_rounds(one, many, two))
    assert 9_900 < total < 10_100


def test_merits_add_up_and_are_as_old_as_the_last_that_did() -> None:
    def savings(rounds: float, usual_steps: float, saved_steps: float) -> dict[str, Any]:
        counts = {"num_cells": 2, "cells": {}}
        return {**counts, "rounds": rounds, "usual_steps": usual_steps, "saved_steps": saved_steps}

    nothing, ours, theirs = (
        savings(0.0, 0.0, 0.0),
        savings(10.0, 90.0, -5.0),
        savings(5.0, 40.0, 8.0),
    )
    now = merged(None, nothing, theirs)
    both = merged(now, nothing, ours)
    assert [both[name] for name in ("rounds", "usual_steps", "saved_steps")] == [15.0, 130.0, 3.0]
    assert merged(both, ours, ours) == both  # nothing was added, and nothing got newer


def test_differences_hold_against_whatever_is_there() -> None:
    assert added([5.0, 9.0], [1.0, 2.0], [2.0, 4.0]) == [6.0, 11.0]
    assert added([30.0, 60.0], [40.0, 80.0], [45.0, 90.0]) == [35.0, 70.0]  # they faded
    assert added([45.0, 90.0], [40.0, 80.0], [20.0, 40.0]) == [25.0, 50.0]  # we did
    assert added([22.0, 44.0], [40.0, 80.0], [20.0, 40.0]) == [21.0, 42.0]  # both did


def test_sizes_that_two_processes_measured_are_all_kept() -> None:
    first, second = CostCurve([INF, 4.0, 6.0, INF, INF, 9.0]), CostCurve([INF, 4.0, INF, 5.0])
    assert first.updated(second).base == [INF, 4.0, 6.0, 5.0, INF, 9.0]


# ------------------------------------------------------------------------------ engines


@pytest.mark.model
def test_engines_that_run_beside_each_other_add_up(tmp_path: Path) -> None:
    """Two that load and close around each other: all their rounds, counts and texts are kept."""
    import edgespec

    prompt = "Repeat this three times: the quick brown fox jumps over the lazy dog."
    path = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    load = partial(edgespec.load, path, backend="llamacpp", threads=1, context_size=512)
    with load(drafter="suffix", remember=True) as first:
        first.generate(prompt, max_tokens=24)
        with load(drafter="suffix", remember=True) as second:
            second.generate(prompt.replace("three", "two"), max_tokens=24)
            rounds = [sum(times for _, _, times in e.history.rounds()) for e in (first, second)]
    (kept_rounds,) = (cache.cache_directory() / "rounds").glob("*.json")
    stored = json.loads(kept_rounds.read_text())["rounds"]
    assert min(rounds) > 0.0
    assert sum(times for _, _, times in stored) == sum(rounds)
    (kept,) = texts.remembered()
    assert kept.texts == 2
