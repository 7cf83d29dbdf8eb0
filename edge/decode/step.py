"""The step that texts share:

    draft -> verify -> accept -> commit -> learn

The drafts of all texts in it are chosen together, by the one rule: what is verified are the nodes
with the most expected tokens per measured millisecond of the whole step. Of several texts it is the
geometric mean of what each expects, so that drafts of one do not slow the others down by more than
they speed it up. One text is the special case, and none of its nodes an ordinary choice.

Prompts of other texts are read in the same step: next to what it computes anyway, a token more
costs a fraction of what a run of its own does. Drafts are chosen as if they were not there, and
what such a step took is no price of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import prod
from time import perf_counter

from edgespec.backends.base import HoldsSequences, Logits
from edgespec.backends.tree import DraftTree
from edgespec.decode.decoding import Decoding
from edgespec.decode.generation import Written
from edgespec.drafting.constants import REQUIRED_GAIN
from edgespec.drafting.controller import choose_size
from edgespec.drafting.proposal import Proposal, StepContext

# What a round of one text came to: None where another model writes on, or why it failed.
Outcome = Written | Exception | None


# A text, and what is read of it in a step.
Piece = tuple[Decoding, Sequence[int]]
# What is read in a step that so many tokens are fed to.
ReadBeside = Callable[[int], Sequence[Piece]]


def _plain_step(decoding: Decoding) -> Written | None:
    """One round of one text that nothing is drafted for, so that there is nothing to choose."""
    began = perf_counter()
    logits = decoding.model.backend.verify(decoding.plain())
    decoding.previous = 1
    return decoding.settle(logits, began, (perf_counter() - began) * 1e3)


def make_step(
    decodings: Sequence[Decoding], read_beside: ReadBeside | None = None
) -> list[Outcome]:
    """One round of each of some texts of one cache, and pieces of others, in one step.

    A text that fails does not keep the others from going on. Raises what the backend raises.
    """
    if read_beside is None and len(decodings) == 1 and decodings[0].is_cooling_down:
        return [_plain_step(decodings[0])]
    began = perf_counter()
    plan = StepPlan.of(decodings)
    trees = [one.draft(size) for one, size in zip(plan.going, plan.sizes, strict=True)]
    nodes = sum(map(len, trees)) + plan.pending
    pieces = read_beside(nodes) if read_beside is not None else ()
    drafted = perf_counter()
    rows = _compute(plan.going, trees, pieces)
    step_ms = (perf_counter() - drafted) * 1e3
    num_fed = nodes + sum(len(tokens) for _, tokens in pieces)
    for (reader, tokens), last in zip(pieces, rows[len(trees) :], strict=True):
        reader.has_read(tokens, last[0], step_ms * len(tokens) / num_fed / 1e3)
    node_ms = None if pieces else plan.node_ms(step_ms)
    for one, logits in zip(plan.going, rows, strict=False):
        one.previous = num_fed
        try:
            plan.outcomes[one] = one.settle(logits, began, step_ms, node_ms)
        except Exception as problem:
            plan.outcomes[one] = problem
    if not pieces:
        plan.learn(step_ms, (perf_counter() - began) * 1e3)
    return [plan.outcomes[one] for one in decodings]


@dataclass(slots=True)
class StepPlan:
    """Which texts go on, and how many drafts of each are verified, in which context."""

    going: list[Decoding]
    outcomes: dict[Decoding, Outcome]
    pending: int  # tokens that are fed again
    sizes: list[int]
    context: StepContext | None = None  # of the whole step; None where nothing is ever drafted
    draft_ms: float = 0.0

    @classmethod
    def of(cls, decodings: Sequence[Decoding]) -> StepPlan:
        """Ask all texts, and choose; the outcome of a text that fails is filled in."""
        pending = sum(one.backend.pending for one in decodings)
        plan, kept = cls([], {}, pending, []), 0
        for one in decodings:
            try:
                one.propose(len(decodings) - 1, pending, kept)
            except Exception as problem:
                plan.outcomes[one] = problem
                continue
            plan.going.append(one)
            kept += one.proposal.kept
        if plan.going:
            most = plan.going[0].model.drafts_beside(len(plan.going))
            plan._choose([one.proposal for one in plan.going], most)
        return plan

    def _choose(self, proposals: Sequence[Proposal], most: int) -> None:
        """The best nodes of all proposals, as many as are worth their time, at most `most`."""
        self.sizes = [proposal.kept for proposal in proposals]
        there = [one.context for one in self.going if one.context is not None]
        if not there:
            return
        self.draft_ms = sum(proposal.draft_ms for proposal in proposals)
        self.context = context = _joint(there, len(proposals), self.pending, most)
        kept, worth = sum(self.sizes), proposals[0].probabilities
        order = [0] * len(worth)
        if len(proposals) > 1 or kept:
            worth, order = _shared_worth(proposals)
        # What a model drafted was promised before it was asked.
        required = 1.0 if self.draft_ms else REQUIRED_GAIN
        size, _ = choose_size(
            worth,
            context,
            kept=kept,
            spent_ms=self.draft_ms,
            required_gain=required,
            tries=True,
        )
        for i in order[: size - kept]:
            self.sizes[i] += 1

    def node_ms(self, step_ms: float) -> float | None:
        """What each draft has added to a step; None without any."""
        num_drafted = sum(self.sizes)
        if self.context is None or not num_drafted:
            return None
        steps, estimated_ms = self.going[0].model.known.steps, self.context.estimated_ms
        believed_ms = steps.believed_ms(step_ms, estimated_ms(1 + num_drafted))
        return (believed_ms - estimated_ms(1)) / num_drafted

    def learn(self, step_ms: float, spent_ms: float) -> None:
        """Let the curve know what a step took in which nothing was read."""
        context, model = self.context, self.going[0].model if self.going else None
        if context is None or model is None:
            return
        if not any(isinstance(one, Written) for one in self.outcomes.values()):
            return
        # Else the team changed for this step, or one of the texts failed.
        texts = 1 + context.others
        if context.curve is model.curve_now(texts) and len(self.going) == texts:
            nodes = 1 + sum(self.sizes) + context.extra
            work_ms = spent_ms - self.draft_ms
            context.curve.observe(nodes, context.depth, context.previous, step_ms, work_ms)


def _shared_worth(proposals: Sequence[Proposal]) -> tuple[list[float], list[int]]:
    """What each node adds to the tokens that all texts expect, and which text it is of.

    The best come first, behind those that are kept. Counted is the geometric mean over the texts,
    times their number: a node of a text that expects E tokens without it is ranked by its
    probability over E. (What the sum of the logarithms of all speeds is largest for is called
    proportionally fair: Kelly, "Charging and rate control for elastic traffic", 1997.)
    """
    texts, kept = len(proposals), sum(proposal.kept for proposal in proposals)
    expected = [1.0 + sum(one.probabilities[: one.kept]) for one in proposals]
    total = texts * prod(expected) ** (1.0 / texts)
    worth = [(total - texts) / kept] * kept if kept else []
    order: list[int] = []
    nodes = [iter(one.probabilities[one.kept :]) for one in proposals]
    best = [(-p / expected[i], i) for i, left in enumerate(nodes) for p in islice(left, 1)]
    heapify(best)
    while best:
        gain, i = heappop(best)
        expected[i] *= 1.0 - gain
        before, total = total, total * (1.0 - gain) ** (1.0 / texts)
        worth.append(total - before)
        order.append(i)
        if (probability := next(nodes[i], None)) is not None:
            heappush(best, (-probability / expected[i], i))
    return worth, order


def _joint(contexts: Sequence[StepContext], roots: int, pending: int, most: int) -> StepContext:
    """What a step over all texts costs: behind as many tokens as they have on average."""
    first = contexts[0]
    if roots == 1 and not first.others:  # more where the others failed
        return first
    return replace(
        first,
        max_nodes=min(most, len(first.curve.base) - roots - pending - 1),
        depth=round(sum(one.depth for one in contexts) / len(contexts)),
        extra=roots - 1 + pending,
        others=roots - 1,
    )


def _compute(
    decodings: Sequence[Decoding], trees: Sequence[DraftTree], pieces: Sequence[Piece]
) -> list[Logits]:
    """The logits of each tree, and those after each piece."""
    members = [*decodings, *(one for one, _ in pieces)]
    if not members:
        return []
    if len(members) == 1:
        backend = members[0].backend
        return [backend.verify(tree) for tree in trees] or [backend.prefill(pieces[0][1])[None]]
    whole = members[0].model.whole
    assert isinstance(whole, HoldsSequences), "texts of one cache"
    numbers = [one.model.number for one in members]
    return whole.verify_together(
        list(zip(numbers, trees, strict=False)),
        [(one.model.number, tokens) for one, tokens in pieces],
    )
