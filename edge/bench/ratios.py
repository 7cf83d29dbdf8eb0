"""Ratios of speed and how far they can be trusted.

A ratio is tokens/s over tokens/s, each over the same prompts together. Its interval is the
percentile bootstrap over prompts (Efron 1979): prompts are what would differ in another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 2000
_BLOCK = 200  # resamples at once: what they take together stays below some MiB
_LOW, _HIGH = 2.5, 97.5  # percentiles


@dataclass(frozen=True, slots=True)
class Timed:
    """How many tokens an answer had, and how long they took."""

    tokens: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 for an answer without any."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, and the 95% interval; one prompt alone has none."""

    value: float
    low: float | None
    high: float | None


def rate(answers: Sequence[Timed]) -> float:
    """Tokens per second over all answers together."""
    return Timed(sum(a.tokens for a in answers), sum(a.seconds for a in answers)).per_s


def ratio_of(answers: Sequence[Timed], baseline: Sequence[Timed]) -> Ratio:
    """`answers` over `baseline`, prompt by prompt the same questions.

    >>> ratio_of([Timed(8, 1.0)] * 3, [Timed(4, 1.0)] * 3)
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    # [4, prompts]: tokens and seconds of both.
    table = np.array(
        [
            [a.tokens for a in answers],
            [a.seconds for a in answers],
            [b.tokens for b in baseline],
            [b.seconds for b in baseline],
        ],
        dtype=np.float64,
    )
    value, number = float(_ratios(table.sum(axis=1))), len(answers)
    if number < 2:
        return Ratio(value, None, None)
    chooser = np.random.default_rng(0)
    resampled = []
    for _ in range(_RESAMPLES // _BLOCK):
        chosen = chooser.integers(number, size=(_BLOCK, number))
        resampled.append(_ratios(table[:, chosen].sum(axis=2)))
    low, high = np.percentile(np.concatenate(resampled), (_LOW, _HIGH))
    return Ratio(value, float(low), float(high))


def interval_text(low: float | None, high: float | None) -> str:
    """The interval in brackets; a dash where there is none."""
    return "-" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def _ratios(sums: np.ndarray) -> np.ndarray:
    tokens, seconds, base_tokens, base_seconds = np.maximum(sums, 1e-9)
    return np.asarray((tokens / seconds) / (base_tokens / base_seconds))


def median_repeat(answers: Sequence[Timed], baseline: Sequence[Timed]) -> int:
    """Which repeat of one prompt to count: the one with the median ratio, the lower of two.

    Both sides of a pair were measured one after the other, so pairs are kept together.
    """
    ratios = [a.per_s / max(1e-9, b.per_s) for a, b in zip(answers, baseline, strict=True)]
    return sorted(range(len(ratios)), key=ratios.__getitem__)[(len(ratios) - 1) // 2]
