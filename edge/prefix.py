"""Where two sequences part, and where whole characters end."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(a: Sequence[object], b: Sequence[object], start: int = 0) -> int:
    """Length of the longest common prefix, `start` being known to be a part of it.

    Long equal parts are compared at C speed.
    """
    size = min(len(a), len(b))
    block = 256
    while start < size and a[start : start + block] == b[start : start + block]:
        start += block
    start = min(start, size)
    return next((i for i in range(start, size) if a[i] != b[i]), size)


def complete(data: bytes) -> int:
    """How many bytes are whole characters, as far as the last one is concerned."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= needed else len(data) - back
    return len(data)
