"""Memory bandwidth on a fake clock, and what is kept of it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.memory.device import bandwidth, host, neighbours
from edgespec.memory.store import cache

MIB = 1 << 20


def clock_of(*seconds: float) -> Callable[[], float]:
    """A clock between whose calls these seconds pass in turn: a copy, a pause, a copy, ..."""
    times: Iterator[float] = itertools.accumulate((0.0, *seconds))
    return lambda: next(times)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 16 * MIB)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_reads_and_writes(threads: int) -> None:
    """Of 16 MiB that are free an eighth is taken, by all threads together.

    The best of four rounds of copies takes 1 ms, in which that much is read or written.
    """
    ticking = clock_of(0.004, 9.0, 0.002, 9.0, 0.001, 9.0, 0.003)
    assert bandwidth._measure(threads, 96 * MIB, ticking) == pytest.approx(2 * MIB / 0.001)


def test_blocks_are_never_too_large_nor_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 96 MiB in all, of which a thread copies from and to its part; at least 64 KiB."""
    copied: list[int] = []
    monkeypatch.setattr(bandwidth, "_copy", lambda target, source, size: copied.append(size))
    for free in (1 << 40, 4096):
        monkeypatch.setattr(host, "available_bytes", lambda free=free: free)
        bandwidth._measure(1, 6 * MIB, clock_of(*[0.001] * 7))
    assert copied == [3 * MIB] * 4 + [1 << 16] * 4


def test_the_start_of_threads_is_not_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are ready before the clock is read for the first time, and again before each copy."""
    begun: list[int] = []
    read: list[int] = []
    run = threading.Thread.run

    def slow(self: threading.Thread) -> None:
        time.sleep(0.02 * len(begun))
        begun.append(1)
        run(self)

    monkeypatch.setattr(threading.Thread, "run", slow)
    times = clock_of(*[0.001] * 8)

    def clock() -> float:
        read.append(len(begun))
        return times()

    bandwidth._measure(4, MIB, clock)
    assert read == [4] * 8


def test_copies_are_larger_than_the_last_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes no more than its model; what caches gave is kept for models as small alone."""
    asked: list[int] = []

    def measure(_threads: int, most_bytes: int) -> float:
        asked.append(most_bytes)
        return 9e9

    monkeypatch.setattr(bandwidth, "_measure", measure)
    for cache_mib, model_mib, copied in ((16, 500, 96), (64, 500, 256), (64, 100, 100), (16, 1, 1)):
        monkeypatch.setattr(host, "last_cache_bytes", lambda mib=cache_mib: mib * MIB)
        bandwidth._total_bytes.cache_clear()
        cache.remove("bandwidth", host.device_key())
        bandwidth.memory_bandwidth(model_mib * MIB)
        assert asked.pop() == copied * MIB
        assert (bandwidth.stored_bandwidth() is None) == (model_mib <= 100)
        assert bandwidth.memory_bandwidth(model_mib * MIB) == 9e9
        assert not asked, "a second plan says the same"
    bandwidth._total_bytes.cache_clear()


def test_a_copy_copies() -> None:
    target, source = bytearray(8), bytearray(b"12345678")
    bandwidth._copy(target, source, 5)
    assert target == b"12345\x00\x00\x00"


def test_it_is_measured_once_for_a_device(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    measured: list[int] = []

    def measure(threads: int, _most_bytes: int) -> float:
        measured.append(threads)
        return 12e9

    monkeypatch.setattr(bandwidth, "_measure", measure)
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    assert bandwidth.stored_bandwidth() is None
    assert bandwidth.memory_bandwidth() == bandwidth.memory_bandwidth() == 12e9
    assert (measured, bandwidth.stored_bandwidth()) == ([3], 12e9)
    (file,) = cache_folder.glob("bandwidth/*.json")
    assert json.loads(file.read_text())["bytes_per_s"] == 12e9
    monkeypatch.setattr(host, "usable_cores", lambda: 2)
    assert bandwidth.memory_bandwidth() == 12e9
    assert measured == [3, 2], "another number of cores is another device"


def test_one_that_was_measured_beside_others_is_replaced_by_a_faster_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = iter([8e9, 20e9, 5e9])
    monkeypatch.setattr(bandwidth, "_measure", lambda *_: next(speeds))
    assert bandwidth.memory_bandwidth() == 8e9
    assert bandwidth.measured_bandwidth() == bandwidth.memory_bandwidth() == 20e9
    assert bandwidth.measured_bandwidth() == bandwidth.memory_bandwidth() == 20e9


def test_a_step_that_was_faster_than_memory_shows_what_memory_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless all it read may lie in caches, or no time was measured."""
    monkeypatch.setattr(bandwidth, "_measure", lambda *_: 8e9)
    monkeypatch.setattr(bandwidth, "_total_bytes", lambda: 96 * MIB)
    assert bandwidth.memory_bandwidth() == 8e9
    for size, seconds in ((95 * MIB, 1e-6), (1 << 30, 0.0), (1 << 30, float("inf")), (1 << 30, 9)):
        bandwidth.saw_step(size, seconds)
        assert bandwidth.memory_bandwidth() == 8e9
    bandwidth.saw_step(10**9, 0.05)
    assert bandwidth.memory_bandwidth() == bandwidth.measured_bandwidth() == 20e9


def test_whether_other_programs_computed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds, busy = iter([8e9, 20e9]), iter([1.0, 0.0])
    monkeypatch.setattr(bandwidth, "_measure", lambda *_: next(speeds))
    monkeypatch.setattr(neighbours.Neighbours, "share", lambda _self: next(busy))
    assert not bandwidth.is_from_busy_moment(1 << 40)
    bandwidth.memory_bandwidth(1 << 40)
    assert bandwidth.is_from_busy_moment(1 << 40)
    bandwidth.measured_bandwidth()
    assert not bandwidth.is_from_busy_moment(1 << 40)


@pytest.mark.parametrize("value", [None, "fast", 0, -1.0, [], {}, float("inf"), float("nan")])
def test_a_damaged_value_is_measured_again(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(bandwidth, "_measure", lambda *_: 7e9)
    cache.store("bandwidth", host.device_key(), {"bytes_per_s": value})
    assert bandwidth.stored_bandwidth() is None
    assert bandwidth.memory_bandwidth() == 7e9
