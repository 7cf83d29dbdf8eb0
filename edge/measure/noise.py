"""Batch noise: how much a token's logits depend on what else is in its step.

Kernels add numbers up in an order that depends on the number of rows, and floating-point sums
depend on the order. Where the noise is zero, speculative greedy output equals plain output bit for
bit. Where it is not, plain decoding has several roundings itself, and outputs may part where the
two best logits are closer than the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

import numpy as np

from edgespec.backends.base import Backend, DraftTree, ImageRun, Logits, SeesImages
from edgespec.errors import UnsupportedError
from edgespec.sampling.sampling import top_two_gap

_DEPTHS = (64, 640)  # tokens in the cache; llama.cpp's CPU attention changes its path at 512
_NUM_TOKENS = 64
_TEXT = (
    "The harbour master kept two ledgers, one for the ships that came and one for those that did "
    "not. On the {i}th morning of the month she wrote {n} names into the first and none into the "
    "second, closed both, and went down to the quay, where a boy was selling oranges at {n} pence "
    "a dozen. def price(dozens): return dozens * {n}  # in pence, as agreed\n"
)


def measure_batch_noise(backend: Backend, depths: Sequence[int] = _DEPTHS) -> float:
    """How far step sizes can move the gap between two good logits; 0.0 if they cannot.

    A text is decoded token by token and again in steps of several sizes, at several depths of
    context; each way keeps its own rounding in the cache, as in a real run. What is looked at is
    the change of the difference between the best logit and each of the next seven. A text of
    a few dozen tokens does not show the rarest changes, so the number is six standard deviations
    of them, beyond which a normal variable lies once in 5e8 draws (or the largest one seen, if that
    is more). The cache is empty afterwards.
    """
    sizes = [size for size in (2, 3, 4, 8, 16, 32) if size <= backend.max_nodes]
    text, depths = _text_for(backend, depths, _NUM_TOKENS)
    noise = 0.0
    for depth in depths:
        singles = []  # the best tokens of each row, and their logits
        for row in _decode_in_steps(backend, text, depth, 1):
            ids = np.argsort(row)[::-1][:8]
            singles.append((ids, row[ids].astype(np.float64)))
        for size in sizes:
            batches = _decode_in_steps(backend, text, depth, size)
            pairs = zip(singles, batches, strict=True)
            moved = np.array([row[ids] - logits for (ids, logits), row in pairs])
            changes = np.abs(moved[:, 1:] - moved[:, :1])
            deviation = float(np.sqrt(np.mean(changes**2)))
            noise = max(noise, float(changes.max()), 6.0 * deviation)
    backend.truncate(0)
    return noise


def tested_depth(backend: Backend) -> int:
    """Up to how many tokens in the cache steps are compared here: no further than its context."""
    return min(backend.context_size, _DEPTHS[-1] + _NUM_TOKENS)


def largest_invariant_step(
    backend: Backend,
    depths: Sequence[int] = _DEPTHS,
    sizes: Sequence[int] = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32),  # rows in fours and eights
    progress: Callable[[float], None] = lambda _fraction: None,
) -> int:
    """Up to how many nodes a step gives, bit for bit, the logits of one-token steps.

    1 says that no step of several tokens does. Kernels change with the number of rows (Qwen's Q6_K
    head rounds differently from 8 on), so sizes are tried upwards to the first that differs. The
    cache is empty afterwards.
    """
    largest = backend.max_nodes
    sizes = sorted({largest, *(size for size in sizes if size < largest)} - {1})
    text, depths = _text_for(backend, depths, _NUM_TOKENS)
    for i, depth in enumerate(depths):
        singles = _digests(_decode_in_steps(backend, text, depth, 1))
        for j, size in enumerate(sizes):
            progress((i + (j + 1) / (len(sizes) + 1)) / len(depths))
            if _digests(_decode_in_steps(backend, text, depth, size)) != singles:
                sizes = sizes[:j]
                break
    backend.truncate(0)
    return sizes[-1] if sizes else 1


def prefill_is_invariant(backend: Backend, step: int, depths: Sequence[int] = _DEPTHS) -> bool:
    """Whether a prompt's batches leave, bit for bit, what steps of up to `step` tokens leave.

    Then a cache that holds an answer is the same as one that was prefilled with it. A whole batch
    of a text is fed both ways, and the logits after it are compared. The cache is empty afterwards.
    """
    count = min(backend.context_size - 2, max(_NUM_TOKENS, backend.batch_size))
    text, depths = _text_for(backend, depths, count + 1)  # and the token that shows it
    same = True
    for depth in depths:
        end = depth + count
        backend.truncate(0)
        _prefill_to(backend, text, end)
        batched = _digests(backend.verify(DraftTree.chain(text[:1])))
        backend.truncate(0)
        _prefill_to(backend, text, depth)
        for start in range(depth, end, step):
            tokens = text[start : min(start + step, end)]
            backend.verify(DraftTree.chain(tokens))
            backend.commit(range(len(tokens)))
        same = same and _digests(backend.verify(DraftTree.chain(text[:1]))) == batched
    backend.truncate(0)
    return same


def _prefill_to(backend: Backend, text: list[int], depth: int) -> None:
    while backend.length < depth:
        backend.prefill(text[backend.length : min(depth, backend.length + backend.batch_size)])


def _decode_in_steps(backend: Backend, text: list[int], depth: int, size: int) -> Iterator[Logits]:
    """Logits of the tokens from `depth` on, decoded `size` at a time; views, as in `verify`."""
    backend.truncate(depth)
    _prefill_to(backend, text, depth)
    for start in range(depth, depth + _NUM_TOKENS, size):
        tokens = text[start : min(start + size, depth + _NUM_TOKENS)]
        yield from backend.verify(DraftTree.chain(tokens))
        backend.commit(range(len(tokens)))


def _digests(rows: Iterable[Logits]) -> list[bytes]:
    """A fingerprint of each row: a plan has no room for copies of rows, not even for one."""
    return [blake2b(row.data, digest_size=16).digest() for row in rows]


def _text_for(
    backend: Backend, depths: Sequence[int], count: int
) -> tuple[list[int], Sequence[int]]:
    """Prose, numbers and code that do not repeat, and the depths behind which `count` fit.

    Raises UnsupportedError where none do.
    """
    room = backend.context_size - count
    if room < 1:
        raise UnsupportedError(
            f"batch noise needs a context of more than {count} tokens", hint="raise --ctx"
        )
    depths = sorted({min(depth, room) for depth in depths})
    ids: list[int] = []
    for i in itertools.count(1):
        if len(ids) >= depths[-1] + count:
            break
        part = backend.tokenizer.encode(_TEXT.format(i=i, n=7 * i % 31), add_special=i == 1)
        if not part:
            raise UnsupportedError("the model's vocabulary has no tokens for plain English text")
        ids += part
    return ids[: depths[-1] + count], depths


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
