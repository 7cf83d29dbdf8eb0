"""Logits whose two best are an eighth of the context's length apart."""

from __future__ import annotations

from collections.abc import Sequence

V = 16


def by_length(context: tuple[int, ...]) -> Sequence[float]:
    """The gap between the two best logits is an eighth of the context's length."""
    row = [0.0] * V
    row[len(context) % V] = 100.0 + len(context) / 8
    row[(len(context) + 5) % V] = 100.0
    return row
