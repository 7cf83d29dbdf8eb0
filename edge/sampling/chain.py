"""Samplers one after another, in the order a person asks for.

What is left of a row goes from sampler to sampler as `Left`. The first of them that removes tokens
sorts no more of the vocabulary than it keeps. Rules are llama.cpp's (`src/llama-sampler.cpp`), with
what is removed really gone: none of the later ones counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling import params as names
from edgespec.sampling.best_tokens import (
    Head,
    floor_of_best,
    head_above,
    head_reaching,
    inverse_of,
    softmax_weights,
)
from edgespec.sampling.history import Dry, Penalties
from edgespec.sampling.params import LOWEST, SamplingParams


class Left(NamedTuple):
    """A whole row [V] that may be written to, or what is left of it, best first.

    Logits are still to be multiplied by `inverse`, of a temperature.
    """

    # [V]
    row: NDArray[np.float32]
    head: Head | None = None
    inverse: float = 1.0

    def sorted(self) -> Head:
        """All that is left, best first."""
        return head_above(self.row, LOWEST) if self.head is None else self.head

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits of what is left, masked ones included where nothing was removed."""
        return self.row if self.head is None else self.head.logits

    @property
    def best(self) -> float:
        """The best of them."""
        return float(self.row.max() if self.head is None else self.head.logits[0])

    def above(self, floor: float) -> Left:
        """What has at least this logit."""
        if self.head is None:
            return Left(self.row, head_above(self.row, floor))
        return Left(self.row, self.head.first(int(np.count_nonzero(self.head.logits >= floor))))

    def scaled(self) -> Left:
        """The same logits, multiplied, and the best one 0."""
        # So that no quotient of others overflows before it is infinite.
        scaled = ((self.logits - np.float32(self.best)) * self.inverse).astype(np.float32)
        if self.head is None:
            return Left(scaled)
        return Left(self.row, Head(self.head.ids, scaled))


class Chain:
    """The samplers of `params.samplers` that are on; of greedy decoding, those of its history."""

    def __init__(
        self,
        params: SamplingParams,
        penalties: Penalties | None,
        dry: Dry | None,
        toss: Callable[[], float],
    ) -> None:
        self._params = params
        self._toss = toss
        self._work = np.empty(0, np.float32)
        steps: dict[str, Callable[[Left], Left]] = {
            names.PENALTIES: lambda left: _changed(left, penalties),
            names.DRY: lambda left: _changed(left, dry),
            names.TOP_N_SIGMA: self._top_n_sigma,
            names.TOP_K: self._top_k,
            names.TYPICAL: self._typical,
            names.TOP_P: self._top_p,
            names.MIN_P: lambda left: left.above(left.best + math.log(params.min_p)),
            names.XTC: self._xtc,
            names.TEMPERATURE: self._temperature,
        }
        history = (names.PENALTIES, names.DRY)
        self._steps = [
            steps[name] for name in params.active if name in history or not params.is_greedy
        ]

    def __call__(self, row: NDArray[np.float32]) -> Left:
        """What is left of a row [V], which is written to."""
        left = Left(row)
        for step in self._steps:
            left = step(left if left.inverse == 1.0 else left.scaled())
        return left

    def weights(self, row: NDArray[np.float32], best: float, inverse: float) -> NDArray[np.float32]:
        """exp((logit - best) / temperature) of a whole row [V], to about 1e-6; a work array."""
        if self._work.size != row.size:
            self._work = np.empty(row.size, np.float32)
        weights = self._work
        np.subtract(row, best, out=weights)
        if inverse != 1.0:
            np.multiply(weights, inverse, out=weights)
        np.exp(weights, out=weights)
        return weights

    def _top_n_sigma(self, left: Left) -> Left:
        logits = left.logits
        finite = logits[logits >= LOWEST].astype(np.float64)
        return left.above(float(finite.max()) - self._params.top_n_sigma * float(finite.std()))

    def _top_k(self, left: Left) -> Left:
        count = self._params.top_k
        head = left.head or head_above(left.row, floor_of_best(left.row, count))
        return Left(left.row, head.first(count))

    def _typical(self, left: Left) -> Left:
        head = left.sorted()
        kept = _typical(head.logits, self._params.typical_p)
        return Left(left.row, Head(head.ids[kept], head.logits[kept]))

    def _top_p(self, left: Left) -> Left:
        """The shortest prefix with `top_p` of the probability."""
        best, top_p = left.best, self._params.top_p
        if left.head is None:
            mass = top_p * float(self.weights(left.row, best, 1.0).sum())
            head, cumulative = head_reaching(left.row, best, 1.0, mass)
        else:
            head, cumulative = left.head, np.cumsum(softmax_weights(left.head.logits, best, 1.0))
            mass = top_p * cumulative[-1]
        return Left(left.row, head.first(int(np.searchsorted(cumulative, mass, side="left")) + 1))

    def _xtc(self, left: Left) -> Left:
        """Leaves out all tokens above the threshold but the last of them, sometimes."""
        head = left.sorted()
        if self._toss() >= self._params.xtc_probability:  # a toss for every pick, used or not
            return Left(left.row, head)
        weights = softmax_weights(head.logits, float(head.logits[0]), 1.0)
        above = int(np.count_nonzero(weights >= self._params.xtc_threshold * weights.sum()))
        first = max(0, above - 1)
        return Left(left.row, Head(head.ids[first:], head.logits[first:]))

    def _temperature(self, left: Left) -> Left:
        temperature = self._params.temperature
        if self._params.dynatemp_range > 0.0:
            left = Left(left.row, left.sorted())
            temperature = _dynamic(left.logits, self._params)
        return Left(left.row, left.head, inverse_of(temperature))


