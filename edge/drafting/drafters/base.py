"""What a drafter is: something that proposes continuations with calibrated probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from edgespec.backends.tree import DraftTree, is_chain
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.proposal import EMPTY, Proposal, Prospects, Stakes
from edgespec.memory.store.texts import KeptText

# The target's best tokens after a node, best first, and their shares of the probability of these.
TopTokens = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished round: what was sent to the target, what it wrote, and at what stakes.

    The stakes are those of this very round, whoever was asked to draft for it, or nobody.
    `top_tokens(node)` gives the target's best tokens after a node, or None where they are not to
    be looked at. Plain rounds may be told together: then they are a chain that nobody drafted, of
    as many `rounds`, at the stakes of the round before them.
    """

    tree: DraftTree
    path: Sequence[int]  # accepted nodes, the root first
    emitted: Sequence[int]  # as many tokens
    stakes: Stakes
    top_tokens: Callable[[int], TopTokens | None] = lambda _node: None
    rounds: int = 1


class Drafter(Protocol):
    """A source of candidate nodes."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int:
        """Bytes its tables may take at most (a ceiling, allocated as they fill)."""

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts with `tokens`: the prompt and the first token of the answer."""

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """Candidates for what comes after the text so far, at most `stakes.max_nodes`.

        `base` is what other drafters propose already; nodes of it may be repeated.
        """

    def observe(self, outcome: Outcome) -> None:
        """A round has ended: count, learn, and extend the text.

        What was proposed counts if it was for this round; a round need not have asked for any.
        """

    def state(self) -> dict[str, Any]:
        """What should survive a restart (calibration), as a JSON document."""

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Take over the state of an earlier run; anything unusable is ignored."""


@runtime_checkable
class Pauses(Protocol):
    """A drafter that knows when it will not be asked, whatever the text brings."""

    def pause(self) -> int:
        """Rounds behind this one, for which it proposed nothing, that it need not be asked for.

        They may be told together.
        """

    def is_wanted(self, tokens: Sequence[int]) -> bool:
        """Whether it is to be asked after all, now that a pause has brought `tokens`.

        None yet, behind the round that the pause begins with.
        """


@runtime_checkable
class HasPurses(Protocol):
    """Drafters of which some pay for their nodes themselves."""

    @property
    def paid_for(self) -> frozenset[str]:
        """Their names: what their nodes gain or lose is no gain or loss of the others."""


@runtime_checkable
class Knows(Protocol):
    """A drafter that sees at once whether there is anything to look up."""

    def is_familiar(self, tokens: Sequence[int]) -> bool:
        """Whether the text ends as it did before, with `tokens` behind what was observed."""


@runtime_checkable
class TakesTime(Protocol):
    """A drafter whose drafts cost time, so that it is asked only where they are worth it."""

    def prospects(self, stakes: Stakes) -> Prospects | None:
        """What it expects of a round; None where it cannot draft."""


@runtime_checkable
class Promises(Protocol):
    """A drafter of which somebody has measured what it brings: it is believed for longer."""

    @property
    def is_promised(self) -> bool: ...


@runtime_checkable
class ReadsAlong(Protocol):
    """A drafter that can read prompts while its model does, which takes time."""

    def expect(self, gain_ms: float) -> None:
        """Texts usually gain so much by it: what reading the next prompts is weighed against."""


@runtime_checkable
class KeepsTexts(Protocol):
    """A drafter with tables of texts, which those of other users share.

    Only what is of the same `history` as a text drafts for it.
    """

    history: str  # of the next text

    def recall(self, texts: Sequence[KeptText]) -> None:
        """Fill the tables with texts of earlier runs."""

    def share_with(self, other: Any) -> None:
        """Have the tables and counts of another drafter of its kind, in place of its own."""


@runtime_checkable
class HoldsModel(Protocol):
    """A drafter with an engine of its own."""

    @property
    def failure(self) -> str | None:
        """Why it is not asked any more, or None."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the engine says it allocated, by component."""

    def close(self) -> None:
        """Free it; safe to call twice."""


def count_hits(
    proposal: Proposal, cells: Sequence[int], emitted: Sequence[int], calibration: Calibration
) -> None:
    """Count every proposed node whose parent was right, by its cell; -1 is not counted.

    Nodes that were proposed but not sent to the target are counted too where the target's own
    text shows whether they were right.
    """
    tokens, parents = proposal.tokens, proposal.parents
    alone = is_chain(parents)
    node, depth = -1, 0
    while depth < len(emitted):
        right = -1
        for i in range(node + 1, len(tokens)):
            if parents[i] == node:
                hit = tokens[i] == emitted[depth]
                if cells[i] >= 0:
                    calibration.count(cells[i], hit)
                right = i if hit else right
                if alone:
                    break
        if right < 0:
            return
        node, depth = right, depth + 1
