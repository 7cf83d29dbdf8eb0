"""How fast this device moves memory: the fastest that was ever seen.

The ceiling of plain decoding is simple: every token reads all weights once. A measurement beside
other programs is too low, so later ones, and steps that read faster than it, replace it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from edgespec.memory.device import host
from edgespec.memory.store import cache

_TOTAL_BYTES = 96 << 20  # beyond most caches, and less than any model takes afterwards
_REPEATS = 4


def stored_bandwidth() -> float | None:
    """Bytes per second measured earlier, or None."""
    document = cache.load("bandwidth", host.device_key())
    value = document.get("bytes_per_s") if document else None
    is_number = isinstance(value, int | float) and 0 < value < float("inf")
    return float(value) if value is not None and is_number else None


def memory_bandwidth() -> float:
    """Bytes per second that all usable cores together move, as far as it is known."""
    return stored_bandwidth() or measured_bandwidth()


def measured_bandwidth() -> float:
    """As `memory_bandwidth`, measured once more: takes a tenth of a second."""
    return _fastest(_measure(host.usable_cores()))


def saw_step(nbytes: int, seconds: float) -> None:
    """Learn from a step that read so many bytes of weights: memory is at least as fast.

    Steps that read less than caches may hold say nothing about memory.
    """
    if nbytes >= _TOTAL_BYTES and 0.0 < seconds < float("inf"):
        _fastest(nbytes / seconds)


def _fastest(bytes_per_s: float) -> float:
    """The most that was ever seen, this included; it is kept."""
    fastest = bytes_per_s

    def change(_document: dict[str, Any] | None) -> dict[str, Any] | None:
        nonlocal fastest
        known = stored_bandwidth() or 0.0
        fastest = max(bytes_per_s, known)
        return {"bytes_per_s": fastest} if fastest > known else None

    cache.update("bandwidth", host.device_key(), change)
    return fastest


def _measure(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Copies in all threads at once: a copy reads and writes, and ctypes lets threads overlap."""
    size = max(1 << 16, min(_TOTAL_BYTES, host.available_bytes() // 8) // (2 * threads))
    pairs = [(bytearray(size), bytearray(size)) for _ in range(threads)]
    best = 0.0
    for _ in range(_REPEATS):
        workers = [threading.Thread(target=_copy, args=(*pair, size)) for pair in pairs]
        start = clock()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 2 * size * threads / (clock() - start))
    return best


def _copy(target: bytearray, source: bytearray, size: int) -> None:
    array = ctypes.c_char * size
    ctypes.memmove(array.from_buffer(target), array.from_buffer(source), size)
