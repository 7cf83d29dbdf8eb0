"""The decode loop: a step that texts share, and what each of them does in it.

    propose -> choose -> verify -> accept -> commit -> learn

The drafts of all texts in it are chosen together, by the one rule: what is verified are the nodes
with the most expected tokens per measured millisecond of the whole step. Of several texts it is the
geometric mean of what each expects, so that drafts of one do not slow the others down by more than
they speed it up. One text is the special case, and none of its nodes an ordinary choice.

Prompts of other texts are read in the same step: next to what it computes anyway, a token more
costs a fraction of what a run of its own does. Drafts are chosen as if they were not there, and
what such a step took is no price of theirs.

The loop knows no inference library (the backend does), no probabilities (the drafter does), and no
other model that writes the same text (`Writers` does).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import prod
from time import perf_counter

from edgespec.backends.base import (
    Backend,
    Embeddings,
    HoldsSequences,
    KeepsStates,
    Logits,
    SeesImages,
)
from edgespec.backends.tree import DraftTree
from edgespec.decode.generation import Run, Written
from edgespec.decode.stats import ALONE
from edgespec.decode.verification import TypicalPick, accept, accept_sampled, cut
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.constants import REQUIRED_GAIN
from edgespec.drafting.drafters.base import Drafter, VerifyResult
from edgespec.drafting.drafters.grammar import GrammarDrafter, new_counts
from edgespec.drafting.drafters.proposal_builder import top_tokens_of
from edgespec.drafting.ledger import BelievedTimes, RoundHistory
from edgespec.drafting.proposal import (
    EMPTY,
    Proposal,
    StepContext,
    build_tree,
    choose_size,
    likeliest_chain,
)
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import NO_DIFFERENCE
from edgespec.prefix import common_prefix_length
from edgespec.sampling.sampling import Sampler

# What a round of one text came to: None where another model writes on, or why it failed.
Outcome = Written | Exception | None
# A text, and what is read of it in a step.
Piece = tuple["Decoding", Sequence[int]]
# What is read in a step that so many tokens are fed to.
ReadBeside = Callable[[int], Sequence[Piece]]


def make_step(
    decodings: Sequence[Decoding], read_beside: ReadBeside | None = None
) -> list[Outcome]:
    """One round of each of some texts of one cache, and pieces of others, in one step.

    A text that fails does not keep the others from going on. Raises what the backend raises.
    """
    if read_beside is None and len(decodings) == 1 and decodings[0].is_cooling_down:
        return [_plain_step(decodings[0])]
    began_s = perf_counter()
    # Propose: each text on its own.
    outcomes: dict[Decoding, Outcome] = {}
    going: list[Decoding] = []
    pending, kept = sum(one.backend.pending for one in decodings), 0  # tokens that are fed again
    for one in decodings:
        try:
            one.propose(len(decodings) - 1, pending, kept)
        except Exception as problem:
            outcomes[one] = problem
            continue
        going.append(one)
        kept += one.proposal.kept
    # Choose: the drafts of all texts together.
    proposals = [one.proposal for one in going]
    draft_ms = sum(proposal.draft_ms for proposal in proposals)
    contexts = [one.context for one in going if one.context is not None]
    context = None  # of the whole step; None where nothing is ever drafted
    sizes = [proposal.kept for proposal in proposals]
    if contexts:
        most = going[0].model.drafts_beside(len(going))
        context = _joint(contexts, len(going), pending, most)
        sizes = _chosen_sizes(proposals, context, draft_ms)
    trees = [one.draft(size) for one, size in zip(going, sizes, strict=True)]
    # Verify all trees, and read pieces of prompts.
    num_nodes = sum(map(len, trees)) + pending
    pieces = read_beside(num_nodes) if read_beside is not None else ()
    drafted_s = perf_counter()
    rows = _compute(going, trees, pieces)
    step_ms = (perf_counter() - drafted_s) * 1e3
    num_fed = num_nodes + sum(len(tokens) for _, tokens in pieces)
    for (reader, tokens), last in zip(pieces, rows[len(trees) :], strict=True):
        reader.has_read(tokens, last[0], step_ms * len(tokens) / num_fed / 1e3)
    # Accept and commit: each text, told what each draft has added to the step.
    num_drafted, node_ms = sum(sizes), None
    if context is not None and num_drafted and not pieces:
        plain_ms, ms = context.estimated_ms(1), context.estimated_ms(1 + num_drafted)
        believed_ms = going[0].model.known.steps.believed_ms(step_ms, ms)
        node_ms = (believed_ms - plain_ms) / num_drafted
    for one, logits in zip(going, rows, strict=False):
        one.previous = num_fed
        try:
            outcomes[one] = one.settle(logits, began_s, step_ms, node_ms)
        except Exception as problem:
            outcomes[one] = problem
    # Learn what the step took, if no prompt was read in it. Else the team changed for this step, or
    # one of the texts failed.
    if context is not None and not pieces and len(going) == 1 + context.others:
        is_written = any(isinstance(outcomes[one], Written) for one in going)
        if is_written and context.curve is going[0].model.curve_now(len(going)):
            nodes = 1 + num_drafted + context.extra
            work_ms = (perf_counter() - began_s) * 1e3 - draft_ms
            context.curve.observe(nodes, context.depth, context.previous, step_ms, work_ms)
    return [outcomes[one] for one in decodings]


def _plain_step(decoding: Decoding) -> Written | None:
    """One round of one text that nothing is drafted for, so that there is nothing to choose."""
    began = perf_counter()
    logits = decoding.model.backend.verify(decoding.plain())
    decoding.previous = 1
    return decoding.settle(logits, began, (perf_counter() - began) * 1e3)


def _chosen_sizes(
    proposals: Sequence[Proposal], context: StepContext, draft_ms: float
) -> list[int]:
    """How many nodes of each proposal are verified: the best of all that are worth their time."""
    sizes = [proposal.kept for proposal in proposals]
    kept, worth = sum(sizes), proposals[0].probabilities
    order = [0] * len(worth)
    if len(proposals) > 1 or kept:
        worth, order = _shared_worth(proposals)
    size, _ = choose_size(
        worth,
        context,
        kept=kept,
        spent_ms=draft_ms,
        required_gain=1.0 if draft_ms else REQUIRED_GAIN,  # a model's were promised beforehand
        tries=True,
    )
    for i in order[: size - kept]:
        sizes[i] += 1
    return sizes


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


@dataclass(slots=True)
class Known:
    """Statistics that all answers of an engine share, besides its drafter's."""

    steps: BelievedTimes = field(default_factory=BelievedTimes)
    forced: Calibration = field(default_factory=new_counts)  # text that a grammar forces
    snapshots_cost: float = 1.0  # times as long that plain steps take for keeping snapshots
    # Other curves, by how many times fewer threads, and how many texts in a step.
    curves: dict[tuple[float, int], CostCurve] = field(default_factory=dict)

    def are_snapshots_worth_it(self, drafter: Drafter) -> bool:
        """Whether drafts save what their snapshots cost; True while too little is known."""
        saved, cost = drafter.saved_part, self.snapshots_cost
        if saved is None or cost < NO_DIFFERENCE:
            return True
        return (1.0 - saved) * cost < NO_DIFFERENCE


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can write, and what it drafts with. A drafter needs a curve."""

    backend: Backend
    curve: CostCurve | None
    drafter: Drafter | None
    max_nodes: int  # of a step, roots included
    max_drafts: int  # of these; branches of more have no room
    history: RoundHistory
    known: Known
    whole: Backend | None = None  # whose cache holds this sequence, and others
    number: int = 0  # of the sequence in it

    def drafts_beside(self, roots: int) -> int:
        """Drafts that a step over so many texts has room for."""
        return min(self.max_nodes - roots, self.max_drafts)

    def curve_now(self, texts: int = 1) -> CostCurve | None:
        """Times of steps over so many texts, with as many threads as the last one had."""
        times = self.backend.contention
        key = times, texts
        if key == (1.0, 1) or self.curve is None:
            return self.curve
        if key not in self.known.curves:
            curve = self.curve if times == 1.0 else self.curve.contended(times)
            self.known.curves[key] = curve if texts == 1 else curve.together(texts)
        return self.known.curves[key]


class Decoding:
    """One model writes a text, until that ends or another model goes on.

    It is read in pieces (`has_read`, `first`); then each round has stages, which `make_step` runs
    for any number of texts at once: `propose`, `draft`, `settle`. A round behind which no drafter
    can be asked for some rounds begins a cooldown: plain rounds, of which the drafter is told
    behind them. After a step of the model what Python uses is no longer in the processor's caches:
    telling of a round takes 0.1 ms there, which is 3% of a step of 3 ms, and of many as long.

    Args:
        text: token ids to go on from, not empty.
        reuse: whether what the cache holds of them is kept.
    """

    def __init__(self, model: Model, run: Run, text: list[int], reuse: bool) -> None:
        self.model = model
        self.run = run
        self._text, self._reuse = text, reuse
        self._end = -1  # how far it was read; -1 until that begins
        self._reused = 0  # of that, what the cache had
        self._read_s = 0.0
        # Of the image that comes next: its embeddings, its parts, and since when it is worked on.
        self._encoding: Future[Embeddings] | None = None
        self._parts: Generator[Logits | None, None, None] | None = None
        self._image_since = 0.0
        self._row: Logits | None = None  # [V], after the last piece
        self._stops: Sequence[int] = ()  # where the backend keeps a state
        self._drafted: list[int] | None = None  # the text, once the drafter was given some of it
        self._is_drafted_from = False  # whether it has all of it
        self._drafter = self._chosen_drafter()
        self._cooldown = 0  # plain rounds to come
        # Of the cooldown so far: its first root, the tokens written, and milliseconds of the steps.
        self._plain_root = -1
        self._plain_tokens: list[int] = []
        self._plain_ms: list[float] = []
        self._is_plain = False  # whether this round is one of them
        self._min_probability = 0.0  # of a draft node that can pay
        if self._drafter is not None and model.curve is not None:
            self._min_probability = model.curve.least_useful_probability(len(text))
        self._root = -1  # the last token, which is not in the cache yet
        self.context: StepContext | None = None  # of the last choice; None: nothing is drafted
        self.proposal = EMPTY
        self._tree = DraftTree.chain((0,))
        self.previous = 0  # nodes of the step before
        self.has_unsaid = False  # tokens that the sampler has picked, and no round has written

    @property
    def backend(self) -> Backend:
        """The cache of this text."""
        return self.model.backend

    def _chosen_drafter(self) -> Drafter | None:
        """What drafts for this text, if anything."""
        model, grammar = self.model, self.run.grammar
        drafter = model.drafter if self.run.speculates else None
        if drafter is None or grammar is None:
            return drafter
        return GrammarDrafter(grammar, drafter, model.known.forced)

    # -- reading ---------------------------------------------------------------------------

    @property
    def num_unread(self) -> int:
        """Tokens of the text that are still to be read."""
        return len(self._text) - max(0, self._end)

    def begin(self) -> None:
        """Keep what the cache has of the text, and nothing else."""
        known = common_prefix_length(self.backend.tokens, self._text[:-1])
        self._end = self._reused = self.backend.truncate(known if self._reuse else 0)
        self.run.num_read = self.run.num_reused = self._end
        if self._reuse and isinstance(self.backend, KeepsStates):
            self._stops = self.backend.stops(self._text, self._end)

    def next_piece(self, most: int) -> list[int]:
        """The next tokens to be read, at most `most`, up to an image or a state that is kept."""
        start, end = self._end, self._end + most
        places = (*self.run.images, *self._stops)
        end = min((place for place in places if start < place < end), default=end)
        return self._text[start:end]

    @property
    def is_at_image(self) -> bool:
        """Whether an image is read next."""
        return self._end in self.run.images

    def is_encoded(self, wait_s: float) -> bool:
        """Whether the image that comes next was encoded, which begins here, beside steps.

        Waits for it, at most `wait_s`.
        """
        if self._encoding is None:
            image, backend = self.run.images[self._end], self.backend
            assert isinstance(backend, SeesImages), "the prompt has images"
            self._image_since, self._encoding = perf_counter(), backend.encode_image(image)
        return bool(wait([self._encoding], wait_s).done)

    def read_image(self) -> None:
        """Read the image that comes next, or a part of it: in no step of others.

        Raises as its encoder.
        """
        image, backend = self.run.images[self._end], self.backend
        assert isinstance(backend, SeesImages), "the prompt has images"
        if self._parts is None:
            if self._encoding is None:
                self._image_since = perf_counter()
            rows = None if self._encoding is None else self._encoding.result()
            self._parts = backend.read_image_parts(image, rows)
        if (row := next(self._parts)) is not None:
            self._encoding = self._parts = None
            self.has_read(image.ids, row, perf_counter() - self._image_since)

    def drop_image(self) -> None:
        """Nobody waits for its images any more: what has not begun never does."""
        if self._encoding is not None:
            self._encoding.cancel()
        if self._parts is not None:
            self._parts.close()

    def has_read(self, piece: Sequence[int], row: Logits, spent_s: float) -> None:
        """The piece is in the cache, with the logits [V] behind it."""
        self._row = row[: self.run.vocab_size]
        self._end += len(piece)
        self.run.num_read = self._end
        self._read_s += spent_s
        if self._drafter is not None:
            text = self._drafted_text()
            part = (self._end - self._reused) / (len(self._text) - self._reused)
            self._drafter.prepare(text, int(part * len(text)))
        if not self.num_unread:
            num_read = len(self._text) - self._reused
            self.run.counters.add_reading(num_read, self._reused, self._read_s)

    def _drafted_text(self) -> list[int]:
        """What the drafter is given of the text, which it is told of beforehand."""
        if self._drafted is None:
            assert self.model.drafter is not None
            self.model.drafter.history = self.run.history
            if self.run.prediction:
                self.model.drafter.recall([(self.run.history, self.run.prediction)])
            has_images = bool(self.run.images)
            self._drafted = [one for one in self._text if one >= 0] if has_images else self._text
        return self._drafted

    def first(self) -> Written | None:
        """The token behind the text, right after its last piece; None where it is handed over."""
        row, self._row = self._row, None
        assert row is not None, "the text was read"
        if self.run.writers.hands_over(row):
            return None
        self._root = token = self.run.sampler.pick(row)
        self.run.counters.add_first()
        return Written([token], (), self.run.logprobs(row[None], (0,), (token,)))

    # -- a round ---------------------------------------------------------------------------

    @property
    def is_cooling_down(self) -> bool:
        """Whether the next round has no drafts, whatever the last one wrote."""
        return self._drafter is None or self._cooldown > 0

    def propose(self, others: int, pending: int, kept: int) -> None:
        """What could be drafted, and what the step that verifies it may cost.

        Args:
            others: texts that share the step.
            pending: tokens that are fed again in it, this text's own included.
            kept: sampled nodes of others, which cannot be left out.
        """
        self.tell()
        self.proposal = EMPTY
        if self._drafter is not None and not self._is_drafted_from:
            self._drafter.begin([*self._drafted_text(), self._root])  # no first token waited for it
            self._is_drafted_from = True
        self.context = context = self._context_of(others, pending, kept)
        if self._drafter is None or context is None or context.max_nodes <= 0:
            return
        proposal = self._drafter.propose(context)
        self.proposal = proposal if context.branches else likeliest_chain(proposal)
        if not len(self.proposal) and not others:
            self._cooldown = self._drafter.cooldown()

    def _context_of(self, others: int, pending: int, kept: int) -> StepContext | None:
        """What the next round may draft and cost; None where nothing is ever drafted."""
        run, backend = self.run, self.backend
        curve = self.model.curve_now(1 + others)
        if self._drafter is None or curve is None:
            return None
        extra = others + pending
        room = min(
            run.limit - run.counters.generated_tokens - 1,
            backend.context_size - backend.length - 1,
            self.model.drafts_beside(1 + others) - kept,
            # drawn nodes cannot be left out later
            len(curve.base) - extra - kept - 2,
        )
        return StepContext(
            max_nodes=max(0, room),
            min_probability=self._min_probability,
            curve=curve,
            depth=backend.length,
            previous=self.previous,
            extra=extra,
            others=others,
            branches=backend.capabilities.tree,
            sampler=run.draft_sampler,
        )

    def plain(self) -> DraftTree:
        """The root alone, in a round that nothing is offered for."""
        self.proposal, self._is_plain = EMPTY, True
        self._tree = tree = DraftTree.chain((self._root,))
        return tree

    def draft(self, size: int) -> DraftTree:
        """The root, and the best nodes of the proposal."""
        self._is_plain = False
        self._tree = build_tree(self._root, self.proposal, size)
        return self._tree

    def settle(
        self, logits: Logits, began_s: float, step_ms: float, node_ms: float | None = None
    ) -> Written | None:
        """Accept, commit and learn, by the rows [n, V] of the tree.

        The step took `step_ms`, of which each draft added `node_ms`; its drafts were begun at
        `began_s` by `perf_counter`. Returns what was written, None where another model writes the
        next token.
        """
        run, tree, backend = self.run, self._tree, self.model.backend
        counters = run.counters
        if logits.shape[1] > run.vocab_size:
            logits = logits[:, : run.vocab_size]
        self.has_unsaid = True
        path, emitted = self._accept(tree, logits)
        logprobs = () if run.num_best is None else run.logprobs(logits, path, emitted)
        backend.commit(path)
        path = path[: len(emitted)]
        if self._drafter is not None and emitted:
            self._teach(logits, path, emitted, step_ms, node_ms)
        spent_s = perf_counter() - began_s
        counters.contended_rounds += backend.contention > 1.0
        sources = counters.add_round(
            tree, path, step_ms / 1e3, self.proposal.draft_ms / 1e3, spent_s
        )
        if not emitted:
            return None
        self._root = emitted[-1]
        self.has_unsaid = False
        return Written(emitted, sources, logprobs)

    def _accept(self, tree: DraftTree, logits: Logits) -> tuple[list[int], list[int]]:
        """Nodes to keep and tokens to emit: each rule where its proposals need it."""
        sampler, writers = self.run.sampler, self.run.writers
        if not tree.distributions or not isinstance(sampler, Sampler):
            hands_over = None if writers is ALONE else writers.hands_over
            pick: Callable[[Logits], int] = sampler.pick
            if isinstance(sampler, Sampler) and sampler.params.accept_typical and len(tree) > 1:
                pick = TypicalPick(tree, sampler)
            path, emitted = accept(tree, logits, pick, hands_over)
            if isinstance(pick, TypicalPick):
                self.run.counters.changed_tokens += pick.num_taken
        else:
            kept = accept_sampled(
                tree,
                tree.distributions,
                lambda node: sampler.unsorted_distribution(logits[node]),
                sampler,
            )
            path, emitted = cut(*kept, logits, writers.hands_over)
        if len(path) > 1:
            return _until_end(path, emitted, self.model.backend.tokenizer.is_end)
        return path, emitted

    def _teach(
        self,
        logits: Logits,
        path: list[int],
        emitted: list[int],
        step_ms: float,
        node_ms: float | None,
    ) -> None:
        """Let the drafter and the counts know what the round brought, or keep it until `tell`."""
        drafter, context = self._drafter, self.context
        assert drafter is not None
        if self._is_plain:
            if not self._plain_tokens:
                self._plain_root = self._root
            self._plain_tokens.append(emitted[0])
            self._plain_ms.append(step_ms)
            self._cooldown -= 1
        elif context is not None:
            drafter.observe(
                VerifyResult(
                    *(self._tree, path, emitted, context),
                    lambda node: top_tokens_of(logits[node]),
                    node_ms=node_ms,
                )
            )
            self.model.history.observe(len(self._tree), len(emitted))
        if self._cooldown > 0 and drafter.has_hit(self._plain_tokens):
            self._cooldown = 0

    def tell(self) -> None:
        """Let the drafter, the curve and the counts know of the cooldown's rounds; it ends."""
        tokens, times, context, self._cooldown = self._plain_tokens, self._plain_ms, self.context, 0
        self._plain_tokens, self._plain_ms = [], []
        count = len(tokens)
        if self._drafter is None or context is None or not count:
            return
        tree = DraftTree.chain((self._plain_root, *tokens[:-1]))
        self._drafter.observe(VerifyResult(tree, range(count), tokens, context, rounds=count))
        for _ in tokens:
            self.model.history.observe(1, 1)
        if context.curve is self.model.curve_now():
            depth = max(0, self.backend.length - count)  # 0: it failed
            for place, step_ms in enumerate(times):
                context.curve.observe(1, depth + place, 1, step_ms)


def _until_end(
    path: list[int], emitted: list[int], is_end: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Drop what came after a token that ends the generation; nothing did after the last node's."""
    for place, token in enumerate(emitted[: len(path) - 1]):
        if is_end(token):
            return path[: place + 1], emitted[: place + 1]
    return path, emitted
