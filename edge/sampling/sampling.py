"""Choosing the next token from one row of logits: the sampler chain, in numpy.

The chain is the one a llama.cpp user gets by default (`llama.cpp: common/sampling.cpp`,
`common_sampler_init`, and `common/common.h`, the default of `samplers`):

    logit bias -> penalties -> DRY -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> XTC
        -> temperature, fixed or by entropy -> one draw

What most people use has shortcuts here that never sort a vocabulary; another order and the rarer
samplers run one after another (`chain.py`), as does mirostat, which takes the place of them all.

So top-p and min-p look at the probabilities *before* the temperature, top-p at those that top-k
left over (renormalised), and min-p at the ratio to the best token. Every filter keeps a prefix of
one order: best logit first, equal logits by token id. Temperature 0 takes the first token of that
order, which no filter removes.

A sampled pick costs exactly one uniform random number (and XTC one before it), which is looked up
in the cumulative probabilities of that order. The token is therefore a function of (seed, number of
picks so far, history, logits), and not of how the logits were computed: plain decoding, and
speculative decoding that picks at every node of a draft tree and accepts when the pick is a child,
emit the same tokens (sample-and-match). The random numbers are those of Python's
`random.Random(seed).random()`, whose sequence is promised to stay the same between versions.

Nothing here knows of models, trees or text, and no input array is ever written to.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.sampling.best_tokens import (
    LOWEST,
    Head,
    floor_of_best,
    head_above,
    head_reaching,
    inverse_of,
    softmax_weights,
    top_p_head,
)
from edgespec.sampling.chain import Chain, Mirostat
from edgespec.sampling.distributions import TargetDistribution
from edgespec.sampling.history import Dry, Penalties, TokenText
from edgespec.sampling.params import SamplingParams, bias_pairs


class Sampler:
    """Picks token after token under one `SamplingParams`, and remembers what it picked.

    One sampler serves one answer. The history starts with `prompt_ids`, as in llama.cpp, and is
    kept only where penalties are on. `text_of` gives the bytes of a token, which only DRY's
    breakers are looked for in. Raises `UnsupportedError` for a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Iterable[int] = (),
        text_of: TokenText | None = None,
    ) -> None:
        if vocab_size < 1:
            raise UnsupportedError(f"a vocabulary needs at least one token, got {vocab_size}")
        self.params = params
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._random = random.Random(self.seed)
        self._inverse_temperature = inverse_of(params.temperature)

        pairs = bias_pairs(params.logit_bias)
        self._bias = (
            np.array([token for token, _ in pairs], dtype=np.int64),
            np.array([bias for _, bias in pairs], dtype=np.float32),
        )
        self._check_tokens("logit_bias", (token for token, _ in pairs))

        history = list(prompt_ids) if params.uses_history else []
        self._check_tokens("the prompt", history)
        self._past = (
            Penalties(params, history) if params.uses_penalties else None,
            Dry(params, history, text_of) if params.uses_dry else None,
        )
        self._chain: Chain | Mirostat | None = None
        if params.mirostat:
            self._chain = Mirostat(params)
        elif params.uses_chain:
            self._chain = Chain(params, *self._past, self._random.random)

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
        if self._takes_argmax:  # whatever was picked before
            assert len(logits_row) == self.vocab_size
            return _argmax(logits_row)
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
            try:
                return _argmax(row) if self.params.is_greedy else self._draw(row)
            except BackendError as problem:
                raise cause_of(problem, logits_row) from None

    def record(self, token: int) -> None:
        """Count a token that was chosen elsewhere as emitted; `pick` does so by itself."""
        for past in self._past:
            if past is not None:
                past.record(token)
        if isinstance(self._chain, Mirostat):
            self._chain.record(token)

    force = record

    def typical(self, logits_row: NDArray[np.float32], tokens: Sequence[int]) -> int | None:
        """The likeliest of drafted tokens that typical acceptance takes at a row [V], if any.

        That is those with a probability of at least min(eps, sqrt(eps) exp(-H)), H the entropy in
        nats (Medusa, arXiv 2401.10774, section 3.3), at the temperature, or at 1 where that is 0.
        What filters leave out is not taken.
        """
        epsilon = self.params.accept_typical
        with np.errstate(all="ignore"):
            row = self._change(logits_row)
            scale = 1.0 if self.params.is_greedy else self._inverse_temperature
            scaled = (row.astype(np.float64) - _finite_max(row)) * scale
            weights = np.exp(scaled)
            total = float(weights.sum())
            places = weights > 0.0
            entropy = math.log(total) - float(weights[places] @ scaled[places]) / total
        least = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))
        token = max(tokens, key=lambda token: float(weights[token]))
        if float(weights[token]) / total < least:
            return None
        if not self.params.is_greedy and not self.params.keeps_all and not self.params.uses_xtc:
            return token if token in self.distribution(logits_row)[0] else None
        return token

    def distribution(
        self, logits_row: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What `pick` would sample from now: token ids [k] and their probabilities [k].

        Best first; neither the history nor the random numbers move. Where nothing but the
        temperature is set, `pick` normalises with a float32 sum: then the two agree to 1e-6. XTC
        has no such distribution, as it tosses a coin first.
        """
        assert not self.params.uses_xtc
        with np.errstate(all="ignore"):
            row = self._change(logits_row)
            if self.params.is_greedy:
                return np.array([_argmax(row)], dtype=np.int64), np.ones(1)
            best = _finite_max(row)
            if self._chain is not None:
                head = self._chain(row)
                weights = softmax_weights(head.logits, float(head.logits[0]), 1.0)
                return head.ids, weights / weights.sum()
            kept = self._kept(row, best)
            head = head_above(row, LOWEST) if kept is None else kept
            weights = softmax_weights(head.logits, best, self._inverse_temperature)
            return head.ids, weights / weights.sum()

    def unsorted_distribution(self, logits_row: NDArray[np.float32]) -> TargetDistribution:
        """The same as `distribution`, for verifying draws: unsorted where nothing is filtered.

        Then the ids are None and the probabilities [V] stand at their tokens; their weights are
        float32, as in `pick`. The arrays are the caller's to write on. With penalties a node's
        distribution depends on its path, which this does not know: do not ask such samplers.
        """
        params = self.params
        assert not params.uses_history
        if params.is_greedy or not params.keeps_all:
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

    def _check_tokens(self, where: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UnsupportedError(
                    f"{where} has token {token}, but the vocabulary has {self.vocab_size} tokens",
                    hint="use token ids of this model's own tokenizer",
                )

    def _change(self, logits_row: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row with bias and penalties, in a work array, or the row itself without any.

        A chain penalises by itself, where its order says. Only a few tokens are touched.
        """
        if not self._changes_logits:
            return logits_row
        row = self._changed
        np.copyto(row, logits_row)
        biased, biases = self._bias
        row[biased] += biases
        if self._chain is None:
            for past in self._past:
                if past is not None:
                    past.change(row, None)
        return row

    def _draw(self, row: NDArray[np.float32]) -> int:
        best = _finite_max(row)
        if self._chain is not None:
            left = self._chain(row)
            return int(
                left.ids[self.draw(softmax_weights(left.logits, float(left.logits[0]), 1.0))]
            )
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
    best = row.item(token)
    if not math.isfinite(best):
        raise _no_best(best)
    return token


def _finite_max(row: NDArray[np.float32]) -> float:
    best = float(row.max())
    if not math.isfinite(best):
        raise _no_best(best)
    return best


def cause_of(problem: BackendError, logits_row: NDArray[np.float32]) -> EdgespecError:
    """Why no token could be chosen: the model's own logits [V], or what was asked for."""
    if not math.isfinite(logits_row.max()):
        return problem
    return UnsupportedError(
        "no token can be chosen: every one is forbidden",
        hint="logit_bias and the grammar or schema leave none between them",
    )


def _no_best(best: float) -> BackendError:
    return BackendError(
        f"no token can be chosen: the best logit is {best}",
        hint="if nothing masks every token, the model file or the backend is broken",
    )
