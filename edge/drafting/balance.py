"""What drafts have gained or lost, in an answer and lately, and what the next must promise for it.

A promise is made of counts and times that may both be wrong for this very text and moment. What
was lost so far says so, whatever is wrong: the more of an answer's time it is, the more a draft
must promise. Losses are earned back by surer drafts. One answer's may be chance; what all answers
together have lost lately is not, and counts for more, in the next ones, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from edgespec.drafting.proposal import MARGIN

# That drafts must promise more, for each part of the time that was lost.
_PER_LOSS = 2.0  # by one answer
_PER_LOSS_OF_ALL = 10.0  # by all of them, lately
_LATELY = 400.0  # rounds; at least a fourth of them counts, or the first answer would decide
_FIRST_ROUNDS = 20.0  # an answer is at least as long, so that its first round decides nothing
_TELLING_TOKENS = 300  # of answers
_NO_DIFFERENCE = 1.01  # in time
_MOST = 3.0  # times as long as a plain step for each token: what took longer was disturbed
_MOST_DRAFTING = 50.0  # plain steps that drafting takes in a round; so was what took longer


@dataclass(slots=True)
class Balances:
    """All answers so far: whether drafts save what keeping them possible costs.

    Every draft counts, whichever drafter made it, and the time of models that drafted. Plain steps
    take `cost` times as long as they would without drafts.
    """

    cost: float = 1.0
    tokens: float = 0.0
    plain_ms: float = 0.0
    lost_ms: float = 0.0

    def add(
        self,
        num_nodes: int,
        num_emitted: float,
        round_ms: float,
        plain_ms: float,
        draft_ms: float = 0.0,
    ) -> None:
        """One round as of `Balance`, or several; `draft_ms` took the drafts, beside the round."""
        self.tokens += num_emitted
        self.plain_ms += num_emitted * plain_ms
        self.lost_ms += _lost_ms(num_nodes, num_emitted, round_ms, plain_ms)
        self.lost_ms += min(draft_ms, _MOST_DRAFTING * plain_ms)

    @property
    def are_worth_it(self) -> bool:
        """True where the cost is next to nothing, and as long as too little is known."""
        if self.cost < _NO_DIFFERENCE or self.tokens < _TELLING_TOKENS:
            return True
        return self.plain_ms + self.lost_ms < _NO_DIFFERENCE * self.plain_ms / self.cost


class Balance:
    """The milliseconds of rounds, against plain decoding of the same tokens.

    Args:
        of_all: of whatever answers there are; else of one.
    """

    def __init__(self, *, of_all: bool = False) -> None:
        self.paid = (0, 0)  # of a round: nodes, and accepted ones, that a drafter's purse pays for
        self._per_loss = _PER_LOSS_OF_ALL if of_all else _PER_LOSS
        self._most_rounds = _LATELY if of_all else inf
        self._least_rounds = _LATELY / 4.0 if of_all else _FIRST_ROUNDS
        self._lost_ms = 0.0
        self._plain_ms = 0.0
        self._round_ms = 0.0  # of plain decoding

    def add(self, num_nodes: int, num_emitted: float, round_ms: float, plain_ms: float) -> None:
        """One round over so many nodes; `plain_ms` is what a plain step would have taken."""
        self._round_ms = plain_ms
        self._plain_ms += num_emitted * plain_ms
        self._lost_ms += _lost_ms(num_nodes, num_emitted, round_ms, plain_ms)
        if self._plain_ms > self._most_rounds * plain_ms:
            self._plain_ms, self._lost_ms = self._plain_ms / 2.0, self._lost_ms / 2.0

    @property
    def margin(self) -> float:
        """How many times the tokens/ms of plain decoding the next drafts must promise."""
        if self._lost_ms <= 0.0:
            return MARGIN
        return MARGIN + self._per_loss * self._lost_ms / max(
            self._plain_ms, self._least_rounds * self._round_ms
        )


def _lost_ms(num_nodes: int, num_emitted: float, round_ms: float, plain_ms: float) -> float:
    """How much longer a round over drafts took than plain decoding; below 0 where it gained."""
    if num_nodes <= 1:  # a plain step that was slow is not the drafts' loss
        return 0.0
    most_ms = _MOST * max(num_emitted, num_nodes) * plain_ms
    return min(round_ms, most_ms) - num_emitted * plain_ms
