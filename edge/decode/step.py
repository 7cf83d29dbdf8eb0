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
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import prod
from time import perf_counter
from typing import NamedTuple

from edgespec.backends.base import HoldsSequences, Logits
from edgespec.backends.tree import DraftTree
from edgespec.decode.decoding import Company, Decoding, Offer
from edgespec.decode.generation import Written
from edgespec.drafting.controller import choose_size
from edgespec.drafting.proposal import Proposal, Stakes

# What a round of one text came to: None where another model writes on, or why it failed.
Outcome = Written | Exception | None


class Piece(NamedTuple):
    """What is read of a text in a step."""

    decoding: Decoding
    tokens: Sequence[int]


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
    if read_beside is None and len(decodings) == 1 and decodings[0].rests:
        return [_plain_step(decodings[0])]
    began = perf_counter()
    outcomes: list[Outcome] = [None] * len(decodings)
    going, offers, pending = _offers(decodings, outcomes)
    most = decodings[0].model.drafts_beside(len(going)) if going else 0
    chosen = _Choice.of(offers, pending, most)
    trees = [decodings[i].draft(size) for i, size in zip(going, chosen.sizes, strict=True)]
    nodes = sum(map(len, trees)) + pending
    pieces = read_beside(nodes) if read_beside is not None else ()
    num_read = sum(len(piece.tokens) for piece in pieces)
    drafted = perf_counter()
    rows = _compute([decodings[i] for i in going], trees, pieces)
    step_ms = (perf_counter() - drafted) * 1e3
    for piece, last in zip(pieces, rows[len(going) :], strict=True):
        spent_ms = step_ms * len(piece.tokens) / (nodes + num_read)
        piece.decoding.has_read(piece.tokens, last[0], spent_ms / 1e3)
    for i, logits in zip(going, rows, strict=False):
        decodings[i].previous = nodes + num_read
        try:
            outcomes[i] = decodings[i].settle(logits, began, step_ms)
        except Exception as problem:
            outcomes[i] = problem
    num_written = sum(len(one.tokens) for one in outcomes if isinstance(one, Written))
    if num_written:
        spent_ms = (perf_counter() - began) * 1e3
        texts = [decodings[i] for i in going]
        _learn(texts, chosen, num_written, step_ms, spent_ms, has_read=bool(pieces))
    return outcomes


def _offers(
    decodings: Sequence[Decoding], outcomes: list[Outcome]
) -> tuple[list[int], list[Offer], int]:
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
        kept += offer.proposal.kept
    return going, offers, pending


class _Choice(NamedTuple):
    """How many nodes of each offer are verified, at which stakes: those of the whole step."""

    sizes: list[int]
    stakes: Stakes | None
    draft_ms: float

    @classmethod
    def of(cls, offers: Sequence[Offer], pending: int, most: int) -> _Choice:
        """The best nodes of all offers, as many as are worth their time, at most `most`."""
        if len(offers) == 1 and not offers[0][1].kept:  # which nothing has to be ranked for
            [(alone, proposal)] = offers
            if alone is not None and not alone.others:
                spent_ms, chances = proposal.draft_ms, proposal.probabilities
                size, _ = choose_size(chances, alone, spent_ms=spent_ms, tries=True)
                return cls([size], alone, spent_ms)
        there = [stakes for stakes, _ in offers if stakes is not None]
        if not there:
            return cls([0] * len(offers), None, 0.0)
        proposals = [proposal for _, proposal in offers]
        sizes = [proposal.kept for proposal in proposals]
        draft_ms = sum(proposal.draft_ms for proposal in proposals)
        stakes, kept = _joint(there, len(offers), pending, most), sum(sizes)
        worth, order = _shared_worth(proposals)
        size, _ = choose_size(worth, stakes, kept=kept, spent_ms=draft_ms, tries=True)
        for i in order[: size - kept]:
            sizes[i] += 1
        return cls(sizes, stakes, draft_ms)


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
    *,
    has_read: bool,
) -> None:
    """Let the curve know what a step took, and each text whether drafts have paid.

    What they gain or lose is all texts' alike: each has a part in the step. Of a step that others
    were read in, the nodes have what they would have taken alone.
    """
    stakes = chosen.stakes
    if stakes is None:
        return
    curve, num_drafted = stakes.curve, sum(chosen.sizes)
    if has_read:
        expected_ms = stakes.estimated_ms(1 + num_drafted)
        spent_ms += expected_ms - step_ms
    plain_ms = curve.scale * curve.estimated_ms(1 + stakes.extra, stakes.depth)
    work_ms = spent_ms - chosen.draft_ms
    # What a drafter's purse pays for is no loss of the others, nor are its tokens a gain.
    paid = sum(one.balance.paid[0] for one in decodings)
    left, tokens = num_drafted - paid, num_written - sum(one.balance.paid[1] for one in decodings)
    left_ms = work_ms - max(0.0, step_ms - plain_ms) * paid / max(1, num_drafted)
    known = decodings[0].model.known
    for balance in (*(one.balance for one in decodings), known.balance):
        balance.add(1 + left, tokens / len(decodings), left_ms, plain_ms)
    # Snapshots are kept for the drafts of all, and what models take to make them counts, too.
    each = num_written / len(decodings)
    for _ in decodings:
        known.balances.add(1 + num_drafted, each, work_ms, plain_ms, chosen.draft_ms)
    texts = 1 + stakes.others
    # Else the team changed for this step, or one of the texts failed.
    if not has_read and curve is decodings[0].model.curve_now(texts) and len(decodings) == texts:
        nodes = 1 + num_drafted + stakes.extra
        curve.observe(nodes, stakes.depth, stakes.previous, step_ms, work_ms)


def _compute(
    decodings: Sequence[Decoding], trees: Sequence[DraftTree], pieces: Sequence[Piece]
) -> list[Logits]:
    """The logits of each tree, and those after each piece."""
    members = [*decodings, *(piece.decoding for piece in pieces)]
    if not members:
        return []
    if len(members) == 1:
        backend = members[0].backend
        return [backend.verify(tree) for tree in trees] or [backend.prefill(pieces[0].tokens)[None]]
    whole = members[0].model.whole
    assert isinstance(whole, HoldsSequences), "texts of one cache"
    numbers = [one.model.number for one in members]
    return whole.verify_together(
        list(zip(numbers, trees, strict=False)),
        [(piece.decoding.model.number, piece.tokens) for piece in pieces],
    )
