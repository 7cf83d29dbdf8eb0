"""Drafters that write ahead: a smaller model with the target's vocabulary, or a head of the target.

One drafts a main chain of tokens, a step of its own each, and beside them its next best where
the target verifies branches: what DySpec's greedy expansion (arXiv 2410.11744) comes to when each
step of the draft model extends the likeliest path alone. Drafting stops where one more token is
not expected to raise the tokens/ms of the round: a rule by value, not a fixed length.

A node's probability is counted by

    best or drawn x rank among its siblings x the draft model's share for it

Drawn nodes carry the distribution they were drawn from. Whether one is drawn is decided from what
was drawn before it, never from its own token (`edgespec.decode.verification` says why).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from time import perf_counter
from typing import Any, Protocol
from warnings import warn

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Backend, DraftDistribution, DraftTree, Logits
from edgespec.drafting import constants
from edgespec.drafting.constants import (
    BELIEF,
    BELIEF_POWER,
    CELL_STRENGTH,
    DRAFT_GUESSES,
    LONGEST,
    MOST_DRAWN,
    SHARE_BORDERS,
    SPREAD,
    WIDTH,
)
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    CountingDrafter,
    DraftEstimate,
    Proposal,
    StepContext,
    TopTokens,
    VerifyResult,
    choose_size,
)
from edgespec.errors import DraftModelWarning, EdgespecError, UnsupportedError
from edgespec.memory.times import HICCUP, Chunk, CostCurve
from edgespec.models.early_exit import WINDOW, ExitInfo, gains_of
from edgespec.prefix import common_prefix_length
from edgespec.sampling.sampling import Sampler, without

_FAILURES = (EdgespecError, OSError, MemoryError)  # of a backend; all else is a mistake of ours
_NUM_RANKS = 3  # nodes beside each other
SHARES = len(SHARE_BORDERS) + 1  # of the draft model's share for a token
_PLACES = "places"  # of a stored state: the counts of places in a chain


def new_calibration() -> Calibration:
    """Cells are numbered (drawn * ranks + rank) * shares + share."""
    groups = [cell // SHARES for cell in range(2 * _NUM_RANKS * SHARES)]
    borders = pairwise((0.0, *SHARE_BORDERS, 1.0))
    said = {
        cell: (CELL_STRENGTH * BELIEF * ((low + high) / 2.0) ** BELIEF_POWER, CELL_STRENGTH)
        for cell, (low, high) in enumerate(borders)
    }
    return Calibration(len(groups), groups, groups, [p for row in DRAFT_GUESSES for p in row], said)


class ProposalBuilder:
    """A proposal that grows behind the last draft of its main chain: a token and siblings."""

    def __init__(self, context: StepContext, calibration: Calibration) -> None:
        self._context = context
        self._calibration = calibration
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self.probabilities: list[float] = []
        self._cells: list[int] = []
        self._distributions: list[DraftDistribution] = []
        self._main_chain: list[int] = []  # its nodes

    @property
    def depth(self) -> int:
        """Tokens of the main chain."""
        return len(self._main_chain)

    @property
    def last_draft(self) -> int:
        """The last token of the main chain."""
        return self.tokens[self._main_chain[-1]]

    @property
    def chance(self) -> float:
        """That the whole main chain is accepted."""
        return self.probabilities[self._main_chain[-1]] if self._main_chain else 1.0

    def main_chain_probabilities(self) -> list[float]:
        """Of its nodes, [depth]."""
        return [self.probabilities[node] for node in self._main_chain]

    @property
    def is_full(self) -> bool:
        """Whether as much is drafted as may be."""
        most = self._context.max_nodes
        return len(self.tokens) >= (min(most, MOST_DRAWN) if self._context.sampler else most)

    def proposal(self, draft_ms: float) -> tuple[Proposal, list[int]]:
        """What has grown, the most probable first unless it was drawn, and the cells."""
        drawn = len(self._distributions)
        grown = Proposal(
            self.tokens,
            self._parents,
            self.probabilities,
            distributions=self._distributions,
            kept=drawn,
            draft_ms=draft_ms,
        )
        if drawn:
            return grown, self._cells
        order = sorted(range(len(self.tokens)), key=lambda node: -self.probabilities[node])
        return grown.part(order), [self._cells[node] for node in order]

    def main_chain(self) -> list[int]:
        return [self.tokens[node] for node in self._main_chain]

    def take(self, tokens: Sequence[int], shares: Sequence[float]) -> None:
        """The best of these tokens, best first with the draft model's shares; others beside it."""
        parent, chance = self._descend()
        width = _NUM_RANKS if self._context.branches else 1
        for rank, (token, share) in enumerate(zip(tokens[:width], shares, strict=False)):
            cell = _cell(0, rank, share)
            probability = chance * self._calibration.probability(cell)
            if rank > 0 and (self.is_full or probability < self._context.min_probability):
                return
            self._add(token, parent, probability, cell)

    def draw(self, row: Logits, sampler: Sampler) -> None:
        """A token that is drawn from logits [V], and others beside it."""
        ids, chances = sampler.unsorted_distribution(
            row[: sampler.vocab_size]
        )  # a pair may share fewer tokens
        parent, chance = self._descend()
        dense = np.zeros(sampler.vocab_size, np.float32)
        dense[slice(None) if ids is None else ids] = chances
        distribution: DraftDistribution | None = dense
        for rank in range(_NUM_RANKS if self._context.branches else 1):
            # What a sibling is worth before its token is known: what those before it were worth.
            worth = chance * self._calibration.group_probability(_NUM_RANKS + rank)
            if distribution is None or (
                rank > 0 and (self.is_full or worth < self._context.min_probability)
            ):
                return
            token = sampler.draw(distribution.astype(np.float64, copy=False))
            cell = _cell(1, rank, float(distribution[token]))
            self._distributions.append(distribution)
            self._add(token, parent, chance * self._calibration.probability(cell), cell)
            distribution = without(distribution, token)

    def _descend(self) -> tuple[int, float]:
        """The last draft, whose chance comes with it; the next node is the new one."""
        before = self._main_chain[-1] if self._main_chain else -1, self.chance
        self._main_chain.append(len(self.tokens))
        return before

    def _add(self, token: int, parent: int, probability: float, cell: int) -> None:
        self.tokens.append(token)
        self._parents.append(parent)
        self.probabilities.append(probability)
        self._cells.append(cell)


