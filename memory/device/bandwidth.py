"""How fast this device moves memory, measured once and kept.

The ceiling of plain decoding is simple: every token reads all weights once.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from edgespec.memory.device import host
from edgespec.memory.store import cache

_TOTAL_BYTES = 96 << 20  # beyond most caches, and less than any model takes afterwards
_REPEATS = 4


def stored_bandwidth() -> float | None:
    """Bytes per second measured earlier, or None."""
    document = cache.load("bandwidth", host.device_key())
    value = document.get("bytes_per_s") if document else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def memory_bandwidth() -> float:
    """Bytes per second that all usable cores together move; measured in a tenth of a second."""
    known = stored_bandwidth()
    if known is not None:
        return known
    measured = _measure(host.usable_cores())
    cache.store("bandwidth", host.device_key(), {"bytes_per_s": measured})
    return measured


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
