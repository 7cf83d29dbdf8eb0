"""What else computes on this machine."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edgespec.memory.device import neighbours
from edgespec.memory.device.neighbours import Neighbours, alone, note_stall, of_steps
from edgespec.memory.times import CostCurve


def test_neighbours_are_what_is_busy_and_not_ours() -> None:
    looks = iter([(10.0, 100.0, 5.0), (12.0, 103.5, 8.0)])
    assert Neighbours(lambda: next(looks)).share() == pytest.approx(0.25)  # 0.5 s of 2 s


def test_a_look_at_this_process_grows() -> None:
    first = alone()
    sum(i * i for i in range(200_000))
    assert all(now >= then for now, then in zip(alone(), first, strict=True))


@pytest.mark.parametrize(
    ("loads", "running"),
    [
        (["0.4 0.9 1.1 1/214 99"], 0),
        (["0.4 0.9 1.1 3/214 99"], 2),
        (["0 0 0 3/2 9", "0 0 0 4/2 9", "0 0 0 2/2 9", "0 0 0 9/2 9", "0 0 0 5/2 9"], 1),
        (["0 0 0 3/2 9", "0 0 0 1/2 9"], 0),
        (["0.00 0.00 0.00 0/0 0"], 0),
        ([""], 0),
    ],
)
def test_who_runs_now_is_counted_without_this_thread(
    monkeypatch: pytest.MonkeyPatch, loads: list[str], running: int
) -> None:
    """Those of a moment are not: the fewest of some looks."""
    texts = itertools.chain(loads, itertools.repeat(loads[-1]))
    monkeypatch.setattr(neighbours, "read_text", lambda _path: next(texts))
    monkeypatch.setattr(neighbours, "_has_quota", lambda: False)
    monkeypatch.setattr(neighbours, "our_cpus", lambda: tuple(range(os.cpu_count() or 1)))
    assert neighbours.running_now() == running


@pytest.mark.parametrize("part", ["quota", "affinity"])
def test_in_a_part_of_a_machine_nothing_tells_who_runs(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    cpus = tuple(range((os.cpu_count() or 1) + (part == "affinity")))
    monkeypatch.setattr(neighbours, "read_text", lambda _path: "0.4 0.9 1.1 3/214 99")
    monkeypatch.setattr(neighbours, "_has_quota", lambda: part == "quota")
    monkeypatch.setattr(neighbours, "our_cpus", lambda: cpus)
    assert neighbours.running_now() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells threads apart")
def test_what_other_threads_compute_is_not_of_the_steps() -> None:
    spent, go_on = list[float](), threading.Event()

    def compute() -> None:
        sum(i * i for i in range(3_000_000))
        spent.append(time.thread_time())
        go_on.wait()

    this = threading.get_native_id()
    first, together = of_steps({this}), alone()
    thread = threading.Thread(target=compute)
    thread.start()
    assert thread.native_id is not None
    while not spent:
        time.sleep(0.01)
    both = of_steps({this, thread.native_id})
    its = alone()[2] - together[2] - (of_steps({this})[2] - first[2])
    go_on.set()
    thread.join()
    assert its > 0.9 * spent[0] and both[2] - first[2] > 0.9 * spent[0]
    after = of_steps({this, thread.native_id})
    assert after[2] >= both[2], "a thread of a library that has ended is nobody beside the steps"


def program(pid: int, name: str, seconds: float) -> Any:
    times = SimpleNamespace(user=seconds, system=0.0)
    return SimpleNamespace(pid=pid, info={"name": name, "cpu_times": times})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.8, "video computes beside it, on 1.6 cores"), (0.01, "no other program computes now")],
)
def test_a_stall_is_logged_with_what_else_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, words: str
) -> None:
    looks = iter(
        [
            [program(1, "init", 5.0), program(2, "video", 9.0)],
            [program(1, "init", 5.0), program(2, "video", 9.0 + seconds), program(3, "new", 99.0)],
        ]
    )
    monkeypatch.setattr(psutil, "process_iter", lambda _names: next(looks))
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    monkeypatch.setattr(neighbours, "available_bytes", lambda: 300 << 20)
    caplog.set_level(logging.INFO, "edgespec.decode")
    neighbours._log_stall(4000.0, 100.0)
    assert caplog.messages == [
        f"a step took 4.0 s, 40 times what it usually takes; {words}, and 300 MiB are free"
    ]


def test_only_the_first_stall_of_a_process_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[float, float]] = []

    class Now:
        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            noted.append(args)

        def start(self) -> None:
            pass

    monkeypatch.setattr(neighbours, "_stalls", itertools.count())
    monkeypatch.setattr(threading, "Thread", Now)
    for ms in (4000.0, 5000.0):
        note_stall(ms, 100.0)
    assert noted == [(4000.0, 100.0)]


def test_a_step_that_takes_twenty_times_its_prediction_is_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[float] = []
    monkeypatch.setattr("edgespec.memory.times.note_stall", lambda ms, _: noted.append(ms))
    slow, fast = (CostCurve([float("inf"), ms, 1.5 * ms]) for ms in (100.0, 5.0))
    slow.observe(1, 0, 1, 1900.0)
    fast.observe(1, 0, 1, 400.0)  # which nobody notices
    assert noted == []
    slow.observe(1, 0, 1, 2100.0)
    assert noted == [2100.0]
