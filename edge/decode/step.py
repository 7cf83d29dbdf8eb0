"""The decode loop: one step of all sequences of a batch, from proposals to what is learned.

    propose -> choose -> verify -> accept -> commit -> learn

The drafts of all sequences are chosen together, by one rule: verified are the nodes with the most
expected tokens per measured millisecond of the whole step. Of a batch that is the geometric mean
over its sequences, so that drafts of one do not slow the others down by more than they speed it up.

Prompts of other requests are prefilled in the same step, in chunks: next to what it computes
anyway, a token more costs a fraction of what a step of its own does. Drafts are chosen as if no
prompt were there, and the time of such a step is not charged to them.

The loop knows no inference library (the backend does), no probabilities (the drafter does), and no
other model that writes for the same request (`Routing` does). `reference.py` is its short form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import prod
from time import perf_counter

from edgespec.backends.base import (
    HoldsSequences,
    Logits,
)
from edgespec.backends.tree import DraftTree
from edgespec.decode.generation import StepOutput
from edgespec.decode.sequence import SequenceState
from edgespec.drafting.constants import REQUIRED_GAIN
from edgespec.drafting.proposal import (
    Proposal,
    StepContext,
    choose_size,
)

# What a step brought a sequence: None where another model writes on, or why it failed.
Outcome = StepOutput | Exception | None
PromptChunk = tuple["SequenceState", Sequence[int]]  # of a prompt, to be prefilled
ChunksBeside = Callable[
    [int], Sequence[PromptChunk]
]  # given how many tokens the step has without them


def make_step(
    sequences: Sequence[SequenceState], chunks_beside: ChunksBeside | None = None
) -> list[Outcome]:
    """One step of some sequences of one cache, with chunks of others' prompts in it.

    A sequence that fails does not keep the others from going on. Raises what the backend raises.
    """
    if chunks_beside is None and len(sequences) == 1 and sequences[0].is_cooling_down:
        return [_plain_step(sequences[0])]
    began_s = perf_counter()
    # Propose: each sequence on its own.
    outcomes: dict[SequenceState, Outcome] = {}
    batch: list[SequenceState] = []
    replayed, kept = sum(one.backend.pending for one in sequences), 0
    for one in sequences:
        try:
            one.propose(len(sequences) - 1, replayed, kept)
        except Exception as problem:
            outcomes[one] = problem
            continue
        batch.append(one)
        kept += one.proposal.kept
    # Choose: the drafts of all sequences together.
    proposals = [one.proposal for one in batch]
    draft_ms = sum(proposal.draft_ms for proposal in proposals)
    contexts = [one.context for one in batch if one.context is not None]
    context = None  # of the whole step; None where nothing is ever drafted
    sizes = [proposal.kept for proposal in proposals]
    if contexts:
        most = batch[0].target.drafts_beside(len(batch))
        context = _batch_context(contexts, len(batch), replayed, most)
        sizes = _chosen_sizes(proposals, context, draft_ms)
    trees = [one.draft_tree(size) for one, size in zip(batch, sizes, strict=True)]
    # Verify all trees, and prefill chunks of prompts.
    num_nodes = sum(map(len, trees)) + replayed
    chunks = chunks_beside(num_nodes) if chunks_beside is not None else ()
    drafted_s = perf_counter()
    rows = _compute(batch, trees, chunks)
    step_ms = (perf_counter() - drafted_s) * 1e3
    num_fed = num_nodes + sum(len(tokens) for _, tokens in chunks)
    for (reader, tokens), last in zip(chunks, rows[len(trees) :], strict=True):
        reader.has_prefilled(tokens, last[0], step_ms * len(tokens) / num_fed / 1e3)
    # Accept and commit: each sequence, with what each of its drafts has added to the step.
    num_drafted, node_ms = sum(sizes), None
    if context is not None and num_drafted and not chunks:
        plain_ms, ms = context.estimated_ms(1), context.estimated_ms(1 + num_drafted)
        believed_ms = batch[0].target.times.believed_ms(step_ms, ms)
        node_ms = (believed_ms - plain_ms) / num_drafted
    for one, logits in zip(batch, rows, strict=False):
        one.previous = num_fed
        try:
            outcomes[one] = one.process_output(logits, began_s, step_ms, node_ms)
        except Exception as problem:
            outcomes[one] = problem
    # Learn what the step took, unless a prompt was prefilled in it, a sequence failed, or it had
    # another number of threads.
    if context is not None and not chunks and len(batch) == 1 + context.others:
        is_written = any(isinstance(outcomes[one], StepOutput) for one in batch)
        if is_written and context.curve is batch[0].curve_now(len(batch)):
            nodes = 1 + num_drafted + context.extra
            work_ms = (perf_counter() - began_s) * 1e3 - draft_ms
            context.curve.observe(nodes, context.depth, context.previous, step_ms, work_ms)
    return [outcomes[one] for one in sequences]


def _plain_step(sequence: SequenceState) -> StepOutput | None:
    """A step of one sequence that nothing is drafted for, so that there is nothing to choose."""
    began = perf_counter()
    logits = sequence.backend.verify(sequence.plain_tree())
    sequence.previous = 1
    return sequence.process_output(logits, began, (perf_counter() - began) * 1e3)


def _chosen_sizes(
    proposals: Sequence[Proposal], context: StepContext, draft_ms: float
) -> list[int]:
    """How many nodes of each proposal are verified: the best of all that are worth their time."""
    sizes = [proposal.kept for proposal in proposals]
    kept, gains = sum(sizes), proposals[0].probabilities
    order = [0] * len(gains)
    if len(proposals) > 1 or kept:
        gains, order = _batch_gains(proposals)
    size, _ = choose_size(
        gains,
        context,
        kept=kept,
        spent_ms=draft_ms,
        required_gain=1.0 if draft_ms else REQUIRED_GAIN,  # a model's were promised beforehand
        tries=True,
    )
    for i in order[: size - kept]:
        sizes[i] += 1
    return sizes


def _batch_gains(proposals: Sequence[Proposal]) -> tuple[list[float], list[int]]:
    """What each node adds to the tokens that the batch expects, and which proposal it is of.

    The best come first, behind those that are kept. Counted is the geometric mean over the
    sequences, times their number: a node of a sequence that expects E tokens without it is ranked
    by its probability over E. (What the sum of the logarithms of all speeds is largest for is
    called proportionally fair: Kelly, "Charging and rate control for elastic traffic", 1997.)
    """
    batch_size, kept = len(proposals), sum(proposal.kept for proposal in proposals)
    expected = [1.0 + sum(one.probabilities[: one.kept]) for one in proposals]
    total = batch_size * prod(expected) ** (1.0 / batch_size)
    gains = [(total - batch_size) / kept] * kept if kept else []
    order: list[int] = []
    nodes = [iter(one.probabilities[one.kept :]) for one in proposals]
    best = [(-p / expected[i], i) for i, left in enumerate(nodes) for p in islice(left, 1)]
    heapify(best)
    while best:
        gain, i = heappop(best)
        expected[i] *= 1.0 - gain
        before, total = total, total * (1.0 - gain) ** (1.0 / batch_size)
        gains.append(total - before)
        order.append(i)
        if (probability := next(nodes[i], None)) is not None:
            heappush(best, (-probability / expected[i], i))
    return gains, order


def _batch_context(
    contexts: Sequence[StepContext], roots: int, replayed: int, most: int
) -> StepContext:
    """What a step over all sequences costs: at the average of their lengths in the cache."""
    first = contexts[0]
    if roots == 1 and not first.others:  # more where the others failed
        return first
    return replace(
        first,
        max_nodes=min(most, len(first.curve.base) - roots - replayed - 1),
        depth=round(sum(one.depth for one in contexts) / len(contexts)),
        extra=roots - 1 + replayed,
        others=roots - 1,
    )


def _compute(
    sequences: Sequence[SequenceState], trees: Sequence[DraftTree], chunks: Sequence[PromptChunk]
) -> list[Logits]:
    """The logits of each tree, and the row behind each chunk."""
    members = [*sequences, *(one for one, _ in chunks)]
    if not members:
        return []
    if len(members) == 1:
        backend = members[0].backend
        return [backend.verify(tree) for tree in trees] or [backend.prefill(chunks[0][1])[None]]
    cache = members[0].target.backend
    assert isinstance(cache, HoldsSequences), "sequences of one cache"
    return cache.verify_together(
        [(one.number, tree) for one, tree in zip(sequences, trees, strict=True)],
        [(one.number, tokens) for one, tokens in chunks],
    )
