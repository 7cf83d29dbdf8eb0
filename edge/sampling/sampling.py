"""Choosing the next token from one row of logits: the sampler chain, in numpy.

The chain is the one a llama.cpp user gets by default (`llama.cpp: common/sampling.cpp`,
`common_sampler_init`, and `common/common.h`, the default of `samplers`):

    logit bias -> penalties -> DRY -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> XTC
        -> temperature, fixed or by entropy -> one draw

They run one after another, in the order that was asked for (`chain.py`); mirostat takes the place
of them all.

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

A grammar constrains the target's distribution at every position: tokens it forbids get no
probability, before anything else is computed. Masking a whole vocabulary takes longer than a pick,
so a token is picked first and checked, wherever that has the same distribution:

- greedy: an allowed best token is the best allowed token
- sampling where no sampler removes tokens: a forbidden pick is replaced by one from the masked row,
  so an allowed token of probability p is emitted with p + (1 - a) p / a = p / a, where a is the
  probability of all allowed ones; that is its probability after masking

Filters look at the order or the sum of all probabilities, so with them the row is masked first.
What a grammar forces is drafted elsewhere (`GrammarDrafter`).

Nothing here knows of models or trees, and no input array is ever written to.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import (
    AnswerFormat,
    DraftDistribution,
    Grammar,
    Logits,
    MakesGrammars,
    Tokenizer,
)
from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.prefix import complete
from edgespec.sampling.chain import (
    Chain,
    Dry,
    Left,
    Mirostat,
    Penalties,
    TokenText,
    head_reaching,
    inverse_of,
    softmax_weights,
)
from edgespec.sampling.params import SamplingParams, ThoughtLimit, bias_pairs

# Token ids [k], or None where every token has its place, and their probabilities [k] or [V].
TargetDistribution = tuple[NDArray[np.int64] | None, NDArray[np.float64]]


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
        self._chain: Chain | Mirostat = (
            Mirostat(params) if params.mirostat else Chain(params, *self._past, self._random.random)
        )
        self._takes_argmax = params.is_plain_greedy
        self._changed = np.empty(vocab_size * params.changes_logits, dtype=np.float32)

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
                if self.params.is_greedy:
                    return _argmax(self._chain(row).row)
                _finite_max(row)
                return self._draw(self._chain(row))
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
            for past in self._past:
                if past is not None:
                    past.change(row, None)
            scale = 1.0 if self.params.is_greedy else inverse_of(self.params.temperature)
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
                return np.array([_argmax(self._chain(row).row)], dtype=np.int64), np.ones(1)
            _finite_max(row)
            left = self._chain(row)
            head = left.sorted()
            weights = softmax_weights(head.logits, left.best, left.inverse)
            return head.ids, weights / weights.sum()

    def unsorted_distribution(self, logits_row: NDArray[np.float32]) -> TargetDistribution:
        """The same as `distribution`, for verifying draws: unsorted where nothing is filtered.

        Then the ids are None and the probabilities [V] stand at their tokens; their weights are
        float32, as in `pick`. The arrays are the caller's to write on. With penalties a node's
        distribution depends on its path, which this does not know: do not ask such samplers.
        """
        params = self.params
        assert not params.uses_history
        if params.is_greedy or not params.keeps_all or isinstance(self._chain, Mirostat):
            return self.distribution(logits_row)
        with np.errstate(all="ignore"):
            row = self._change(logits_row)
            _finite_max(row)
            left = self._chain(row)
            probabilities = self._chain.weights(left.row, left.best, left.inverse).astype(
                np.float64
            )
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
        """The row with its bias, in a work array that the chain may write to, or the row itself."""
        if not self.params.changes_logits:
            return logits_row
        row = self._changed
        np.copyto(row, logits_row)
        biased, biases = self._bias
        row[biased] += biases
        return row

    def _draw(self, left: Left) -> int:
        uniform, best = self._random.random(), left.best
        if left.head is None:
            # All tokens are candidates, but those after the drawn one need not be sorted.
            assert isinstance(self._chain, Chain), "mirostat leaves a head"
            drawn = uniform * float(self._chain.weights(left.row, best, left.inverse).sum())
            head, cumulative = head_reaching(left.row, best, left.inverse, drawn)
        else:
            head, cumulative = (
                left.head,
                np.cumsum(softmax_weights(left.head.logits, best, left.inverse)),
            )
            drawn = uniform * float(cumulative[-1])
        return int(head.ids[_index_at(cumulative, drawn)])


def without(distribution: DraftDistribution, token: int) -> DraftDistribution | None:
    """A distribution [V] given that `token` is not drawn again; None where nothing else can be."""
    others: DraftDistribution = distribution.copy()
    others[token] = 0.0
    total = float(others.sum())
    if total <= 0.0:
        return None
    others /= total
    return others


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


# -- what else decides: a grammar, or a thought that has to end ----------------------------


def make_grammar(
    tokenizer: Tokenizer, wanted: AnswerFormat | None, known: Sequence[int] = ()
) -> Grammar | None:
    """What an answer is kept to by, or None where nothing is wanted.

    Args:
        known: tokens that the answer begins with; it has no other form then.

    Raises UnsupportedError when it cannot be read or used, or the tokenizer knows no grammars.
    """
    if known:
        return KnownTokens(known)
    if wanted is None:
        return None
    if not isinstance(tokenizer, MakesGrammars):
        raise UnsupportedError("a schema or a grammar needs the tokenizer of a GGUF file")
    return tokenizer.grammar(wanted)


class KnownTokens:
    """The grammar of an answer that begins with known tokens, and is free behind them.

    So a prompt is scored: each of its tokens is an answer's, with the logprob that it has there.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = list(tokens[::-1])  # the next one last

    def allows(self, token: int) -> bool:
        """Whether `token` is the next one."""
        return not self._left or token == self._left[-1]

    def masked(self, logits_row: Logits) -> Logits:
        """The row [V], in which only the known token has a chance."""
        if not self._left:
            return logits_row
        row = np.full_like(logits_row, -np.inf)
        row[self._left[-1]] = 0.0
        return row

    def accept(self, token: int) -> None:
        """Go on."""
        if self._left:
            self._left.pop()

    def forced(self) -> tuple[list[int], int]:
        """As many as a step may take; all of them are sure."""
        ahead = self._left[:-1025:-1]
        return ahead, len(ahead)


