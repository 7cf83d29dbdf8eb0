"""Processes that share a cache directory: none loses what another one has measured or written."""

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
from random_gguf import Q8_0, write_model

from edgespec.memory.store import cache, texts
from edgespec.memory.times import CostCurve

INF = float("inf")
_LIMIT_S = 60.0

# A process that adds to what is stored, again and again, as many short runs would.
_RUNS = """
import sys
from edgespec.memory.store import cache, texts

number, runs = int(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for run in range(runs):
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


def test_nothing_that_three_processes_write_at_once_is_lost() -> None:
    runs = 60
    processes = [start(_RUNS, str(number), str(runs)) for number in range(3)]
    for process in processes:  # all at once
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=_LIMIT_S)
        assert process.returncode == 0
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
def test_a_process_that_dies_with_the_lock_leaves_it_free(patient: None) -> None:
    holder = start(_HOLDER, "dies")
    holder.communicate(timeout=_LIMIT_S)
    cache.update("counts", "key", add_one)
    assert (cache.load("counts", "key") or {})["count"] == 1


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that nobody gives back ends the test by its timeout."""
    for name in ("_PATIENCE_S", "_patience_s"):
        monkeypatch.setattr(cache, name, 1000.0)


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


def test_a_change_that_fails_frees_the_lock_and_changes_nothing(patient: None) -> None:
    cache.update("counts", "key", add_one)
    with pytest.raises(ZeroDivisionError):
        cache.update("counts", "key", lambda _now: {"count": 1 // 0})
    cache.update("counts", "key", lambda _now: None)
    cache.update("counts", "key", add_one)
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


def test_sizes_that_two_processes_measured_are_all_kept() -> None:
    first, second = CostCurve([INF, 4.0, 6.0, INF, INF, 9.0]), CostCurve([INF, 4.0, INF, 5.0])
    assert first.updated(second).base == [INF, 4.0, 6.0, 5.0, INF, 9.0]


# ------------------------------------------------------------------------------ engines


@pytest.mark.model
def test_engines_that_run_beside_each_other_keep_their_texts(tmp_path: Path) -> None:
    """Two that load and close around each other: all texts, and the counts of the last one."""
    import edgespec

    prompt = "Repeat this three times: the quick brown fox jumps over the lazy dog."
    path = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    load = partial(edgespec.load, path, backend="llamacpp", threads=1, context_size=512)
    with load(drafter="suffix", remember=True) as first:
        first.generate(prompt, max_tokens=24)
        with load(drafter="suffix", remember=True) as second:
            second.generate(prompt.replace("three", "two"), max_tokens=24)
        rounds = first.history.rounds()
    (kept_rounds,) = (cache.cache_directory() / "rounds").glob("*.json")
    assert json.loads(kept_rounds.read_text())["rounds"] == [list(one) for one in rounds]
    (kept,) = texts.remembered()
    assert kept.texts == 2
