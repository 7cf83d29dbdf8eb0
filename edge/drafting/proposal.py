"""What drafters are and propose, what a round may cost, and the one rule that chooses between both.

Verified is the number of nodes with the most expected tokens per measured millisecond:

    n* = argmax over n of  E(n) / (t_draft + t(n)),   E(n) = 1 + sum of the n-1 largest path
                                                              probabilities

Where several texts share the step, E(n) begins with one token for each of them, and is their number
times the geometric mean (`batch_gains`). No nodes but their roots are plain decoding and an
ordinary choice. The best of many noisy estimates is too good on average, so steps over drafts are
taken to be as slow as their times are unsure. What may be lost at most is not its business
(the ledger in `combined.py`). The rule knows neither drafters nor backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf, prod
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import DraftDistribution, DraftTree, is_chain
from edgespec.drafting import constants
from edgespec.memory.store.texts import KeptText
from edgespec.memory.times import CostCurve

if TYPE_CHECKING:
    from edgespec.sampling.sampling import Sampler


Counts = Mapping[int, tuple[float, float]]  # hits and tries by cell


class Calibration:
    """Acceptance probabilities by counting: hits and misses by cell, by group of cells, and lately.

    A drafter describes each node it proposes by a small integer (its `cell`: how long the match
    was, how many earlier places agree, ...). Counting how often nodes of a cell were right gives
    their probability. Three levels are shrunk into each other, because fine cells are rarely seen:

        p_coarse = (hits + 1 * prior) / (tries + 1)      of the group the cell belongs to
        p_cell   = (hits + k_cell * p_coarse) / (tries + k_cell)
        p        = (recent hits + k_recent * p_cell) / (recent tries + k_recent)

    which are posterior means of Beta distributions. `recent` counts fade (half-life of about 7
    trials) and are forgotten with each new text: some texts repeat themselves far more than others.

    A table may begin with counts of other models (`priors.py`). They stand for at most a few tries
    of each cell, so that what is counted here soon says more, and are never stored with it.

    Args:
        num_cells: how many different cells there are.
        groups: the group of each cell, [num_cells].
        recents: the class of recent counts each cell shares, [num_cells].
        priors: probability of each group before anything was counted.
        known: what other models counted.
    """

    def __init__(
        self,
        num_cells: int,
        groups: Sequence[int],
        recents: Sequence[int],
        priors: Sequence[float],
        known: Counts | None = None,
    ) -> None:
        self._groups, self._recents = groups, recents
        self._known_hits = [0.0] * num_cells
        self._known_tries = [constants.CELL_STRENGTH] * num_cells  # those of the group included
        self._hits = [0.0] * num_cells
        self._tries = [0.0] * num_cells
        self._group_hits = list(priors)  # a first guess is one try
        self._group_tries = [1.0] * len(priors)
        self.forget_recent()
        for cell, (hits, tries) in (known or {}).items():
            weight = min(1.0, constants.PRIOR_TRIES / tries)
            self._known_hits[cell] = weight * hits
            self._known_tries[cell] += weight * tries
            self._group_hits[groups[cell]] += weight * hits
            self._group_tries[groups[cell]] += weight * tries

    def for_another_text(self) -> Calibration:
        """A calibration that shares these counts, and has recent counts of its own."""
        other = copy(self)
        other.forget_recent()
        return other

    def probability(self, cell: int) -> float:
        """Chance that a node of this cell is right, given that its parent was."""
        group, recent = self._groups[cell], self._recents[cell]
        coarse = self._group_hits[group] / self._group_tries[group]
        hits = self._hits[cell] + self._known_hits[cell] + constants.CELL_STRENGTH * coarse
        fine = hits / (self._tries[cell] + self._known_tries[cell])
        return (self._recent_hits[recent] + constants.RECENT_STRENGTH * fine) / (
            self._recent_tries[recent] + constants.RECENT_STRENGTH
        )

    def group_probability(self, group: int) -> float:
        """Chance that a node of this group is right, whatever its cell."""
        return self._group_hits[group] / self._group_tries[group]

    def count(self, cell: int, hit: bool) -> None:
        """Record that a node of this cell, whose parent was right, was right or wrong."""
        recent = self._recents[cell]
        self._recent_hits[recent] = constants.RECENT_DECAY * self._recent_hits[recent] + hit
        self._recent_tries[recent] = constants.RECENT_DECAY * self._recent_tries[recent] + 1.0
        self._add(cell, hit, 1.0)
        if self._tries[cell] > constants.MOST_ROUNDS:
            self._add(cell, -0.5 * self._hits[cell], -0.5 * self._tries[cell])

    def _add(self, cell: int, hits: float, tries: float) -> None:
        """Add to a cell and so to its group: a group holds what its cells do, and its prior."""
        group = self._groups[cell]
        self._hits[cell] += hits
        self._tries[cell] += tries
        self._group_hits[group] += hits
        self._group_tries[group] += tries

    def fade(self, tries: float) -> None:
        """Let the counts of each cell stand for at most so many tries."""
        for cell, counted in enumerate(self._tries):
            if counted > tries:
                part = 1.0 - tries / counted
                self._add(cell, -part * self._hits[cell], -part * counted)

    def forget_recent(self) -> None:
        """Start a new text."""
        self._recent_hits = [0.0] * (max(self._recents) + 1)
        self._recent_tries = [0.0] * (max(self._recents) + 1)

    def as_json(self) -> dict[str, Any]:
        """The counts that were touched, for the next run."""
        cells = {
            str(cell): [round(self._hits[cell], 3), round(self._tries[cell], 3)]
            for cell in range(len(self._tries))
            if self._tries[cell] > 0
        }
        return {"num_cells": len(self._tries), "cells": cells}

    def load_json(self, document: Any) -> None:
        """Take over counts of an earlier run; a document of another layout is ignored."""
        if not isinstance(document, dict) or document.get("num_cells") != len(self._tries):
            return
        cells = document.get("cells")
        for name, counts in cells.items() if isinstance(cells, dict) else ():
            with suppress(TypeError, ValueError, OverflowError):
                cell, (hits, tries) = int(name), (round(float(count), 3) for count in counts)
                room = 2 * constants.MOST_ROUNDS  # "1" and "01" are one cell
                if 0 <= cell < len(self._tries) and 0 <= hits <= tries <= room - self._tries[cell]:
                    self._add(cell, hits, tries)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate nodes below the root, most probable first.

    A node's probability is that of its whole path, so it never exceeds its parent's and the best
    n nodes always form a tree. The first `kept` nodes were drawn at random: dropping one after
    seeing its token would bias the output (see `edgespec.decode.verification`), so they stay.
    """

    tokens: Sequence[int]  # [n]
    parents: Sequence[int]  # [n], index into this proposal; -1 is the root
    probabilities: Sequence[float]  # [n], non-increasing behind the kept ones
    sources: Sequence[str] = ()  # [n], the drafter of each node; empty: there is only one
    distributions: Sequence[
        DraftDistribution | None
    ] = ()  # [n], what each was drawn from; empty: none was drawn
    kept: int = 0
    draft_ms: float = 0.0  # time that models took to make it

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, nodes: Sequence[int]) -> Proposal:
        """These nodes in this order; the parents of each must be among them and before it."""
        places = {node: place for place, node in enumerate(nodes)}
        places[-1] = -1
        return Proposal(
            [self.tokens[node] for node in nodes],
            [places[self.parents[node]] for node in nodes],
            [self.probabilities[node] for node in nodes],
            [self.sources[node] for node in nodes] if self.sources else (),
            [self.distributions[node] for node in nodes] if self.distributions else (),
            sum(node < self.kept for node in nodes),
            self.draft_ms,
        )