class ConstrainedSampler:
    """A sampler whose every token the grammar allows; the grammar goes on with each."""

    def __init__(self, sampler: Sampler, grammar: Grammar) -> None:
        self.seed = sampler.seed  # of the random numbers
        self._sampler, self._grammar = sampler, grammar
        params = sampler.params
        self._picks_first = params.is_greedy or params.keeps_all

    def pick(self, logits_row: Logits) -> int:
        """The next token for logits [V], which is also recorded.

        Raises UnsupportedError where the grammar and the sampler's biases leave none.
        """
        try:
            token = self._sampler.choose(logits_row) if self._picks_first else -1
            if token < 0 or not self._grammar.allows(token):
                token = self._sampler.choose(self._grammar.masked(logits_row))
                if not self._grammar.allows(token):
                    raise BackendError("a token was chosen that has no chance")
        except BackendError as problem:
            raise cause_of(problem, logits_row) from None
        self._sampler.record(token)
        self._grammar.accept(token)
        return token

    def force(self, token: int) -> None:
        """Go on with a token that was chosen elsewhere; the grammar allows it."""
        self._sampler.record(token)
        self._grammar.accept(token)


class LimitedThought:
    """A sampler that closes the thought of an answer when its tokens are used up.

    Args:
        sampler: picks all tokens but the forced ones, which it is told of.
        end_ids: what is forced: the closing tag, with what stands around it.
        token_bytes: of a token.
    """

    def __init__(
        self,
        sampler: Sampler | ConstrainedSampler,
        limit: ThoughtLimit,
        end_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self.seed = sampler.seed  # of the random numbers
        self._sampler, self._limit = sampler, limit
        self._end_ids, self._token_bytes = list(end_ids), token_bytes
        self._is_thinking = limit.within
        self._is_over = False
        self._forced: list[int] = []  # still to be written, the next one last
        self._left = limit.max_tokens
        self._text = b""  # the last bytes, as many as a tag needs

    def pick(self, logits_row: Logits) -> int:
        """The next token for logits [V], which is also recorded. Raises as the sampler."""
        if self._is_over and not self._forced:
            return self._sampler.pick(logits_row)
        if self._is_thinking and self._left <= 0 and self._is_at_a_character():
            self._forced, self._is_over = self._end_ids[::-1], True
            self._is_thinking = False
        if self._forced:
            token = self._forced.pop()
            self._sampler.force(token)
            return token
        token = self._sampler.pick(logits_row)
        self._follow(token)
        return token

    def _is_at_a_character(self) -> bool:
        """Whether no character has begun, or one that three more tokens did not complete."""
        return self._left < -3 or complete(self._text) == len(self._text)

    def _follow(self, token: int) -> None:
        """Find the tags in what the model writes."""
        opening, closing = self._limit.opening.encode(), self._limit.closing.encode()
        self._text += self._token_bytes(token)
        if self._is_thinking:
            self._left -= 1
            self._is_over = closing in self._text
            self._text = self._text[-len(closing) - 64 :]
            return
        start = self._text.lstrip()
        if start.startswith(opening):
            self._is_thinking, self._text = True, start[len(opening) :]
        elif not opening.startswith(start) or len(self._text) > 256:
            self._is_over = True  # an answer without a thought
