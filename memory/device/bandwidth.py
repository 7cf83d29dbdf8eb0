"""How fast this device moves memory: the fastest that was ever seen.

The ceiling of plain decoding is simple: every token reads all weights once. A measurement beside
other programs is too low, which is kept with it; later ones, and steps that read faster than it,
replace it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from edgespec.memory.device import host
from edgespec.memory.device.neighbours import BUSY, Neighbours, alone
from edgespec.memory.store import cache

_LEAST_BYTES = 96 << 20  # beyond most caches
_REPEATS = 4
_KIND = "bandwidth"


def stored_bandwidth(key: str | None = None) -> float | None:
    """Bytes per second measured earlier, as they are kept for this device; or None."""
    document = cache.load(_KIND, host.device_key() if key is None else key)
    value = document.get("bytes_per_s") if document else None
    is_number = isinstance(value, int | float) and 0 < value < float("inf")
    return float(value) if value is not None and is_number else None


def memory_bandwidth(model_bytes: int | None = None) -> float:
    """Bytes per second that all usable cores together move, as far as it is known.

    A plan must not take more than its model of `model_bytes`. Where this is too little to measure
    memory, beside caches as large, what it finds is kept for models as small alone.
    """
    key, room = _key(model_bytes)
    known = stored_bandwidth(key)
    return _measured(key, room) if known is None else known


def is_from_busy_moment(model_bytes: int) -> bool:
    """Whether other programs computed while `memory_bandwidth` was measured."""
    key, _ = _key(model_bytes)
    return bool((cache.load(_KIND, key) or {}).get("busy"))


def _key(model_bytes: int | None) -> tuple[str, int]:
    """Under what the bandwidth of a plan is stored, and the bytes that it may take to measure."""
    room = _total_bytes() if model_bytes is None else model_bytes
    if room >= _total_bytes() or stored_bandwidth() is not None:
        return host.device_key(), _total_bytes()
    return f"{host.device_key()} | {room >> 20} MiB", room


def measured_bandwidth() -> float:
    """As `memory_bandwidth`, measured once more: takes a tenth of a second."""
    return _measured(host.device_key(), _total_bytes())


def _measured(key: str, most_bytes: int) -> float:
    neighbours = Neighbours(alone)
    bytes_per_s = _measure(host.usable_cores(), most_bytes)
    return _fastest(key, bytes_per_s, is_busy=neighbours.share() > BUSY)


def saw_step(nbytes: int, seconds: float) -> None:
    """Learn from a step that read so many bytes of weights: memory is at least as fast.

    Steps that read less than caches may hold say nothing about memory.
    """
    if nbytes >= _total_bytes() and 0.0 < seconds < float("inf"):
        _fastest(host.device_key(), nbytes / seconds, is_busy=False)


def _fastest(key: str, bytes_per_s: float, *, is_busy: bool) -> float:
    """The most that was ever seen, this included; it is kept."""
    fastest = bytes_per_s

    def change(_document: dict[str, Any] | None) -> dict[str, Any] | None:
        nonlocal fastest
        known = stored_bandwidth(key) or 0.0
        fastest = max(bytes_per_s, known)
        return {"bytes_per_s": fastest, "busy": is_busy} if fastest > known else None

    cache.update(_KIND, key, change)
    return fastest


@functools.cache
def _total_bytes() -> int:
    """Bytes that all threads together copy from and to, which no cache holds."""
    # Four times as large as the last caches, or part of what is copied lies in them.
    return max(_LEAST_BYTES, 4 * host.last_cache_bytes())


def _measure(
    threads: int, most_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Copies in all threads at once: a copy reads and writes, and ctypes lets threads overlap.

    The clock runs from when the last thread is ready until the last one has copied: starting 128
    threads takes longer than their copies.
    """
    size = max(1 << 16, min(most_bytes, host.available_bytes() // 8) // (2 * threads))
    pairs = [(bytearray(size), bytearray(size)) for _ in range(threads)]
    times: list[float] = []
    turn = threading.Barrier(threads, action=lambda: times.append(clock()))

    def copies(target: bytearray, source: bytearray) -> None:
        for _ in range(_REPEATS):
            turn.wait()
            _copy(target, source, size)
            turn.wait()

    workers = [threading.Thread(target=copies, args=pair) for pair in pairs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    fastest = min(end - start for start, end in zip(times[::2], times[1::2], strict=True))
    return 2 * size * threads / fastest


def _copy(target: bytearray, source: bytearray, size: int) -> None:
    array = ctypes.c_char * size
    ctypes.memmove(array.from_buffer(target), array.from_buffer(source), size)