EMPTY = Proposal((), (), ())


@dataclass(frozen=True)
class StepContext:
    """What a round may cost, and what its drafts are worth: a price list, made once a round.

    Times are those of this moment, as a clock would show them: the curve's at its `scale`.

    At most `max_nodes` may be drafted; those less probable than `min_probability` cannot pay and
    need not be proposed. `branches` says whether siblings can be verified. `sampler` is there when
    the target's tokens are drawn at random: drafts may then be drawn by it, too.
    """

    max_nodes: int
    min_probability: float
    curve: CostCurve
    depth: int  # tokens in the target's cache
    previous: int = 0  # nodes of the target's step before, whose graph can be reused
    extra: int = 0  # tokens that the target will be fed besides the nodes
    others: int = 0  # of these, the roots of other texts, each of which brings a token
    remaining: float = inf  # tokens that the text may still get
    branches: bool = True
    sampler: Sampler | None = None

    @cached_property
    def ms(self) -> list[float]:
        """Predicted times of target steps by their nodes, the root included, [1 + most].

        Estimated where a size was not measured.
        """
        return self.curve.steps_ms(self._sizes, self.depth, self.previous)

    @cached_property
    def errors(self) -> list[float]:
        """Relative standard deviations of the same times."""
        return self.curve.standard_errors(self._sizes, self.depth)

    @property
    def _sizes(self) -> range:
        """Tokens of steps over no node, the root, the root and one more, ..."""
        return range(self.extra, self.extra + 2 + max(1, self.max_nodes))

    @cached_property
    def token_ms(self) -> float:
        """A plain step's time for each of its tokens: the unit of ledgers."""
        return self.ms[1] / (1 + self.others)


@dataclass(frozen=True, slots=True)
class DraftEstimate:
    """What a draft model expects of a round before it is asked, and what asking it takes."""

    probabilities: Sequence[float]  # of the nodes of its chain, non-increasing; none: it cannot
    read_ms: float = 0.0  # to read what it has not seen: bought once, used in many rounds
    first_ms: float = 0.0  # that drafting takes whatever its length
    node_ms: float = 0.0  # and each token more


