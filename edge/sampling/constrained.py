"""Answers that keep to a grammar; what it forces is drafted elsewhere (`GrammarDrafter`).

The grammar constrains the target's distribution at every position: tokens it forbids get no
probability, before anything else is computed. Masking a whole vocabulary takes longer than a pick,
so a token is picked first and checked, wherever that has the same distribution:

- greedy: an allowed best token is the best allowed token
- sampling where no sampler removes tokens: a forbidden pick is replaced by one from the masked row,
  so an allowed token of probability p is emitted with p + (1 - a) p / a = p / a, where a is the
  probability of all allowed ones; that is its probability after masking

Filters look at the order or the sum of all probabilities, so with them the row is masked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.backends.base import AnswerFormat, Grammar, Logits, MakesGrammars, Tokenizer
from edgespec.errors import BackendError, UnsupportedError
from edgespec.prefix import complete
from edgespec.sampling.params import ThoughtLimit
from edgespec.sampling.sampling import Sampler, cause_of


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
