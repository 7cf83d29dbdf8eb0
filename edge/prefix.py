"""Where two sequences part."""

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
