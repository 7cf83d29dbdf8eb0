"""Drafters of tables and models on a clock that only moves when a drafter says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draft_model_cases import Clock

from edgespec.backends.base import DraftTree
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.proposal import (
    EMPTY,
    Drafter,
    DraftEstimate,
    Proposal,
    StepContext,
    VerifyResult,
)
from edgespec.memory.times import CostCurve

INF = float("inf")
PLAIN_MS = 10.0


class Table(Drafter):
    """Proposes given tokens in a chain; asking it and letting it learn take time."""

    nbytes = 100

    def __init__(
        self, name: str, clock: Clock, tokens: Sequence[int] = (), *, propose_ms: float = 0.0
    ) -> None:
        self.name = name
        self.tokens = list(tokens)
        self.clock = clock
        self.propose_ms = propose_ms
        self.learn_ms = 0.0
        self.asked = 0
        self.spent_ms = 0.0
        self.bases: list[Proposal] = []
        self.text: list[int] = []
        self.learned = 0
        self.closed = False

    def begin(self, tokens: Sequence[int]) -> None:
        self.text = list(tokens)

    def spend(self, ms: float) -> None:
        self.clock.ms += ms
        self.spent_ms += ms

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        self.asked += 1
        self.bases.append(base)
        self.spend(self.propose_ms)
        size = min(context.max_nodes, len(self.tokens))
        return Proposal(
            self.tokens[:size], range(-1, size - 1), [0.5**n for n in range(1, size + 1)]
        )

    def observe(self, outcome: VerifyResult) -> None:
        self.text += outcome.emitted
        if outcome.top_tokens(0) is not None:
            self.learned += 1
            self.spend(self.learn_ms)

    def state(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state(self, document: dict[str, Any] | None) -> None:
        self.asked = (document or {}).get("asked", 0)


class Model(Table):
    """Like a draft model: says beforehand what it expects, and what that takes."""

    has_engine, has_to_read = True, True

    def __init__(
        self, clock: Clock, chances: Sequence[float], *, read_ms: float = 0.0, draft_ms: float = 2.0
    ) -> None:
        super().__init__("model", clock, [7] * len(chances), propose_ms=read_ms + draft_ms)
        self.chances = chances
        self.read_ms = read_ms
        self.draft_ms = draft_ms
        self.reads_prompts = False

    def estimate(self, context: StepContext) -> DraftEstimate:
        return DraftEstimate(self.chances[: context.max_nodes], self.read_ms, self.draft_ms)

    def reading_ms(self) -> float:
        return self.read_ms

    def can_read_prompts(self, *, pays: bool) -> None:
        self.reads_prompts = pays

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True


def context_of(*more_ms: float) -> StepContext:
    """Step times: 10 ms for a token alone, then the given ones, or 10 ms for up to 16 nodes."""
    ms = more_ms or (PLAIN_MS,) * 15
    return StepContext(len(ms), 0.01, CostCurve([INF, PLAIN_MS, *ms]), depth=0)


def rounds(
    combined: CombinedDrafter, count: int, context: StepContext, *, accepted: bool = False
) -> Proposal:
    """Rounds that verify all that is proposed, of which everything or nothing is right."""
    proposal = EMPTY
    for _ in range(count):
        proposal = combined.propose(context)
        size = len(proposal)
        tree = DraftTree(
            (1, *proposal.tokens), [-1, *(p + 1 for p in proposal.parents)], ("", *proposal.sources)
        )
        path = range(size + 1 if accepted else 1)
        emitted = [*(tree.tokens[node] for node in path[1:]), 2]
        combined.observe(VerifyResult(tree, path, emitted, context, lambda _node: ([3], [1.0])))
    return proposal
