"""What a file lost against its source: KL divergence, agreement and perplexity over texts.

    KL(p || q) = sum over tokens i of p_i log(p_i / q_i),   p of the source, q of the candidate

Of the source's distribution the likeliest tokens are kept at each place (`TOP` of them in
searches), and all others as one: the sum over this coarser partition is never more than the KL
divergence, and less only by what p and q differ in how they share out a mass of p that is small
(`Reference.rest` says how much it is). Probabilities of the kept tokens are exact: they are
normalised over the whole vocabulary.
Intervals are bootstrap percentiles over texts, since places of one text are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from edgespec.quantize.context import EvalContext
from edgespec.quantize.texts import CountedText

TOP = 512
_BATCH = 128  # tokens whose logits are looked at together
_PIECE_BYTES = 1 << 20  # of logits that are looked at together: their order takes twice as much
_RESAMPLES = 2000
_LEVEL = 0.95
_LEAST = 1e-12  # a mass that rounding left at nothing or below

if TYPE_CHECKING:
    from typing_extensions import Unpack

PartDone = Callable[[float], None]  # is told which part is done (0..1)
# By batch: logits [n, V] at counted places, and the tokens [n] that follow them.
Places: TypeAlias = Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]


class Loading(TypedDict, total=False):
    """How a file is loaded to be read, as `EvalContext` takes it."""

    batch_size: int
    kv_type: str
    kernels: bool
    tied: bool
    gpu_layers: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What the source says over some texts; P places in all, in the order of the texts."""

    texts: tuple[CountedText, ...]
    ids: NDArray[np.int32]  # [P, top], the likeliest first
    log_p: NDArray[np.float32]  # [P, top]
    rest: NDArray[np.float32]  # [P], mass of all other tokens
    next_log_p: NDArray[np.float32]  # [P], of the token that follows in the text

    def first(self, count: int) -> Reference:
        """The same for the first `count` texts."""
        texts = self.texts[:count]
        end = sum(int(text.counted.sum()) for text in texts)
        return Reference(
            texts, self.ids[:end], self.log_p[:end], self.rest[:end], self.next_log_p[:end]
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class QuantizationLoss:
    """What a candidate lost. KL is in nats; the ratio of perplexities is candidate over source."""

    kl: Interval
    agreement: Interval
    perplexity: float
    perplexity_ratio: Interval
    places: int


def make_reference(
    model: Path,
    texts: Sequence[CountedText],
    *,
    threads: int,
    top: int = TOP,
    progress: PartDone = lambda _part: None,
    **loading: Unpack[Loading],
) -> Reference:
    """Run the source over texts and keep what comparisons need.

    `top` tokens of each place take 8 bytes each.
    """
    parts: list[tuple[NDArray[Any], ...]] = []
    for logits, next_ids in _places(model, texts, threads, progress, loading):
        top = min(top, logits.shape[1] - 1)
        ids = np.argpartition(logits, -top, axis=1)[:, -top:]
        values = np.take_along_axis(logits, ids, axis=1)
        order = np.argsort(-values, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        norm = _log_sum(logits)
        log_p = np.take_along_axis(values, order, axis=1) - norm[:, None]
        rest = np.maximum(1.0 - np.exp(log_p, dtype=np.float64).sum(axis=1), 0.0)
        next_log_p = logits[np.arange(len(logits)), next_ids] - norm
        parts.append((ids.astype(np.int32), log_p, rest.astype(np.float32), next_log_p))
    kept: list[NDArray[Any]] = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return Reference(tuple(texts), *kept)


@dataclass(frozen=True, slots=True)
class Scores:
    """A candidate beside the source at each place, [P]."""

    kl: NDArray[np.float32]
    agrees: NDArray[np.bool_]
    next_log_q: NDArray[np.float32]


def score(
    model: Path | Sequence[Path],
    reference: Reference,
    *,
    threads: int,
    **loading: Unpack[Loading],
) -> Scores:
    """Run a candidate over the reference's texts."""
    kl, agrees, next_log_q = [], [], []
    start = 0
    for logits, next_ids in _places(model, reference.texts, threads, lambda _part: None, loading):
        rows = slice(start, start + len(logits))
        start = rows.stop
        norm = _log_sum(logits)
        ids, log_p = reference.ids[rows], reference.log_p[rows].astype(np.float64)
        log_q = np.take_along_axis(logits, ids, axis=1) - norm[:, None].astype(np.float64)
        rest_p = np.maximum(reference.rest[rows], _LEAST).astype(np.float64)
        rest_q = np.maximum(1.0 - np.exp(log_q).sum(axis=1), _LEAST)
        inside = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
        kl.append(inside + rest_p * np.log(rest_p / rest_q))
        agrees.append(logits.argmax(axis=1) == ids[:, 0])
        next_log_q.append(logits[np.arange(len(logits)), next_ids] - norm)
    return Scores(np.concatenate(kl), np.concatenate(agrees), np.concatenate(next_log_q))


def _places(
    model: Path | Sequence[Path],
    texts: Sequence[CountedText],
    threads: int,
    progress: PartDone,
    loading: Loading,
) -> Places:
    longest = max(len(text.tokens) for text in texts)
    how: Loading = {"batch_size": _BATCH, **loading}
    with EvalContext(model, context_size=longest, threads=threads, **how) as context:
        for number, text in enumerate(texts):
            for start, logits in context.score(text.tokens):
                chosen = np.flatnonzero(text.counted[start : start + len(logits)])
                rows = max(1, _PIECE_BYTES // logits[0].nbytes)
                for at in range(0, len(chosen), rows):
                    places = chosen[at : at + rows]
                    first, end = places[0], places[-1] + 1
                    is_whole = end - first == len(places)
                    piece = logits[first:end] if is_whole else logits[places]
                    yield piece, text.tokens[start + places + 1]
            progress((number + 1) / len(texts))


def _log_sum(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """log of the sum of exp over each row, [n]."""
    most = logits.max(axis=1)
    shifted = logits - most[:, None]
    np.exp(shifted, out=shifted)
    total: NDArray[np.float32] = most + np.log(shifted.sum(axis=1))
    return total


def quality_of(reference: Reference, scores: Scores, *, seed: int = 0) -> QuantizationLoss:
    """Means over all places and their intervals, resampled by text."""
    ends = np.cumsum([int(text.counted.sum()) for text in reference.texts])[:-1]
    counts = np.array([int(text.counted.sum()) for text in reference.texts], np.float64)
    lost = reference.next_log_p - scores.next_log_q
    sums = np.array(
        [
            [part.sum(dtype=np.float64) for part in np.split(values, ends)]
            for values in (scores.kl, scores.agrees, lost)
        ]
    )
    picks = np.random.default_rng(seed).integers(len(counts), size=(_RESAMPLES, len(counts)))
    drawn = sums[:, picks].sum(axis=2) / counts[picks].sum(axis=1)
    tail = 50 * (1 - _LEVEL)
    low, high = np.percentile(drawn, [tail, 100 - tail], axis=1)
    mean = sums.sum(axis=1) / counts.sum()
    perplexity = float(np.exp(-scores.next_log_q.mean(dtype=np.float64)))
    kl, agreement = (Interval(float(mean[i]), float(low[i]), float(high[i])) for i in (0, 1))
    ratio = Interval(*(float(np.exp(part[2])) for part in (mean, low, high)))
    return QuantizationLoss(kl, agreement, perplexity, ratio, int(counts.sum()))
