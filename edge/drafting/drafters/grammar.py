"""Drafts what a grammar forces, for free: the text is certain, only its cut into tokens is not.

It is cut as the tokenizer does it, and how often that holds is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.backends.base import Grammar
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.drafters.base import Drafter, Outcome, count_hits
from edgespec.drafting.proposal import EMPTY, Proposal, Stakes

_MOST_BYTES = 64  # looked ahead
_INSIDE, _LAST = 0, 1  # cells of the calibration: the last token may go on beyond what is forced


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
