"""Batch noise: how much a token's logits depend on what else is in its step.

Kernels add numbers up in an order that depends on the number of rows, and floating-point sums
depend on the order. Where the noise is zero, speculative greedy output equals plain output bit for
bit. Where it is not, plain decoding has several roundings itself, and outputs may part where the
two best logits are closer than the noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import Backend, Logits
from edgespec.tree import DraftTree

_DEPTHS = (64, 640)  # tokens in the cache; llama.cpp's CPU attention changes its path at 512
_SIZES = (2, 3, 4, 5, 8, 16, 32)
_NUM_BEST = 8


def measure_batch_noise(
    backend: Backend, depths: Sequence[int] = _DEPTHS, sizes: Sequence[int] = _SIZES
) -> float:
    """Largest change of a gap between good logits when a step's size changes; 0.0 if none.

    Compares single-token steps with batches of several sizes at several depths of context. The
    number is the largest change, over all rows, of the difference between the best logit and
    one of the next seven. The cache is empty afterwards.
    """
    noise = 0.0
    for depth in depths:
        if depth + max(sizes) <= backend.context_size:
            noise = max(noise, _noise_at(backend, depth, sizes))
    backend.truncate(0)
    return noise


def _noise_at(backend: Backend, depth: int, sizes: Sequence[int]) -> float:
    backend.truncate(0)
    text = _text(backend, depth + max(sizes))
    for start in range(0, depth, backend.batch_size):
        backend.prefill(text[start : min(depth, start + backend.batch_size)])
    rows = []
    for token in text[depth:]:
        rows.append(backend.verify(DraftTree.chain((token,)))[0].copy())
        backend.commit([0])
    noise = 0.0
    for size in sizes:
        if size > backend.max_nodes or not _go_back(backend, text, depth):
            continue
        batch = backend.verify(DraftTree.chain(text[depth : depth + size]))
        noise = max(noise, *(_gap_change(rows[i], batch[i]) for i in range(size)))
    return noise


def _go_back(backend: Backend, text: list[int], depth: int) -> bool:
    """Return to `depth` tokens, by prefilling again where the cache cannot go back."""
    backend.truncate(depth)
    while backend.length < depth:
        backend.prefill(text[backend.length : min(depth, backend.length + backend.batch_size)])
    return True


def _gap_change(single: Logits, batch: Logits) -> float:
    best = np.argpartition(single, -_NUM_BEST)[-_NUM_BEST:]
    change = (batch[best] - single[best]).astype(np.float64)
    top = change[np.argmax(single[best])]
    return float(np.max(np.abs(change - top))) if np.any(batch != single) else 0.0


def _text(backend: Backend, length: int) -> list[int]:
    """Tokens that vary without repeating soon (a linear congruence over the vocabulary)."""
    vocab_size = backend.tokenizer.vocab_size
    return [(7919 * i + 271) % vocab_size for i in range(length)]
