"""Answers that keep to a grammar, with and without drafts.

The grammar constrains the target's distribution at every position: tokens it forbids get no
probability, before anything else is computed. Masking a whole vocabulary takes longer than a pick,
so a token is picked first and checked, wherever that has the same law:

- greedy: an allowed best token is the best allowed token
- sampling without top-k, top-p and min-p: a forbidden pick is replaced by one from the masked row,
  so an allowed token of probability p is emitted with p + (1 - a) p / a = p / a, where a is the
  probability of all allowed ones; that is its probability after masking

Filters look at the order or the sum of all probabilities, so with them the row is masked first.

What the grammar forces is drafted for free: the text is certain, only how the model cuts it into
tokens is not. It is cut as the tokenizer does it, and how often that holds is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from edgespec.backends.base import Backend, Logits
from edgespec.backends.llama.grammar import LlamaGrammar, json_grammar
from edgespec.backends.llama.tokenizer import LlamaTokenizer
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.drafters.base import Drafter, Outcome, count_hits
from edgespec.drafting.proposal import EMPTY, Proposal, Stakes
from edgespec.errors import UnsupportedError
from edgespec.sampling.sampling import Sampler

_MOST_BYTES = 64  # looked ahead
_INSIDE, _LAST = 0, 1  # cells of the calibration: the last token may go on beyond what is forced


class Grammar(Protocol):
    """Which tokens may come next."""

    def allows(self, token: int) -> bool: ...

    def best(self, logits_row: Logits) -> int: ...

    def masked(self, logits_row: Logits) -> Logits: ...

    def accept(self, token: int) -> None: ...

    def forced_bytes(self, most: int) -> bytes: ...


def make_grammar(
    backend: Backend, grammar: str | None, json_schema: str | None
) -> LlamaGrammar | None:
    """The grammar that was asked for, or None.

    Raises UnsupportedError when both are given, or the text cannot be read.
    """
    if grammar is None and json_schema is None:
        return None
    if grammar is not None and json_schema is not None:
        raise UnsupportedError("give a grammar or a JSON schema, not both")
    tokenizer = backend.tokenizer
    if not isinstance(tokenizer, LlamaTokenizer):
        raise UnsupportedError("a grammar needs the tokenizer of a GGUF file")
    text = json_grammar(json_schema) if json_schema is not None else grammar
    return LlamaGrammar(tokenizer, text or "")


class ConstrainedSampler:
    """A sampler whose every token the grammar allows; the grammar goes on with each."""

    def __init__(self, sampler: Sampler, grammar: Grammar) -> None:
        self._sampler = sampler
        self._grammar = grammar
        params = sampler.params
        unfiltered = params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0
        self._picks_first = params.is_greedy or unfiltered

    @property
    def seed(self) -> int:
        """Seed of the random numbers."""
        return self._sampler.seed

    def pick(self, logits_row: Logits) -> int:
        """The next token for logits [V], which is also recorded."""
        token = self._sampler.choose(logits_row) if self._picks_first else -1
        if token < 0 or not self._grammar.allows(token):
            token = self._choose_allowed(logits_row)
        self._sampler.record(token)
        self._grammar.accept(token)
        return token

    def _choose_allowed(self, logits_row: Logits) -> int:
        params = self._sampler.params
        if params.is_plain_greedy:
            return self._grammar.best(logits_row)
        return self._sampler.choose(self._grammar.masked(logits_row))


class GrammarDrafter:
    """Drafts what the grammar forces, and what another drafter proposes where it forces nothing.

    It lives as long as one answer. `counts` are shared by all answers of an engine.
    """

    name = "grammar"
    nbytes = 0

    def __init__(
        self, grammar: Grammar, tokenizer: Any, inner: Drafter, counts: Calibration
    ) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._inner = inner
        self._counts = counts
        self._proposal = EMPTY

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts."""
        self._inner.begin(tokens)

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """The forced text, cut into tokens, or the other drafter's proposal."""
        self._proposal = EMPTY
        forced = self._grammar.forced_bytes(_MOST_BYTES)
        # An end that is no whole character stays for the next round.
        text = forced.decode("utf-8", errors="ignore")
        tokens = self._tokenizer.encode(text, add_special=False) if text else []
        tokens = tokens[: stakes.max_nodes]
        if not tokens:
            return self._inner.propose(stakes, base)
        inside = self._counts.probability(_INSIDE)
        probabilities = [inside ** (place + 1) for place in range(len(tokens))]
        probabilities[-1] = probabilities[-1] / inside * self._counts.probability(_LAST)
        if len(probabilities) > 1:
            probabilities[-1] = min(probabilities[-2:])
        sources = [self.name] * len(tokens)
        self._proposal = Proposal(tokens, range(-1, len(tokens) - 1), probabilities, sources)
        return self._proposal

    def observe(self, outcome: Outcome) -> None:
        """Count how far the forced text was cut alike, and go on."""
        cells = [_INSIDE] * (len(self._proposal) - 1) + [_LAST]
        count_hits(self._proposal, cells, outcome.emitted, self._counts)
        self._proposal = EMPTY
        self._inner.observe(outcome)

    def state(self) -> dict[str, Any]:
        """Nothing of its own."""
        return self._inner.state()

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Nothing of its own."""


def new_counts() -> Calibration:
    """How often forced text is cut as the tokenizer does it, before anything was counted."""
    return Calibration(2, [0, 1], [0, 1], [0.9, 0.6])
