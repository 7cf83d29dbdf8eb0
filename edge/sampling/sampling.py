"""Choosing the next token from one row of logits: the sampler chain, in numpy.

The chain is the one a llama.cpp user gets by default (`llama.cpp: common/sampling.cpp`,
`common_sampler_init`, and `common/common.h`, the default of `samplers`), without the samplers
edgespec does not offer (DRY, top-n-sigma, typical-p, XTC):

    logit bias -> penalties -> top-k -> top-p -> min-p -> temperature -> one draw

So top-p and min-p look at the probabilities *before* the temperature, top-p at those that top-k
left over (renormalised), and min-p at the ratio to the best token. Every filter keeps a prefix of
one order: best logit first, equal logits by token id. Temperature 0 takes the first token of that
order, which no filter removes.

A sampled pick costs exactly one uniform random number, which is looked up in the cumulative
probabilities of that order. The token is therefore a function of (seed, number of picks so far,
history, logits), and not of how the logits were computed: plain decoding, and speculative decoding
that picks at every node of a draft tree and accepts when the pick is a child, emit the same tokens
(sample-and-match). The random numbers are those of Python's `random.Random(seed).random()`, whose
sequence is promised to stay the same between Python versions.

Nothing here knows of models, trees or text, and no input array is ever written to.
"""

from __future__ import annotations

import math
import random
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, UnsupportedError
from edgespec.sampling.best_tokens import (
    LOWEST,
    Head,
    floor_of_best,
    head_above,
    head_reaching,
    softmax_weights,
    top_p_head,
)
from edgespec.sampling.laws import TargetLaw

