"""Samplers one after another, in the order a person asks for.

The usual ones in the usual order have shortcuts (`sampling.py`); everything else runs here. What
is left of a row goes from sampler to sampler as `Left`: tokens and their logits, which the next
one takes for probabilities. Rules are llama.cpp's (`src/llama-sampler.cpp`), with what is removed
really gone: none of the later ones counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling import params as names
from edgespec.sampling.best_tokens import (
    LOWEST,
    Head,
    floor_of_best,
    head_above,
    inverse_of,
    softmax_weights,
    top_p_head,
)
from edgespec.sampling.history import Dry, Penalties
from edgespec.sampling.params import SamplingParams


class Left(NamedTuple):
    """A whole row [V] that may be written to, or what is left of it, best first."""

    # [V]
    row: NDArray[np.float32]
    head: Head | None = None

    def sorted(self) -> Head:
        """All that is left, best first."""
        return head_above(self.row, LOWEST) if self.head is None else self.head

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits of what is left, masked ones included where nothing was removed."""
        return self.row if self.head is None else self.head.logits


class Chain:
    """The samplers of `params.samplers` that are on."""

    def __init__(
        self,
        params: SamplingParams,
        penalties: Penalties | None,
        dry: Dry | None,
        toss: Callable[[], float],
    ) -> None:
        self._params = params
        self._toss = toss
        steps: dict[str, tuple[bool, Callable[[Left], Left]]] = {
            names.PENALTIES: (penalties is not None, lambda left: _changed(left, penalties)),
            names.DRY: (dry is not None, lambda left: _changed(left, dry)),
            names.TOP_N_SIGMA: (params.top_n_sigma > 0.0, self._top_n_sigma),
            names.TOP_K: (params.top_k > 0, self._top_k),
            names.TYPICAL: (params.typical_p < 1.0, self._typical),
            names.TOP_P: (params.top_p < 1.0, self._top_p),
            names.MIN_P: (params.min_p > 0.0, self._min_p),
            names.XTC: (params.uses_xtc, self._xtc),
            names.TEMPERATURE: (True, self._temperature),
        }
        self._steps = [steps[name][1] for name in params.samplers if steps[name][0]]

    def __call__(self, row: NDArray[np.float32]) -> Head:
        """What is left of a row [V], which is written to: logits whose weights are drawn by."""
        left = Left(row)
        for step in self._steps:
            left = step(left)
        return left.sorted()

    def _top_n_sigma(self, left: Left) -> Left:
        logits = left.logits
        finite = logits[logits >= LOWEST].astype(np.float64)
        floor = float(finite.max()) - self._params.top_n_sigma * float(finite.std())
        if left.head is None:
            return Left(left.row, head_above(left.row, floor))
        return Left(left.row, left.head.first(int(np.count_nonzero(left.head.logits >= floor))))

    def _top_k(self, left: Left) -> Left:
        count = self._params.top_k
        if left.head is None:
            return Left(left.row, head_above(left.row, floor_of_best(left.row, count)).first(count))
        return Left(left.row, left.head.first(count))

    def _typical(self, left: Left) -> Left:
        head = left.sorted()
        kept = _typical(head.logits, self._params.typical_p)
        return Left(left.row, Head(head.ids[kept], head.logits[kept]))

    def _top_p(self, left: Left) -> Left:
        head = left.sorted()
        return Left(left.row, top_p_head(head, float(head.logits[0]), self._params.top_p))

    def _min_p(self, left: Left) -> Left:
        floor = float(left.logits.max()) + math.log(self._params.min_p)
        if left.head is None:
            return Left(left.row, head_above(left.row, floor))
        return Left(left.row, left.head.first(int(np.count_nonzero(left.head.logits >= floor))))

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
        best = float(left.logits.max())
        # Best logits become 0, so that no quotient of others overflows before it is infinite.
        scaled = ((left.logits - np.float32(best)) * inverse_of(temperature)).astype(np.float32)
        if left.head is None:
            return Left(scaled)
        return Left(left.row, Head(left.head.ids, scaled))


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

    def __call__(self, row: NDArray[np.float32]) -> Head:
        """What is left of a row [V]; logits are divided by the temperature."""
        best = float(row.max())
        inverse = inverse_of(self._params.temperature)
        scaled = ((row - np.float32(best)) * np.float32(inverse)).astype(np.float32)
        total = float(np.exp(scaled.astype(np.float64)).sum())
        head = head_above(scaled, min(0.0, math.log(total) - self._mu * math.log(2.0)))
        weights = np.exp(head.logits.astype(np.float64))
        self._last = head.ids, np.log2(float(weights.sum()) / weights)
        return head

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
