"""Counts that several processes add to at once.

Each takes over what is stored when it begins, and counts on. What it stores in the end is what is
there then, with what it has counted itself:

    stored = now + (after - before)

Old counts fade: they are halved where they have become many. Where one process did that, its
difference still holds against what the others added; where two did, what both have kept is
averaged, because old counts must not fade twice.
"""

from __future__ import annotations

from collections.abc import Sequence


def added(now: Sequence[float], before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Counts to store, of the same things in each list; the last one is their total, which fades.

    Args:
        now: what is stored at this moment.
        before, after: what one process began and ended with.
    """
    if now[-1] < before[-1] > after[-1]:
        return [(there + ours) / 2 for there, ours in zip(now, after, strict=True)]
    triples = zip(now, before, after, strict=True)
    return [there + end - start for there, start, end in triples]