def _changed(left: Left, what: Penalties | Dry | None) -> Left:
    """Logits that the history changed, in order again."""
    assert what is not None
    if left.head is None:
        what.change(left.row, None)
        return left
    ids, logits = left.head.ids, left.head.logits.copy()
    places = np.full(left.row.size, -1, dtype=np.int64)
    places[ids] = np.arange(ids.size)
    what.change(logits, places)
    order = np.lexsort((ids, -logits))
    return Left(left.row, Head(ids[order], logits[order]))


def _typical(logits: NDArray[np.float32], mass: float) -> NDArray[np.int64]:
    """Places of the tokens whose surprise is nearest to its mean, until they have `mass`.

    Surprise is -ln p of a token, of logits [k] in descending order; its mean is the entropy.
    """
    weights = softmax_weights(logits, float(logits[0]), 1.0)
    total = float(weights.sum())
    surprise = math.log(total) - (logits.astype(np.float64) - float(logits[0]))
    weights /= total
    surprise -= float(weights @ surprise)
    np.abs(surprise, out=surprise)
    order = np.argsort(surprise, kind="stable")
    reached = np.cumsum(weights[order])
    count = int(np.searchsorted(reached, mass, side="right")) + 1
    return np.sort(order[:count])


def _dynamic(logits: NDArray[np.float32], params: SamplingParams) -> float:
    """A temperature between its bounds, by the entropy of logits [k] over the largest possible."""
    if logits.size < 2:
        return params.temperature
    weights = softmax_weights(logits, float(logits[0]), 1.0)
    total = float(weights.sum())
    weights /= total
    surprise = math.log(total) - (logits.astype(np.float64) - float(logits[0]))
    share = min(1.0, max(0.0, float(weights @ surprise) / math.log(logits.size)))
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    return low + (high - low) * float(share**params.dynatemp_exponent)


class Mirostat:
    """Keeps the surprise of what is drawn near a target (mirostat 2, arXiv 2007.14966).

    `mu` is the largest surprise a token may have now, in bits; it goes down after surprising tokens
    and up after others.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._mu = 2.0 * params.mirostat_tau
        # What was drawn from last: ids [k] and their surprise in bits [k].
        self._last: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None

    def __call__(self, row: NDArray[np.float32]) -> Left:
        """What is left of a row [V]; logits are divided by the temperature."""
        best = float(row.max())
        inverse = inverse_of(self._params.temperature)
        scaled = ((row - np.float32(best)) * np.float32(inverse)).astype(np.float32)
        total = float(np.exp(scaled.astype(np.float64)).sum())
        head = head_above(scaled, min(0.0, math.log(total) - self._mu * math.log(2.0)))
        weights = np.exp(head.logits.astype(np.float64))
        self._last = head.ids, np.log2(float(weights.sum()) / weights)
        return Left(row, head)

    def record(self, token: int) -> None:
        """Learn from the token that was emitted."""
        if self._last is None:
            return
        ids, surprise = self._last
        places = np.flatnonzero(ids == token)
        if places.size:
            error = float(surprise[places[0]]) - self._params.mirostat_tau
            self._mu -= self._params.mirostat_eta * error
        self._last = None
