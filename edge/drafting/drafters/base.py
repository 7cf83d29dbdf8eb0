"""What a drafter is: something that proposes continuations with calibrated probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.backends.tree import DraftTree, is_chain
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.proposal import EMPTY, DraftEstimate, Proposal, StepContext
from edgespec.memory.store.texts import KeptText

# The target's best tokens after a node, best first, and their shares of the probability of these.
TopTokens = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """One finished round: what was sent to the target, what it wrote, and in which context.

    The context is that of this very round, whoever was asked to draft for it, or nobody.
    `top_tokens(node)` gives the target's best tokens after a node, or None where they are not to
    be looked at. Plain rounds may be told together: then they are a chain that nobody drafted, of
    as many `rounds`, in the context of the round before them.
    """

    tree: DraftTree
    path: Sequence[int]  # accepted nodes, the root first
    emitted: Sequence[int]  # as many tokens
    context: StepContext
    top_tokens: Callable[[int], TopTokens | None] = lambda _node: None
    rounds: int = 1
    node_ms: float | None = None  # time that a draft added to the step; None: as estimated


class Drafter:
    """A source of candidate nodes. What a subclass has no use for does nothing."""

    name = ""
    history = ""  # of the next text: only texts of the same history draft for each other
    failure: str | None = None  # why it is not asked any more
    has_engine = False  # a model or head of its own, whose steps take time
    has_to_read = False  # the whole text, before it drafts anything

    @property
    def nbytes(self) -> int:
        """Bytes its tables may take at most (a ceiling, allocated as they fill)."""
        return 0

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts with `tokens`: the prompt and the first token of the answer."""

    def prepare(self, tokens: Sequence[int], count: int) -> None:
        """The model reads `tokens`, of which `count` may be looked at: a text begins so soon.

        Told again and again, so that no step of others waits for the whole prompt in `begin`.
        """

    def estimate(self, context: StepContext) -> DraftEstimate | None:
        """What a draft model expects of a round before it is asked; None: asking costs no step."""
        return None

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """Candidates for what comes after the text so far, at most `context.max_nodes`.

        `base` is what other drafters propose already; nodes of it may be repeated.
        """
        return EMPTY

    def observe(self, result: VerifyResult) -> None:
        """A round has ended: count, learn, and extend the text.

        What was proposed counts if it was for this round; a round need not have asked for any.
        """

    def cooldown(self) -> int:
        """How many steps may follow an empty proposal before `propose` is called again.

        Their results may be passed to `observe` in one call.
        """
        return 0

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        """Whether there is a reason to ask now, with `tokens` behind what was observed.

        Of tables an n-gram hit: the text ends as it did before.
        """
        return False

    def can_read_prompts(self, *, pays: bool) -> None:
        """Whether it may read the next prompts while its model does, which takes time."""

    def reading_ms(self) -> float:
        """What reading a prompt of the usual length takes."""
        return 0.0

    def reasons(self) -> str:
        """In one line, for people: what became of its drafts in the last text."""
        return ""

    @property
    def saved_part(self) -> float | None:
        """Of the time of plain steps, what drafts have saved; None: nobody knows."""
        return None

    def state(self) -> dict[str, Any]:
        """What should survive a restart (calibration), as a JSON document."""
        return {}

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Take over the state of an earlier run; anything unusable is ignored."""

    def recall(self, texts: Sequence[KeptText]) -> None:
        """Fill the tables with texts of earlier runs."""

    def share_with(self, other: Any) -> None:
        """Have the tables and counts of another drafter of its kind, in place of its own."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes an engine of its own says it allocated, by component."""
        return {}

    def close(self) -> None:
        """Free what it holds beyond its tables; safe to call twice."""


class CountingDrafter(Drafter):
    """A drafter that counts how often nodes of each cell of its `calibration` were right."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._proposal = EMPTY
        self._cells: Sequence[int] = ()  # of its nodes

    def begin(self, tokens: Sequence[int]) -> None:
        self._calibration.forget_recent()
        self._proposal = EMPTY

    def observe(self, result: VerifyResult) -> None:
        count_hits(self._proposal, self._cells, result.emitted, self._calibration)
        self._proposal = EMPTY

    def share_with(self, other: Any) -> None:
        self._calibration = other._calibration.for_another_text()

    def state(self) -> dict[str, Any]:
        return self._calibration.as_json()

    def load_state(self, document: dict[str, Any] | None) -> None:
        self._calibration.load_json(document)


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