def _cell(drawn: int, rank: int, share: float) -> int:
    return (drawn * _NUM_RANKS + rank) * SHARES + share_bin(share)


def share_bin(share: float) -> int:
    """Which of `SHARES` a share is counted with."""
    return bisect_right(SHARE_BORDERS, share)


def top_tokens_of(row: Logits) -> TopTokens:
    """At most eight tokens of logits [V], best first, and their shares of their joint probability.

    Tokens far below the best one are left out. Two passes over the vocabulary: 30 us for 50,000.
    """
    best = row.max()
    ids = np.flatnonzero(row > best - np.float32(SPREAD))
    if len(ids) > WIDTH:
        ids = ids[np.argpartition(row[ids], len(ids) - WIDTH)[-WIDTH:]]
    logits = row[ids]
    order = np.argsort(-logits)
    weights = np.exp(logits[order] - best)
    return ids[order].tolist(), (weights / weights.sum()).tolist()


class ModelText:
    """A text that grows, as far as a draft model, `backend`, has to see it.

    A text with a token from `readable` on cannot be read. With a `window` no more than so many
    tokens are read at once: the text begins with its last ones, and does so again where more of
    them were missed or where the context is full, `room` being kept for drafts.
    """

    def __init__(self, backend: Backend, readable: int, window: int | None, room: int) -> None:
        self.backend = backend
        self.chunk = backend.batch_size  # tokens that it reads at once
        self.tokens: list[int] = []
        self.cached: list[int] = []  # tokens in the backend's cache
        self.shared = 0  # of them, those the text begins with
        self._readable = readable
        self._window = window
        self._room = room
        self._is_readable = True  # every token so far

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new one; nothing is computed."""
        self.tokens = list(tokens[-self._window :] if self._window else tokens)
        self._is_readable = max(tokens, default=0) < self._readable
        self.shared = common_prefix_length(self.cached, self.tokens)

    def append(self, emitted: Sequence[int]) -> None:
        """Go on with more tokens; those that were drafted are in the cache already."""
        self.tokens += emitted
        self._is_readable = self._is_readable and max(emitted, default=0) < self._readable
        self.shared = common_prefix_length(self.cached, self.tokens, self.shared)
        self._leave_behind()

    def _leave_behind(self) -> None:
        """Begin anew with the last tokens where that is less to read, or all that fits."""
        window, length = self._window, len(self.tokens)
        if window and (length - self.shared > window or not self._fits):
            del self.tokens[:-window]
            self.shared = 0

    def forget(self) -> None:
        """Empty the cache."""
        self.backend.truncate(0)
        self.cached, self.shared = [], 0

    @property
    def _fits(self) -> bool:
        return len(self.tokens) + self._room <= self.backend.context_size

    @property
    def can_be_read(self) -> bool:
        """Whether the backend has room for it, and all of its tokens."""
        return self._is_readable and self._fits

    @property
    def num_missing(self) -> int:
        """Tokens to be fed before anything can be drafted; the last one is fed in any case."""
        return max(1, len(self.tokens) - self.shared)

    def catch_up(self) -> Logits:
        """Feed what the backend has not seen; logits after the last token, [V]."""
        backend = self.backend
        kept = backend.truncate(min(self.shared, len(self.tokens) - 1))
        self.cached, self.shared = self.tokens[:kept], kept  # should a step fail
        missing = self.tokens[kept:]
        while len(missing) > backend.max_nodes:
            size = min(backend.batch_size, len(missing) - 1)
            backend.prefill(missing[:size])
            missing = missing[size:]
        self.cached, self.shared = list(self.tokens), len(self.tokens)
        return self._feed(missing)

    def feed_draft(self, token: int) -> Logits:
        """Go on with a token that is not in the text yet; logits after it, [V]."""
        logits = self._feed([token])
        self.cached.append(token)
        return logits

    def _feed(self, tokens: Sequence[int]) -> Logits:
        logits = self.backend.verify(DraftTree.chain(tokens))
        self.backend.commit(range(len(tokens)))
        last: Logits = logits[-1]
        return last


class Head(Protocol):
    """What drafts beside a backend that tells it all it reads.

    `reads_prompts` says whether it reads prompts as the backend does, or the last tokens of one
    when it drafts first. A step drafts `block` tokens, or one if that is 0.
    """

    reads_prompts: bool

    @property
    def token_ids(self) -> NDArray[np.int64] | None:
        """V' of the target's tokens, which rows of logits stand for; None: all of them."""

    @property
    def block(self) -> int:
        """Tokens that a step drafts; 0: one by one, each behind those before it."""

    @property
    def context_size(self) -> int:
        """Tokens there is room for."""

    @property
    def num_unread(self) -> int:
        """Tokens of the text that are fed before anything is drafted."""

    def begin(self, token: int) -> Logits:
        """Logits of what comes after `token`, which the backend has not read yet, [V']."""

    def go_on(self, token: int) -> Logits:
        """Logits of what comes after one token more, [V']; of a block no more than it has."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the engine says it allocated, by component."""

    def close(self) -> None:
        """Free it; safe to call twice."""


class WindowHead(Head, Protocol):
    """A head that is the target over the first and the last cells of its cache."""

    first: int
    last: int

    @property
    def num_cells(self) -> int:
        """Cells of the text."""

    def end(self) -> None:
        """A chain is drafted: its cells and the text's are given up."""


class HeadText:
    """The text as a head sees it: one that goes on and back with its model by itself.

    There is nothing to catch up with but what the target has read since the head drafted last.
    """

    chunk = 0  # tokens read at once: as many as its steps have

    def __init__(self, head: Head) -> None:
        self.backend = head
        self.tokens: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """As of `ModelText`, like all that follows."""
        self.tokens = list(tokens)

    def append(self, emitted: Sequence[int]) -> None:
        self.tokens += emitted

    def forget(self) -> None:
        """There is no cache of its own."""

    @property
    def can_be_read(self) -> bool:
        return len(self.tokens) + LONGEST <= self.backend.context_size

    @property
    def num_missing(self) -> int:
        return self.backend.num_unread + 1

    def catch_up(self) -> Logits:
        return self.backend.begin(self.tokens[-1])

    def feed_draft(self, token: int) -> Logits:
        return self.backend.go_on(token)


class WindowText(HeadText):
    """The text as a window of the model itself sees it: of no more depth than that is wide."""

    backend: WindowHead

    def begin(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens[-1:])

    def append(self, emitted: Sequence[int]) -> None:
        self.tokens = list(emitted[-1:])

    @property
    def can_be_read(self) -> bool:
        """Where the text is so long that a part of it is read sooner."""
        head = self.backend
        return 2 * (head.first + head.last) < head.num_cells < head.context_size - LONGEST


class WritingDrafter(CountingDrafter):
    """Drafts with an engine of its own that reads the text and writes ahead.

    An engine that fails is said so once, with a DraftModelWarning, and never asked again: what
    failed would fail in each round, and take its time. Answers go on without.

    Args:
        curve: what steps of the engine take.
        token_ids: the target's tokens that rows of logits stand for; None are the first ones.
        promised: what an i + 1st draft adds to the tokens of a round, as a file says.
    """

    has_engine = True
    _who = _component = ""
    _block = 0  # tokens that one step drafts; 0: one by one
    draws = True
    _usual_prompt = constants.USUAL_PROMPT  # tokens that it reads before its first draft
    _text: ModelText | HeadText

    def __init__(
        self,
        curve: CostCurve,
        vocab_size: int,
        token_ids: Sequence[int] | NDArray[np.int64] | None = None,
        promised: Sequence[float] = (),
    ) -> None:
        super().__init__(new_calibration())
        self.failure: str | None = None  # of the backend, in its words
        self._curve = curve
        self._vocab_size = vocab_size
        self._ids = None if token_ids is None else np.array(token_ids)
        self._places = calibration_of_places(promised)  # that a place of the main chain is right
        self._main_chain: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text; nothing is computed before it pays."""
        super().begin(tokens)
        self._places.forget_recent()
        self._places.fade(constants.PRIOR_TRIES)  # texts before it say little: tasks differ
        self._main_chain = []
        self._text.begin(tokens)

    def forget(self) -> None:
        """Empty the cache, which knows the last text; what was learned stays."""
        self._text.forget()

    # -- drafting --------------------------------------------------------------------------

    def estimate(self, context: StepContext) -> DraftEstimate:
        """What chains brought, place by place, and what drafting takes now."""
        if self.failure is not None or not self._text.can_be_read:
            return DraftEstimate(())
        most = min(context.max_nodes, self._block or LONGEST)
        chances = list(accumulate(map(self._places.probability, range(most)), mul))
        step_ms = self._step_ms()
        read_ms = max(0.0, self._read_ms(self._text.num_missing) - step_ms)
        if self._block:
            return DraftEstimate(chances, read_ms, first_ms=step_ms)
        return DraftEstimate(chances, read_ms, node_ms=step_ms)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """A main chain of the draft model's tokens, with siblings where they can be verified."""
        self._proposal, self._main_chain = EMPTY, []
        if self.failure is not None or not self._text.can_be_read:
            return EMPTY
        began = perf_counter()
        builder = self._new_builder(context)
        try:
            self._build(builder, context)
        except _FAILURES as error:
            self.failure = str(error) or type(error).__name__
        # What was drawn before a failure stays: dropping it because its own token could not be fed
        # would bias the output.
        self._main_chain = builder.main_chain()
        self._proposal, self._cells = builder.proposal((perf_counter() - began) * 1e3)
        if self.failure is not None:
            warn(f"{self._who} failed and is left out: {self.failure}", DraftModelWarning, 2)
        return self._proposal

    def _new_builder(self, context: StepContext) -> ProposalBuilder:
        """What rows of the engine become a proposal with."""
        return ProposalBuilder(context, self._calibration)

    def _build(self, builder: ProposalBuilder, context: StepContext) -> None:
        missing, began = self._text.num_missing, perf_counter()
        logits = self._text.catch_up()
        start = perf_counter()
        self._learn(missing, (start - began) * 1e3)
        # What was read serves many rounds. This one pays for the step behind its first token, or it
        # would seem so dear already that any number of further drafts were cheap.
        paid_ms = self._step_ms()
        while self._extend(builder, logits, context):
            # A pause in here does not make further drafts look cheap.
            most_ms = HICCUP * builder.depth * self._step_ms()
            spent_ms = paid_ms + min((perf_counter() - start) * 1e3, most_ms)
            if not self._goes_on(builder, context, spent_ms):
                break
            began = perf_counter()
            logits = self._text.feed_draft(builder.last_draft)
            if not self._block:
                self._learn(1, (perf_counter() - began) * 1e3)

    def _learn(self, num_tokens: int, ms: float) -> None:
        """A step of the engine over so many tokens took `ms`, or several over more of them."""
        depth, chunk = len(self._text.tokens), min(num_tokens, self._text.chunk)
        if num_tokens <= self._curve.max_nodes:
            self._curve.observe(num_tokens, depth, num_tokens, ms)
        elif chunk > self._curve.max_nodes:
            each_ms = max(0.0, ms - self._step_ms()) * chunk / num_tokens
            self._curve.observe_chunk(Chunk(chunk, depth // 2), 0, each_ms)

    def _goes_on(self, builder: ProposalBuilder, context: StepContext, spent_ms: float) -> bool:
        """Whether one more token of the main chain is expected to raise the round's tokens/ms."""
        longest, depth = min(self._block or LONGEST, context.max_nodes), builder.depth
        if builder.is_full or depth >= longest:
            return False
        main_chain = builder.main_chain_probabilities()
        places = map(self._places.probability, range(depth, longest))
        ahead = list(accumulate(places, mul, initial=builder.chance))[1:]
        size, _ = choose_size(
            [*main_chain, *ahead],
            context,
            kept=depth if self.draws and context.sampler else 0,
            spent_ms=spent_ms,
            node_ms=0.0 if self._block else self._step_ms(),
            drafted=depth,
            tries=True,  # as what is verified is chosen
        )
        return size > depth

    def _step_ms(self) -> float:
        """One step of the engine at this moment."""
        return self._curve.scale * self._curve.estimated_ms(1, len(self._text.tokens))

    def _read_ms(self, num_tokens: int) -> float:
        """What feeding so many tokens takes at this moment."""
        depth = len(self._text.tokens)
        return self._curve.scale * self._curve.read_ms(num_tokens, depth, self._text.chunk)

    def reading_ms(self) -> float:
        """As of `Drafter`."""
        return self._read_ms(self._usual_prompt)

    def _extend(self, builder: ProposalBuilder, logits: Logits, context: StepContext) -> bool:
        """Let it grow by a row of the draft model; False for a broken one."""
        logits = logits[: self._vocab_size]  # the rest pads it
        if not np.isfinite(logits.max()):
            return False
        if context.sampler is not None:
            builder.draw(self._spread(logits), context.sampler)
            return True
        tokens, shares = top_tokens_of(logits)
        builder.take(tokens if self._ids is None else self._ids[tokens].tolist(), shares)
        return True

    def _spread(self, logits: Logits) -> Logits:
        """The row over the target's tokens [V]; those it has no row for get -inf."""
        if self._ids is None and len(logits) == self._vocab_size:
            return logits
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[slice(len(logits)) if self._ids is None else self._ids] = logits
        return row

    # -- learning --------------------------------------------------------------------------

    def observe(self, result: VerifyResult) -> None:
        """Count what was accepted; drafts that were right stay in the draft model's cache."""
        super().observe(result)
        for place, (token, written) in enumerate(
            zip(self._main_chain, result.emitted, strict=False)
        ):
            self._places.count(place, token == written)
            if token != written:
                break
        self._main_chain = []
        self._text.append(result.emitted)

    def share_with(self, other: WritingDrafter) -> None:
        super().share_with(other)
        self._places = other._places.for_another_text()

    def state(self) -> dict[str, Any]:
        return {**super().state(), _PLACES: self._places.as_json()}

    def load_state(self, document: dict[str, Any] | None) -> None:
        super().load_state(document)
        self._places.load_json((document or {}).get(_PLACES))

    def memory_bytes(self) -> dict[str, int]:
        found = self._text.backend.memory_bytes()
        return {f"{self._component}_{name}": size for name, size in found.items()}

    def close(self) -> None:
        self._text.backend.close()


def calibration_of_places(promised: Sequence[float]) -> Calibration:
    """How often the token at each place of a chain is right where those before it were.

    A file's own figures, or a first guess, are counts of tries that nobody made here: three wrong
    drafts in a first answer do not close a drafter for thousands of rounds.
    """
    tries, guess, before, known = constants.PRIOR_TRIES, DRAFT_GUESSES[0][0], 1.0, {}
    for place, gain in enumerate(promised[:LONGEST]):
        chance = min(1.0, gain / before) if before > 0.0 else 0.0
        known[place] = (tries * chance, tries)
        before = gain
    if not promised:
        known = dict.fromkeys(range(LONGEST), (tries * guess, tries))
    return Calibration(LONGEST, [0] * LONGEST, [0] * LONGEST, [guess], known)


class ModelDrafter(WritingDrafter):
    """Drafts with `backend`, whose steps take what `curve` says, for a target of `vocab_size`.

    A text with a token from `readable` on, which only the target has, is not drafted for. An early
    exit reads no more than its window at once: it begins with the last tokens of a text, and does
    so again where it has missed more of them or where its context is full.

    Raises UnsupportedError for a backend that cannot take back what was only a draft.
    """

    name = "model"
    has_to_read = True
    _who, _component = "the draft model", "draft"
    _text: ModelText

    def __init__(
        self,
        backend: Backend,
        curve: CostCurve,
        vocab_size: int,
        readable: int | None = None,
        early_exit: ExitInfo | None = None,
    ) -> None:
        promised = gains_of(early_exit.report) if early_exit else ()
        if not backend.capabilities.truncate:
            raise UnsupportedError(
                f"this model cannot draft: {backend.capabilities.reason}",
                hint="use a draft model without sliding windows or recurrent layers",
            )
        window = WINDOW if early_exit else None
        readable = vocab_size if readable is None else readable
        token_ids = early_exit.token_ids if early_exit else None
        super().__init__(curve, vocab_size, token_ids, promised)
        self._text = ModelText(backend, readable, window, LONGEST)
        if window:  # of which an exit reads no more
            self._usual_prompt = min(constants.USUAL_PROMPT, window)


class HeadDrafter(WritingDrafter):
    """Drafts with a head, which reads the target's own rows, for a target of `vocab_size`."""

    name = "head"
    _who, _component = "the head", "head"
    _text: HeadText

    def __init__(
        self,
        text: HeadText,
        curve: CostCurve,
        vocab_size: int,
        promised: Sequence[float] = (),
    ) -> None:
        super().__init__(curve, vocab_size, text.backend.token_ids, promised)
        self._text, self._block = text, text.backend.block
        text.backend.reads_prompts = False

    def can_read_prompts(self, *, pays: bool) -> None:
        self._text.backend.reads_prompts = pays


class WindowDrafter(WritingDrafter):
    """Drafts with the target itself, behind a long text, over a part of its cache."""

    name = "window"
    _who, _component = "the window", "window"
    _usual_prompt = 0  # the target has read it
    _text: WindowText

    def __init__(self, text: WindowText, curve: CostCurve, vocab_size: int) -> None:
        head = text.backend
        sizes, depth = range(1, curve.max_nodes + 1), head.first + head.last
        steps = [float("inf"), *(curve.estimated_ms(size, depth) for size in sizes)]
        curve = CostCurve(steps, level=curve.level)
        super().__init__(curve, vocab_size, promised=constants.WINDOW_GAINS)
        self._text = text

    def _build(self, builder: ProposalBuilder, context: StepContext) -> None:
        try:
            super()._build(builder, context)
        finally:
            self._text.backend.end()
