"""Words of three tokens, whose law is known, and whether samples have it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgespec.decode.engine import Engine
from edgespec.sampling.params import SamplingParams

WORD_SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)
WORD_V = 5
# By place in the word, first and second token.
WORD_LOGITS: list[list[list[list[float]]]] = (
    np.random.default_rng(11).normal(0.0, 1.2, (3, WORD_V, WORD_V, WORD_V)).tolist()
)


def words_model(context: tuple[int, ...]) -> Sequence[float]:
    """Words of three tokens: a token depends on the earlier ones of its own word, and its place.

    So the words of a long text are independent samples of one distribution over 125 words.
    """
    place, first, second = word_state(context)
    return WORD_LOGITS[place][first][second]


def word_state(context: tuple[int, ...]) -> tuple[int, int, int]:
    """Place in the word, and its first and second token where they are there."""
    place = len(context) % 3
    return place, context[-place] if place else 0, context[-1] if place == 2 else 0


def slow_probabilities(logits: Sequence[float], temperature: float, top_p: float) -> list[float]:
    """Top-p before the temperature, written down as it is defined."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    total = math.fsum(math.exp(logit) for logit in logits)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += math.exp(logits[token]) / total
        if mass >= top_p:
            break
    weights = [math.exp(logits[t] / temperature) if t in kept else 0.0 for t in range(len(logits))]
    return [weight / math.fsum(weights) for weight in weights]


def distribution_of_words(temperature: float, top_p: float) -> dict[tuple[int, ...], float]:
    """Word -> probability, for the words that are possible."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        distribution = {
            (*word, token): chance * p
            for word, chance in distribution.items()
            for token, p in enumerate(
                slow_probabilities(words_model((0, 0, 0, *word)), temperature, top_p)
            )
            if p > 0.0
        }
    return distribution


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(a, x): by series, or continued fraction.

    Numerical Recipes, section 6.2.
    """
    front = math.exp(-x + a * math.log(x) - math.lgamma(a)) if x > 0 else 0.0
    if x < a + 1:
        term = total = 1.0 / a
        for n in range(1, 2000):
            term *= x / (a + n)
            total += term
        return 1.0 - front * total
    b = x + 1.0 - a
    c, d = 1e300, 1.0 / b
    fraction = d
    for n in range(1, 2000):
        step = -n * (n - a)
        b += 2.0
        d = 1.0 / (step * d + b)
        c = b + step / c
        fraction *= c * d
    return front * fraction


def chi_square_p(
    counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]
) -> float:
    """Chance that samples of `distribution` deviate as much as `counts` or more.

    Rare words are counted together, so that at least five are expected in each cell.
    """
    statistic, num_cells = 0.0, 0
    observed, expected = 0, 0.0
    for word in sorted(distribution, key=lambda word: distribution[word]):
        observed += counts[word]
        expected += distribution[word] * sum(counts.values())
        if expected >= 5.0:
            statistic += (observed - expected) ** 2 / expected
            num_cells += 1
            observed, expected = 0, 0.0
    return upper_gamma((num_cells - 1) / 2, statistic / 2)


def words_of(engine: Engine, num_words: int) -> Counter[tuple[int, ...]]:
    """The words of texts of 100 words each, and a check that drafts were accepted."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(num_words // 100):
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
        result = engine.generate([0, 0, 0], max_tokens=300, sampling=params)
        ids = result.token_ids
        counts.update(ids[i : i + 3] for i in range(0, 300, 3))
        accepted += result.counters.accepted_tokens
    assert accepted > 0.1 * 3 * num_words
    return counts


def twisted_model(context: tuple[int, ...]) -> Sequence[float]:
    """The draft model of above as logits."""
    logits = words_model(context)
    return [0.7 * logit + 0.2 * token for token, logit in enumerate(logits)]