# Keeps 1/temperature away from 0 and infinity, where float32 would turn 0 * inf into NaN.
_INVERSE_TEMPERATURE_RANGE = (1e-30, 1e30)
# Penalties up to this size leave finite logits finite.
_LARGEST_PENALTY = 1e6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to sample; the default is greedy decoding. Raises `UnsupportedError` out of range.

    Names and meanings are llama.cpp's. `logit_bias` may be given as a mapping or as pairs and is
    kept as pairs sorted by token, so that two equal settings compare and hash as equal.
    """

    # 0 is greedy.
    temperature: float = 0.0
    # Keep this many of the best tokens; 0 keeps all.
    top_k: int = 0
    # Keep the fewest best tokens whose probabilities sum to this; 1 keeps all.
    top_p: float = 1.0
    # Keep the tokens with at least this fraction of the best one's probability; 0 keeps all.
    min_p: float = 0.0
    # Divides positive and multiplies other logits of recent tokens (CTRL, arXiv 1909.05858).
    repetition_penalty: float = 1.0
    # Subtracted once from the logit of every recent token.
    presence_penalty: float = 0.0
    # Subtracted for every occurrence of a recent token.
    frequency_penalty: float = 0.0
    # How many last tokens are recent, the prompt's included; 0 is none, -1 all.
    penalty_last_n: int = 64
    # Added to logits before everything else; minus infinity forbids a token.
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    # None draws a seed; `Sampler.seed` tells which.
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_filters(self)
        _check_penalties(self)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.seed is not None and self.seed < 0:
            raise UnsupportedError(
                f"seed must be 0 or more, got {self.seed}",
                hint="leave the seed out to have one drawn",
            )

    @property
    def is_greedy(self) -> bool:
        """True when the best token is always taken, which needs no random numbers."""
        return self.temperature == 0.0

    @property
    def draws_freely(self) -> bool:
        """True when tokens are drawn from a law that earlier picks of the round do not change."""
        return not self.is_greedy and not self.uses_history

    @property
    def uses_history(self) -> bool:
        """True when earlier tokens change the logits of later ones."""
        subtracts = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.penalty_last_n != 0 and (self.repetition_penalty != 1.0 or subtracts)

    @property
    def changes_logits(self) -> bool:
        """True when penalties or a bias change logits, which needs a copy of the row."""
        return self.uses_history or bool(self.logit_bias)

    @property
    def is_plain_greedy(self) -> bool:
        """True when the best logit is taken as it is, which needs no memory either."""
        return self.is_greedy and not self.changes_logits

    @property
    def sums_vocabulary(self) -> bool:
        """True when a pick needs the weights of all tokens: top-p without top-k, or no filter."""
        unfiltered = self.top_k == 0 and (self.top_p < 1.0 or self.min_p == 0.0)
        return unfiltered and not self.is_greedy


class Sampler:
    """Picks token after token under one `SamplingParams`, and remembers what it picked.

    One sampler serves one answer. The history starts with `prompt_ids`, as in llama.cpp, and is
    kept only where penalties are on. Raises `UnsupportedError` for a token outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Iterable[int] = ()
    ) -> None:
        if vocab_size < 1:
            raise UnsupportedError(f"a vocabulary needs at least one token, got {vocab_size}")
        self.params = params
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._random = random.Random(self.seed)
        self._inverse_temperature = _inverse(params.temperature)

        pairs = _bias_pairs(params.logit_bias)
        self._bias_ids = np.array([token for token, _ in pairs], dtype=np.int64)
        self._biases = np.array([bias for _, bias in pairs], dtype=np.float32)
        self._check_tokens("logit_bias", (token for token, _ in pairs))

        self._window: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        if params.uses_history:
            self._start_history(list(prompt_ids))

        self._changes_logits = params.changes_logits
        self._takes_argmax = params.is_plain_greedy
        self._changed = np.empty(vocab_size * params.changes_logits, dtype=np.float32)
        self._weights = np.empty(vocab_size * params.sums_vocabulary, dtype=np.float32)

    def independent(self) -> Sampler:
        """Another one under the same settings, whose random numbers follow from this one's seed."""
        seed = random.Random(f"independent of {self.seed}").getrandbits(32)
        return Sampler(replace(self.params, seed=seed), self.vocab_size)

    def pick(self, logits_row: NDArray[np.float32]) -> int:
        """The next token for logits [V], which is also recorded.

        Raises `BackendError` if the best logit is not a finite number.
        """
        token = self.choose(logits_row)
        self.record(token)
        return token

    def choose(self, logits_row: NDArray[np.float32]) -> int:
        """As `pick`, without recording the token: another one may be chosen in its place."""
        assert logits_row.shape == (self.vocab_size,)
        if self._takes_argmax:
            return _argmax(logits_row)
        with np.errstate(all="ignore"):
            row = self._change(logits_row)
            return _argmax(row) if self.params.is_greedy else self._draw(row)

    def record(self, token: int) -> None:
        """Count a token that was chosen elsewhere as emitted; `pick` does so by itself."""
        if not self.params.uses_history:
            return
        self._window.append(token)
        self._counts[token] += 1
        if len(self._window) > self.params.penalty_last_n >= 0:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def distribution(
        self, logits_row: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What `pick` would sample from now: token ids [k] and their probabilities [k].

        Best first; neither the history nor the random numbers move. Where nothing but the
        temperature is set, `pick` normalises with a float32 sum: then the two agree to 1e-6.
        """
        with np.errstate(all="ignore"):
            row = self._change(logits_row)
            if self.params.is_greedy:
                return np.array([_argmax(row)], dtype=np.int64), np.ones(1)
            best = _finite_max(row)
            head = self._kept(row, best)
            if head is None:
                head = head_above(row, LOWEST)
            weights = softmax_weights(head.logits, best, self._inverse_temperature)
            return head.ids, weights / weights.sum()

    def law(self, logits_row: NDArray[np.float32]) -> TargetLaw:
        """The same as `distribution`, for verifying draws: unsorted where nothing is filtered.

        Then the ids are None and the probabilities [V] stand at their tokens; their weights are
        float32, as in `pick`. The arrays are the caller's to write on. Penalties make the law of a
        node depend on its path, which this does not know: such samplers must not be asked.
        """
        params = self.params
        assert not params.uses_history
        if params.is_greedy or params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
            return self.distribution(logits_row)
        with np.errstate(all="ignore"):
            row = self._change(logits_row)
            self._total(row, _finite_max(row), self._inverse_temperature)
            probabilities = self._weights.astype(np.float64)
            probabilities /= probabilities.sum()
        return None, probabilities

    def accepts(self, probability: float) -> bool:
        """True with this probability; costs one random number."""
        return self._random.random() < probability

    def draw(self, weights: NDArray[np.float64]) -> int:
        """An index of weights [k], in proportion to them; costs one random number."""
        cumulative = np.cumsum(weights)
        return _index_at(cumulative, self._random.random() * float(cumulative[-1]))

    def _start_history(self, prompt_ids: list[int]) -> None:
        self._check_tokens("the prompt", prompt_ids)
        last_n = self.params.penalty_last_n
        self._window.extend(prompt_ids if last_n < 0 else prompt_ids[-last_n:])
        self._counts.update(self._window)

    def _check_tokens(self, where: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UnsupportedError(
                    f"{where} has token {token}, but the vocabulary has {self.vocab_size} tokens",
                    hint="use token ids of this model's own tokenizer",
                )

    def _change(self, logits_row: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with bias and penalties, in a work array, or the row itself without any.

        Rule and order of the penalties: `llama.cpp: src/llama-sampler.cpp`,
        `llama_sampler_penalties_apply`. Only tokens of the history and the bias are touched.
        """
        if not self._changes_logits:
            return logits_row
        row = self._changed
        np.copyto(row, logits_row)
        row[self._bias_ids] += self._biases
        if self._counts:
            size = len(self._counts)
            ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=size)
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=size)
            row[ids] = self._penalised(row[ids], counts)
        return row

    def _penalised(
        self, logits: NDArray[np.float32], counts: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        params = self.params
        factor = params.repetition_penalty
        repeated = np.where(logits > 0, logits / factor, logits * factor)
        subtracted = counts * params.frequency_penalty + params.presence_penalty
        return repeated - subtracted  # type: ignore[no-any-return]

    def _draw(self, row: NDArray[np.float32]) -> int:
        best = _finite_max(row)
        uniform = self._random.random()
        head = self._kept(row, best)
        if head is None:
            # All tokens are candidates, but those after the drawn one need not be sorted.
            drawn = uniform * self._total(row, best, self._inverse_temperature)
            head, cumulative = head_reaching(row, best, self._inverse_temperature, drawn)
        else:
            cumulative = np.cumsum(softmax_weights(head.logits, best, self._inverse_temperature))
            drawn = uniform * float(cumulative[-1])
        return int(head.ids[_index_at(cumulative, drawn)])

    def _kept(self, row: NDArray[np.float32], best: float) -> Head | None:
        """The tokens that top-k, top-p and min-p leave, or None when all three are off."""
        params = self.params
        floor = best + math.log(params.min_p) if params.min_p > 0.0 else LOWEST
        if params.top_k > 0:
            head = head_above(row, floor_of_best(row, params.top_k)).first(params.top_k)
            head = top_p_head(head, best, params.top_p)
            return head.first(int(np.count_nonzero(head.logits >= floor)))
        if params.top_p < 1.0:
            mass = params.top_p * self._total(row, best, 1.0)
            head, cumulative = head_reaching(row, best, 1.0, mass, floor)
            return head.first(int(np.searchsorted(cumulative, mass, side="left")) + 1)
        return head_above(row, floor) if params.min_p > 0.0 else None

    def _total(self, row: NDArray[np.float32], best: float, inverse_temperature: float) -> float:
        """Sum over the vocabulary of exp((logit - best) / temperature), to about 1e-6."""
        weights = self._weights
        np.subtract(row, best, out=weights)
        if inverse_temperature != 1.0:
            np.multiply(weights, inverse_temperature, out=weights)
        np.exp(weights, out=weights)
        return float(weights.sum())


def top_two_gap(logits_row: NDArray[np.float32]) -> float:
    """Best minus second best logit of a row [V]: how much noise it takes to change the best.

    Infinite when no other token is possible, NaN when no token is.
    """
    index = int(logits_row.argmax())
    below = float(logits_row[:index].max(initial=-np.inf))
    above = float(logits_row[index + 1 :].max(initial=-np.inf))
    return float(logits_row[index]) - max(below, above)


def _index_at(cumulative: NDArray[np.float64], drawn: float) -> int:
    """The index whose share of the cumulative weights [k] holds `drawn`."""
    index = int(np.searchsorted(cumulative, drawn, side="right"))
    # Rounding may put `drawn` at the very end; the last index with any weight owns it.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


def _argmax(row: NDArray[np.float32]) -> int:
    """The best token, the lowest id of equals; a NaN anywhere counts as the best."""
    token = int(row.argmax())
    _check_best(float(row[token]))
    return token


def _finite_max(row: NDArray[np.float32]) -> float:
    best = float(row.max())
    _check_best(best)
    return best


def _check_best(best: float) -> None:
    if not math.isfinite(best):
        raise BackendError(
            f"no token can be chosen: the best logit is {best}",
            hint="if nothing masks every token, the model file or the backend is broken",
        )


def _inverse(temperature: float) -> float:
    if temperature == 0.0:
        return 1.0
    low, high = _INVERSE_TEMPERATURE_RANGE
    return min(max(1.0 / temperature, low), high)


def _check_filters(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0.0):
        raise UnsupportedError(
            f"temperature must be a number of 0 or more, got {params.temperature}",
            hint="0 is greedy, 0.8 is llama.cpp's default",
        )
    if params.top_k < 0:
        raise UnsupportedError(
            f"top_k must be 0 or more, got {params.top_k}",
            hint="0 keeps all tokens, 40 is llama.cpp's default",
        )
    for name, value, off in (("top_p", params.top_p, 1), ("min_p", params.min_p, 0)):
        if not 0.0 <= value <= 1.0:
            raise UnsupportedError(
                f"{name} must be from 0 to 1, got {value}", hint=f"{off} keeps all tokens"
            )


def _check_penalties(params: SamplingParams) -> None:
    factor = params.repetition_penalty
    if not 1.0 / _LARGEST_PENALTY <= factor <= _LARGEST_PENALTY:
        raise UnsupportedError(
            f"repetition_penalty must be from 1e-6 to 1e6, got {factor}",
            hint="1 is no penalty, 1.1 is a usual one",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -_LARGEST_PENALTY <= value <= _LARGEST_PENALTY:
            raise UnsupportedError(
                f"{name} must be from -1e6 to 1e6, got {value}", hint="0 is no penalty"
            )
    if params.penalty_last_n < -1:
        raise UnsupportedError(
            f"penalty_last_n must be -1 or more, got {params.penalty_last_n}",
            hint="-1 counts the whole history, 0 none of it, 64 is the default",
        )


def _bias_pairs(
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...],
) -> tuple[tuple[int, float], ...]:
    items = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias
    pairs = tuple(sorted((int(token), float(bias)) for token, bias in items))
    for token, bias in pairs:
        if not (bias == -math.inf or LOWEST <= bias <= -LOWEST):
            raise UnsupportedError(
                f"the logit bias of token {token} must be a float32 number or -inf, got {bias}",
                hint="a bias of 100 makes a token all but certain, -inf forbids it",
            )
    for (token, _), (following, _) in pairwise(pairs):
        if token == following:
            raise UnsupportedError(
                f"logit_bias names token {token} twice", hint="give each token one bias"
            )
    return pairs