def choose_size(
    probabilities: Sequence[float],
    context: StepContext,
    *,
    kept: int = 0,
    spent_ms: float = 0.0,
    node_ms: float = 0.0,
    drafted: int = 0,
    required_gain: float = 1.0,
    tries: bool = False,
) -> tuple[int, float]:
    """How many of the proposed nodes to verify, possibly none, and the tokens/ms to expect.

    The step that has to be made in any case, over the root and the kept nodes, is estimated where
    its size was not measured; no other such size is chosen unless it may be tried.

    Args:
        probabilities: what each node adds to the tokens expected (of one text: the path's
            probability), the best first behind the kept ones.
        context: step times and the most that may be drafted.
        kept: the first nodes, which cannot be left out.
        spent_ms: time this round has taken already, by a clock.
        node_ms: time it takes to draft one more node, by a clock.
        drafted: nodes that are drafted already; those behind them take `node_ms` each.
        required_gain: times the tokens/ms without drafts that a choice of more must promise.
        tries: whether a size that was not measured is taken where its estimate is the best. Two
            such steps measure it, so that few are lost where the estimate was too good.
    """
    expected = 1.0 + context.others + sum(probabilities[:kept])
    spent_ms += max(0, kept - drafted) * node_ms
    step_ms, base = context.ms, context.curve.base
    rate = expected / (spent_ms + step_ms[1 + kept])
    best, best_rate, least, required = kept, rate, rate, required_gain * rate
    for size in range(kept + 1, min(len(probabilities), context.max_nodes) + 1):
        expected += probabilities[size - 1]
        if size > drafted:
            spent_ms += node_ms
        tokens = 1 + size + context.extra
        if not tries and (tokens >= len(base) or base[tokens] == inf):
            continue
        ms = step_ms[1 + size]
        rate = expected / (spent_ms + ms)
        if rate > least and rate >= required:
            # What is compared with is unsure, too.
            unsure = max(0.0, context.errors[1 + size] - context.errors[1 + kept])
            cautious = expected / (spent_ms + ms * (1.0 + unsure))
            if cautious > least:
                best, best_rate, least = size, rate, cautious
    return best, best_rate


def chosen_sizes(proposals: Sequence[Proposal], context: StepContext, draft_ms: float) -> list[int]:
    """How many nodes of each proposal are verified: the best of all that are worth their time."""
    sizes = [proposal.kept for proposal in proposals]
    if not any(proposal.tokens for proposal in proposals):
        return sizes
    kept, gains = sum(sizes), proposals[0].probabilities
    order = [0] * len(gains)
    if len(proposals) > 1 or kept:
        gains, order = batch_gains(proposals)
    size, _ = choose_size(
        gains,
        context,
        kept=kept,
        spent_ms=draft_ms,
        # A model's drafts had to promise their gain before it wrote them.
        required_gain=1.0 if draft_ms else constants.REQUIRED_GAIN,
        tries=True,
    )
    for i in order[: size - kept]:
        sizes[i] += 1
    return sizes


def batch_gains(proposals: Sequence[Proposal]) -> tuple[list[float], list[int]]:
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


def batch_context(
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


def likeliest_chain(proposal: Proposal) -> Proposal:
    """The best node, its best child, and so on: for models that cannot verify branches."""
    chain: list[int] = []
    for node, parent in enumerate(proposal.parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return proposal if len(chain) == len(proposal) else proposal.part(chain)


def build_tree(root: int, proposal: Proposal, num_drafted: int) -> DraftTree:
    """The root and the best `num_drafted` nodes, each branch after the one it leaves."""
    if num_drafted == 0:
        return DraftTree.chain((root,))
    parents = proposal.parents[:num_drafted]
    has_branches = not is_chain(parents)
    if has_branches:
        # Depth first, likeliest child first: its path then lies in order.
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        order: list[int] = []
        stack = children[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += reversed(children.get(order[-1], []))
        proposal = proposal.part(order)
    return DraftTree(
        (root, *proposal.tokens[:num_drafted]),
        [-1, *(parent + 1 for parent in proposal.parents)]
        if has_branches
        else range(-1, num_drafted),
        ("", *proposal.sources[:num_drafted]) if proposal.sources else (),
        (None, *proposal.distributions[:num_drafted]) if proposal.distributions else (),
    )


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
    draws = False  # its drafts at random, where the target's tokens are: another text for a seed

    @property
    def nbytes(self) -> int:
        """Bytes its tables may take at most (a ceiling, allocated as they fill)."""
        return 0

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts with `tokens`: the prompt and the first token of the answer."""

    def prepare(self, tokens: Sequence[int], count: int, *, ahead: bool = False) -> None:
        """A prompt is being prefilled, whose first `count` tokens may be indexed now.

        Called for each chunk, so that no step of others waits until `begin` has indexed all of a
        prompt. What is indexed `ahead` of a request is taken back if that never comes.
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
    if not tokens:
        return
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
