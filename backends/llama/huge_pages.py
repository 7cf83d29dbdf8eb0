"""Huge pages for weights and caches, where Linux gives them to those who ask.

Every step reads all weights. On pages of 4 KiB a part of that time goes into translating addresses,
in a virtual machine twice over; pages of 2 MiB need 512 times fewer translations. Where
`transparent_hugepage/enabled` is "madvise", as many distributions ship it, memory has to be asked
for. Asked before it is written, it costs nothing; afterwards the kernel copies it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_BYTES = 2 << 20
_LEAST_BYTES = 4 << 20  # of a region that is worth asking for


class HugePages:
    """Asks for huge pages for the large regions that were reserved since this was made."""

    def __init__(self) -> None:
        self._known = large_regions()

    def ask(self, *, written: bool = False) -> int:
        """Ask for regions that are new since the last call; how many bytes were granted.

        `written` ones are copied into huge pages now. A kernel that refuses changes nothing.
        """
        regions = large_regions()
        new = [(start, end) for start, end in regions.items() if self._known.get(start) != end]
        self._known = regions
        return sum(_advise(start, end, written) for start, end in new)


def large_regions() -> dict[int, int]:
    """Where large memory of this process alone begins and ends; empty where there is no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return {}
    regions = {}
    for fields in map(str.split, lines):
        start, end = (int(address, 16) for address in fields[0].split("-"))
        is_ours = fields[1].startswith("rw") and len(fields) == 5  # neither a file nor the heap
        if is_ours and end - start >= _LEAST_BYTES:
            regions[start] = end
    return regions


def _advise(start: int, end: int, written: bool) -> int:
    start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
    if sys.platform != "linux" or end <= start:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, end - start, _MADV_HUGEPAGE) != 0:
        return 0
    if written:
        madvise(start, end - start, _MADV_COLLAPSE)  # since Linux 6.1
    return end - start
