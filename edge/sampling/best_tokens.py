"""The best tokens of a row of logits, without sorting the whole row, and how probable they are.

One order is meant everywhere: best logit first, equal logits by token id. A `Head` is a prefix of
it, and what the filters of the sampler chain keep is always one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling.params import LOWEST

# The smallest finite logit: at or above it is every token that is not masked.
# Keeps 1/temperature away from 0 and infinity, where float32 would turn 0 * inf into NaN.
_INVERSE_TEMPERATURE_RANGE = (1e-30, 1e30)
# How many of the best tokens to sort before sorting all of them.
_HEAD_SIZES = (256, 4096)


class Head(NamedTuple):
    """The best tokens: descending logits, equal logits by ascending id."""

    # [k]
    ids: NDArray[np.int64]
    # [k]
    logits: NDArray[np.float32]

    def first(self, count: int) -> Head:
        return Head(self.ids[:count], self.logits[:count])


def inverse_of(temperature: float) -> float:
    """1 / temperature, within what float32 can multiply with."""
    low, high = _INVERSE_TEMPERATURE_RANGE
    return high if temperature == 0.0 else min(max(1.0 / temperature, low), high)


def softmax_weights(
    logits: NDArray[np.float32], best: float, inverse_temperature: float
) -> NDArray[np.float64]:
    """exp((logit - best) / temperature) of logits [k], in float64."""
    weights: NDArray[np.float64] = np.exp(
        (logits.astype(np.float64) - best) * inverse_temperature,
    )
    return weights


def head_above(row: NDArray[np.float32], floor: float) -> Head:
    """All tokens of a row [V] with a logit of at least `floor`, masked ones never.

    Sorts one integer a token, its logit above its id: three times as fast on 4,096 tokens, and
    fourteen times on 151,936, as a stable argsort of the logits.
    """
    ids = np.flatnonzero(row >= max(floor, LOWEST))
    # Descending becomes ascending, and -0.0 becomes the 0.0 it equals.
    bits = (0.0 - row[ids]).view(np.int32)
    # The bits of IEEE numbers ascend as the numbers do, except among negative ones.
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.astype(np.int64)
    keys <<= 32
    keys |= ids
    keys.sort()
    keys &= 0xFFFFFFFF
    return Head(keys, row[keys])


def floor_of_best(row: NDArray[np.float32], count: int) -> float:
    """A logit that at least `count` tokens reach, and seldom many more.

    The row is laid out in columns, several times as many as tokens are wanted. `count` columns
    have a maximum of at least the count-th best maximum, so `count` tokens do. This is one pass,
    where selecting from the whole row takes several. Rows too short for it give the lowest logit.
    """
    num_columns = max(1024, 4 * count)
    num_rows = row.size // num_columns
    if num_rows < 2:
        return LOWEST
    maxima = row[: num_rows * num_columns].reshape(num_rows, num_columns).max(axis=0)
    index = num_columns - count
    return float(np.partition(maxima, index)[index])


def head_reaching(
    row: NDArray[np.float32],
    best: float,
    inverse_temperature: float,
    mass: float,
    floor: float = LOWEST,
) -> tuple[Head, NDArray[np.float64]]:
    """Best tokens enough for their summed weights [k] to exceed `mass`, not going below `floor`.

    The sums come with them. If even all tokens down to `floor` do not exceed it, they are all.
    """
    for size in _HEAD_SIZES:
        reached = floor_of_best(row, size)
        if reached <= floor:
            break
        head = head_above(row, reached)
        cumulative = np.cumsum(softmax_weights(head.logits, best, inverse_temperature))
        if cumulative[-1] > mass:
            return head, cumulative
    head = head_above(row, floor)
    return head, np.cumsum(softmax_weights(head.logits, best, inverse_temperature))


class TokenLogprob(NamedTuple):
    """A token that was written, and the best ones at its place: what the model says of them.

    That is before bias, penalties, filters, temperature and grammars, whatever was picked.
    `best` has pairs of a token and its logarithm, best first, equals by id. All are natural
    logarithms; minus infinity is a token that the model rules out.
    """

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


def logprob_of(logits_row: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
    """Log-probability of `token` and of the `count` best ones, of logits [V].

    One work array of V float32 numbers is allocated; 0.1 ms for 50,000 tokens.
    """
    most = float(logits_row.max())
    with np.errstate(all="ignore"):
        weights = logits_row - np.float32(most)
        np.exp(weights, out=weights)
    total = most + math.log(float(weights.sum(dtype=np.float64)))
    best: tuple[tuple[int, float], ...] = ()
    if count:
        head = head_above(logits_row, floor_of_best(logits_row, count)).first(count)
        best = tuple((int(i), float(x) - total) for i, x in zip(*head, strict=True))
    return TokenLogprob(token, float(logits_row[token]) - total, best)
