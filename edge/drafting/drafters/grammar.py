"""Drafts what a grammar forces, for free: the text is certain, and most of its cut into tokens.

The grammar says how far its cut is sure. Behind that a token may go on beyond what is forced: how
often it does not is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from edgespec.backends.base import Grammar
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    CountingDrafter,
    Drafter,
    Proposal,
    StepContext,
    VerifyResult,
)

_SURE, _LAST = -1, 0  # cells of the calibration; -1 is not counted


class GrammarDrafter(CountingDrafter):
    """Drafts what the grammar forces, and what another drafter proposes where it forces nothing.

    It lives as long as one answer. `counts` are shared by all answers of an engine.
    """

    name = "grammar"

    def __init__(self, grammar: Grammar, inner: Drafter, counts: Calibration) -> None:
        super().__init__(counts)
        self._grammar = grammar
        self._inner = inner

    def begin(self, tokens: Sequence[int]) -> None:
        self._inner.begin(tokens)

    def prepare(self, tokens: Sequence[int], count: int) -> None:
        self._inner.prepare(tokens, count)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """The forced text, cut into tokens, or the other drafter's proposal."""
        self._proposal = EMPTY
        forced, num_sure = self._grammar.forced()
        tokens = list(forced[: context.max_nodes])
        if not tokens:
            return self._inner.propose(context, base)
        self._cells = [_SURE if place < num_sure else _LAST for place in range(len(tokens))]
        last = self._calibration.probability(_LAST)
        chances = [1.0 if cell == _SURE else last for cell in self._cells]
        self._proposal = Proposal(
            tokens,
            range(-1, len(tokens) - 1),
            list(accumulate(chances, mul)),
            [self.name] * len(tokens),
        )
        return self._proposal

    def observe(self, result: VerifyResult) -> None:
        super().observe(result)
        self._inner.observe(result)

    def cooldown(self) -> int:
        """As long as the other drafter's; text that is forced ends it."""
        return self._inner.cooldown()

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the grammar, which has gone on with `tokens`, forces text now."""
        return bool(self._grammar.forced()[0]) or self._inner.has_hit(tokens)


def new_counts() -> Calibration:
    """How often forced text is cut as the tokenizer does it where it need not be: a guess."""
    return Calibration(1, [0], [0], [0.6])
