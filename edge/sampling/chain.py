"""Samplers one after another, in the order a person asks for.

What is left of a row goes from sampler to sampler as `Left`. The first of them that removes tokens
sorts no more of the vocabulary than it keeps. Rules are llama.cpp's (`src/llama-sampler.cpp`), with
what is removed really gone: none of the later ones counts it.

Penalties and DRY keep the last tokens, the prompt's included, and are told of every one that is
emitted.

One order of tokens is meant everywhere: best logit first, equal logits by token id. A `Best` is a
prefix of it, found without sorting the whole row, and what filters keep is always one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling import params as names
from edgespec.sampling.params import LOWEST, SamplingParams

# As in llama.cpp: what a penalty's exponent may be before a float32 overflows.
_LARGEST_LOG = 88.7228391
_GROWTH = 1.000001  # a base below this does not grow

# Keeps 1/temperature away from 0 and infinity, where float32 would turn 0 * inf into NaN.
_INVERSE_TEMPERATURE_RANGE = (1e-30, 1e30)
# How many of the best tokens to sort before sorting all of them.
_HEAD_SIZES = (256, 4096)

TokenText = Callable[[int], bytes]


class Penalties:
    """Recent tokens and what they cost: repetition, presence and frequency.

    Rule and order: `llama.cpp: src/llama-sampler.cpp`, `llama_sampler_penalties_apply`.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        last_n = params.penalty_last_n
        self._window = deque(prompt_ids if last_n < 0 else prompt_ids[-last_n:])
        self._counts = Counter(self._window)

    def record(self, token: int) -> None:
        """Count an emitted token, and forget the oldest."""
        self._window.append(token)
        self._counts[token] += 1
        if len(self._window) > self._params.penalty_last_n >= 0:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def change(self, logits: NDArray[np.float32], places: NDArray[np.int64] | None) -> None:
        """Penalise logits [k] in place; `places` [V] says where a token stands, -1 for nowhere.

        Without places every token stands at its id.
        """
        size = len(self._counts)
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=size)
        counts = np.fromiter(self._counts.values(), dtype=np.float32, count=size)
        if places is not None:
            ids = places[ids]
            ids, counts = ids[ids >= 0], counts[ids >= 0]
        params, old = self._params, logits[ids]
        factor = params.repetition_penalty
        repeated = np.where(old > 0, old / factor, old * factor)
        logits[ids] = repeated - (counts * params.frequency_penalty + params.presence_penalty)


class Dry:
    """Penalises tokens that would go on with what stood there before ("don't repeat yourself").

    A token costs multiplier * base ^ (n - allowed), where n of the last tokens and it already stand
    earlier in the text. No repetition reaches across a breaker (`llama.cpp: llama_sampler_dry_*`).
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], text_of: TokenText | None
    ) -> None:
        self._params = params
        last_n = params.dry_penalty_last_n
        self._recent: deque[int] = deque(prompt_ids, maxlen=None if last_n < 0 else last_n)
        self._breakers = [text.encode() for text in params.dry_sequence_breakers if text]
        self._text_of: TokenText = lru_cache(4096)(text_of or (lambda _: b""))

    def record(self, token: int) -> None:
        """Remember an emitted token."""
        self._recent.append(token)

    def change(self, logits: NDArray[np.float32], places: NDArray[np.int64] | None) -> None:
        """Penalise logits [k] in place; see `Penalties.change`."""
        for token, penalty in self.penalties().items():
            place = token if places is None else int(places[token])
            if place >= 0:
                logits[place] -= penalty

    def penalties(self) -> dict[int, float]:
        """What each token would cost now."""
        params, allowed = self._params, self._params.dry_allowed_length
        backwards = list(reversed(self._recent))
        limit = self._since_breaker(backwards)
        if len(backwards) <= allowed or limit < allowed:
            return {}
        longest: dict[int, int] = {}
        lengths = common_beginnings(backwards)
        for place in range(1, len(backwards)):
            length, following = min(lengths[place], limit), backwards[place - 1]
            if length >= max(allowed, longest.get(following, 0)):
                longest[following] = length
        most = math.inf
        if params.dry_base > _GROWTH:
            most = int(_LARGEST_LOG / math.log(params.dry_base))
        return {
            token: params.dry_multiplier * params.dry_base ** min(length - allowed, most)
            for token, length in longest.items()
            if not any(breaker in self._text_of(token) for breaker in self._breakers)
        }

    def _since_breaker(self, backwards: Sequence[int]) -> int:
        """How many of the last tokens come after the last breaker."""
        text = b""
        ends: list[int] = []  # of the tokens so far, as bytes from the end of the text
        for place, token in enumerate(backwards):
            ends.append(len(text))
            piece = self._text_of(token)
            text = piece + text
            found = [
                text.find(breaker, 0, len(piece) + len(breaker) - 1) + len(breaker)
                for breaker in self._breakers
                if breaker in text[: len(piece) + len(breaker) - 1]
            ]
            if found:
                after = len(text) - max(found)
                return sum(
                    end + len(self._text_of(one)) <= after
                    for end, one in zip(ends, backwards[: place + 1], strict=True)
                )
        return len(backwards)


def common_beginnings(values: Sequence[int]) -> list[int]:
    """For each place, how many values from there on equal those from the beginning on.

    The Z function: linear, as what is known of the rightmost match so far is not compared again.

    >>> common_beginnings([1, 2, 1, 2, 1])
    [5, 0, 3, 0, 1]
    """
    size = len(values)
    lengths = [size] + [0] * (size - 1)
    start = end = 0  # of the match that reaches furthest
    for place in range(1, size):
        length = min(lengths[place - start], end - place) if place < end else 0
        while place + length < size and values[length] == values[place + length]:
            length += 1
        lengths[place] = length
        if place + length > end:
            start, end = place, place + length
    return lengths


class Left(NamedTuple):
    """A whole row [V] that may be written to, or what is left of it, best first.

    Logits are still to be multiplied by `inverse`, of a temperature.
    """

    # [V]
    row: NDArray[np.float32]
    head: Best | None = None
    inverse: float = 1.0

    def sorted(self) -> Best:
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
        return Left(self.row, Best(self.head.ids, scaled))


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
        return Left(left.row, Best(head.ids[kept], head.logits[kept]))

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
        return Left(left.row, Best(head.ids[first:], head.logits[first:]))

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
    return Left(left.row, Best(ids[order], logits[order]))


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


# -- the best tokens of a row, and how probable they are ----------------------------------


class Best(NamedTuple):
    """The best tokens: descending logits, equal logits by ascending id."""

    # [k]
    ids: NDArray[np.int64]
    # [k]
    logits: NDArray[np.float32]

    def first(self, count: int) -> Best:
        return Best(self.ids[:count], self.logits[:count])


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


def head_above(row: NDArray[np.float32], floor: float) -> Best:
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
    return Best(keys, row[keys])


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
    row: NDArray[np.float32], best: float, inverse_temperature: float, mass: float
) -> tuple[Best, NDArray[np.float64]]:
    """Best tokens enough for their summed weights [k] to exceed `mass`, or all if these do not.

    The sums come with them.
    """
    for size in _HEAD_SIZES:
        reached = floor_of_best(row, size)
        if reached <= LOWEST:
            break
        head = head_above(row, reached)
        cumulative = np.cumsum(softmax_weights(head.logits, best, inverse_temperature))
        if cumulative[-1] > mass:
            return head, cumulative
    head = head_above(row, LOWEST)
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
