"""Rows of logits, and the slow, obvious sampler chain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

Row = NDArray[np.float32]


def row_of(*logits: float) -> Row:
    """A row of logits that nothing can write to, like a view on a backend's buffer."""
    row = np.array(logits, dtype=np.float32)
    row.flags.writeable = False
    return row


def random_row(rng: np.random.Generator, vocab_size: int, *, ties: bool = False) -> Row:
    """Logits as a model gives them: a broad bulk, some likely tokens, some masked ones."""
    row = rng.normal(0.0, 2.0, vocab_size)
    row[rng.choice(vocab_size, 30)] += np.linspace(2.0, 14.0, 30)
    row[rng.choice(vocab_size, 50)] = -np.inf
    logits: Row = (np.round(row) if ties else row).astype(np.float32)
    logits.flags.writeable = False
    return logits


def slow_change(row: Row, params: SamplingParams, history: Sequence[int]) -> Row:
    """Bias and penalties in float32, one token after another."""
    changed: Row = row.copy()
    for token, bias in dict(params.logit_bias).items():
        changed[token] += np.float32(bias)
    last_n = params.penalty_last_n
    recent = history if last_n < 0 else history[max(len(history) - last_n, 0) :]
    factor = np.float32(params.repetition_penalty)
    for token, count in Counter(recent).items():
        logit = changed[token]
        logit = logit / factor if logit > 0 else logit * factor
        frequency = np.float32(count) * np.float32(params.frequency_penalty)
        changed[token] = logit - (frequency + np.float32(params.presence_penalty))
    return changed


def slow_law(
    row: Row, params: SamplingParams, history: Sequence[int] = ()
) -> tuple[dict[int, float], float]:
    """Token -> probability, best first, and how near (relatively) top-p came to another cut."""
    row = slow_change(row, params, history)
    best = float(row.max())
    order = [int(t) for t in np.lexsort((np.arange(row.size), -row)) if row[t] > -np.inf]
    if params.temperature == 0.0:
        return {order[0]: 1.0}, 1.0
    if params.top_k:
        order = order[: params.top_k]
    margin = 1.0
    if params.top_p < 1.0:
        weights = [math.exp(float(row[t]) - best) for t in order]
        mass = params.top_p * math.fsum(weights)
        total, size = 0.0, 0
        for weight in weights:
            total, size = total + weight, size + 1
            margin = min(margin, abs(total - mass))
            if total >= mass:
                break
        order = order[:size]
    if params.min_p > 0.0:
        floor = np.float32(best + math.log(params.min_p))
        order = [t for t in order if row[t] >= floor]
    weights = [math.exp((float(row[t]) - best) / params.temperature) for t in order]
    total = math.fsum(weights)
    return {t: w / total for t, w in zip(order, weights, strict=True)}, margin


def assert_law(sampler: Sampler, row: Row, expected: Mapping[int, float]) -> None:
    ids, probabilities = sampler.distribution(row)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(probabilities, list(expected.values()), rtol=1e-9, atol=1e-300)


def chi_square_odds(statistic: float, degrees: int) -> float:
    """Probability of a larger statistic; exact for even degrees of freedom (a Poisson sum)."""
    assert degrees % 2 == 0
    half = statistic / 2.0
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))
