"""The step that texts share:

    draft -> verify -> accept -> commit -> learn

The drafts of all texts in it are chosen together, by the one rule: what is verified are the nodes
with the most expected tokens per measured millisecond of the whole step, whose text ever they are
of. One text is the special case, and none of its nodes an ordinary choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from edgespec.backends.base import HoldsSequences, Logits
from edgespec.backends.tree import DraftTree
from edgespec.decode.decoding import Company, Decoding
from edgespec.decode.generation import Rounds, Written
from edgespec.drafting.controller import choose_size
from edgespec.drafting.proposal import Proposal, Stakes

# What a round of one text came to: None where another model writes on, or why it failed.
Outcome = Written | Exception | None


def rounds_of(decoding: Decoding) -> Rounds:
    """Yield what one text's rounds write. The first "round" is the last logits of the text.

    Ends before a token that is handed over.
    """
    cancel, size = decoding.run.cancel, decoding.backend.batch_size
    while decoding.num_unread:
        if cancel.is_set():
            return
        decoding.read(size)
    written: Outcome = decoding.first()
    while isinstance(written, Written):
        yield written
        if decoding.has_ended or cancel.is_set():
            return
        [written] = make_step((decoding,))
    if isinstance(written, Exception):
        raise written


def make_step(decodings: Sequence[Decoding]) -> list[Outcome]:
    """One round of each of some texts of one cache, in one step.

    A text that fails does not keep the others from going on. Raises what the backend raises.
    """
    began = perf_counter()
    outcomes: list[Outcome] = [None] * len(decodings)
    going, offers, pending = _offers(decodings, outcomes)
    if not going:
        return outcomes
    chosen = _Choice.of(offers, pending, decodings[0].model.drafts_beside(len(going)))
    trees = [decodings[i].draft(size) for i, size in zip(going, chosen.sizes, strict=True)]
    drafted = perf_counter()
    rows = _verify([decodings[i] for i in going], trees)
    step_ms = (perf_counter() - drafted) * 1e3
    nodes = sum(map(len, trees)) + pending
    for i, logits in zip(going, rows, strict=True):
        decodings[i].previous = nodes
        try:
            outcomes[i] = decodings[i].settle(logits, began, step_ms)
        except Exception as problem:
            outcomes[i] = problem
    num_written = sum(len(one.tokens) for one in outcomes if isinstance(one, Written))
    if num_written:
        spent_ms = (perf_counter() - began) * 1e3
        _learn([decodings[i] for i in going], chosen, num_written, step_ms, spent_ms)
    return outcomes


_Offer = tuple[Stakes | None, Proposal]


def _offers(
    decodings: Sequence[Decoding], outcomes: list[Outcome]
) -> tuple[list[int], list[_Offer], int]:
    """Which texts go on, what they offer, and the tokens that are fed again.

    The outcome of a text that fails is filled in.
    """
    pending = sum(one.backend.pending for one in decodings)
    going, offers, kept = [], [], 0
    for i, one in enumerate(decodings):
        try:
            offer = one.offer(Company(len(decodings) - 1, pending, kept, one.previous))
        except Exception as problem:
            outcomes[i] = problem
            continue
        going.append(i)
        offers.append(offer)
        kept += offer[1].kept
    return going, offers, pending


class _Choice(NamedTuple):
    """How many nodes of each offer are verified, at which stakes: those of the whole step."""

    sizes: list[int]
    stakes: Stakes | None
    draft_ms: float

    @classmethod
    def of(cls, offers: Sequence[_Offer], pending: int, most: int) -> _Choice:
        """The best nodes of all offers, as many as are worth their time, at most `most`."""
        there = [stakes for stakes, _ in offers if stakes is not None]
        if not there:
            return cls([0] * len(offers), None, 0.0)
        proposals = [proposal for _, proposal in offers]
        sizes = [proposal.kept for proposal in proposals]
        draft_ms = sum(proposal.draft_ms for proposal in proposals)
        stakes, kept = _joint(there, len(offers), pending, most), sum(sizes)
        ranked = sorted(
            (-probability, i)
            for i, proposal in enumerate(proposals)
            for probability in proposal.probabilities[proposal.kept :]
        )
        probabilities = [one for p in proposals for one in p.probabilities[: p.kept]]
        probabilities += [-negative for negative, _ in ranked]
        size, _ = choose_size(probabilities, stakes, kept=kept, spent_ms=draft_ms, tries=True)
        for _, i in ranked[: size - kept]:
            sizes[i] += 1
        return cls(sizes, stakes, draft_ms)


def _joint(stakes: Sequence[Stakes], roots: int, pending: int, most: int) -> Stakes:
    """What a step over all texts costs: behind as many tokens as they have on average."""
    first = stakes[0]
    if roots == 1 and not first.others:  # more where the others failed
        return first
    return replace(
        first,
        max_nodes=min(most, len(first.curve.base) - roots - pending - 1),
        depth=round(sum(one.depth for one in stakes) / len(stakes)),
        extra=roots - 1 + pending,
        others=roots - 1,
        margin=max(one.margin for one in stakes),
    )


def _learn(
    decodings: Sequence[Decoding],
    chosen: _Choice,
    num_written: int,
    step_ms: float,
    spent_ms: float,
) -> None:
    """Let the curve know what a step took, and each text whether drafts have paid.

    What they gain or lose is all texts' alike: each has a part in the step.
    """
    stakes = chosen.stakes
    if stakes is None:
        return
    curve, num_drafted = stakes.curve, sum(chosen.sizes)
    plain_ms = curve.scale * curve.estimated_ms(1 + stakes.extra, stakes.depth)
    for one in decodings:
        one.balance.add(1 + num_drafted, num_written / len(decodings), spent_ms, plain_ms)
    if curve is decodings[0].model.curve_now():  # else the team changed for this step
        work_ms = spent_ms - chosen.draft_ms
        nodes = 1 + num_drafted + stakes.extra
        curve.observe(nodes, stakes.depth, stakes.previous, step_ms, work_ms)


def _verify(decodings: Sequence[Decoding], trees: Sequence[DraftTree]) -> list[Logits]:
    """The logits of each tree."""
    if len(decodings) == 1:
        return [decodings[0].backend.verify(trees[0])]
    whole = decodings[0].model.whole
    assert isinstance(whole, HoldsSequences), "texts of one cache"
    numbers = (one.model.number for one in decodings)
    return whole.verify_together(list(zip(numbers, trees, strict=True)))
