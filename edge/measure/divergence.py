"""Where two greedy outputs part, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from edgespec.backends.base import Backend, ImageRun, SeesImages
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
    backend: Backend,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    images: Mapping[int, ImageRun] = MappingProxyType({}),
) -> Divergence | None:
    """Compare two outputs for `prompt`; None when they are equal. Empties the cache.

    `images` are those of the prompt, by where they begin.
    """
    if list(plain) == list(other):
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    text = [*prompt, *plain[:position]]
    backend.truncate(0)
    start = 0
    while start < len(text):
        end = min(start + backend.batch_size, len(text))
        if start in images and isinstance(backend, SeesImages):
            logits, end = backend.read_image(images[start]), start + len(images[start].ids)
        else:
            end = min([end, *(place for place in images if place > start)])
            logits = backend.prefill(text[start:end])
        start = end
    gap = top_two_gap(logits)
    backend.truncate(0)
    return Divergence(position, gap)
