"""Where two greedy outputs part, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.backends.base import Backend
from edgespec.sampling.sampling import top_two_gap


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where two outputs differ.

    `gap` is the difference of the target's two best logits there: a gap below the batch noise of
    the backend means that the target itself was undecided.
    """

    position: int
    gap: float


def find_divergence(
    backend: Backend, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Compare two outputs for `prompt`; None when they are equal. Empties the cache."""
    if list(plain) == list(other):
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    text = [*prompt, *plain[:position]]
    backend.truncate(0)
    for start in range(0, len(text), backend.batch_size):
        logits = backend.prefill(text[start : start + backend.batch_size])
    gap = top_two_gap(logits)
    backend.truncate(0)
    return Divergence(position, gap)
