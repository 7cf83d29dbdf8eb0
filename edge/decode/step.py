"""The decode loop: one step of all sequences of a batch, from proposals to what is learned.

    propose -> choose -> verify -> accept -> commit -> learn

The drafts of all sequences are chosen together, by one rule: verified are the nodes with the most
expected tokens per measured millisecond of the whole step. Of a batch that is the geometric mean
over its sequences, so that drafts of one do not slow the others down by more than they speed it up.

Prompts of other requests are prefilled in the same step, in chunks: next to what it computes
anyway, a token more costs a fraction of what a step of its own does. Drafts are chosen as if no
prompt were there, and the time of such a step is not charged to them.

The loop knows no inference library (the backend does), no probabilities (the drafter does), and no
other model that writes for the same request (`Writers` does). `reference.py` is its short form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
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
    sequences_of,
)
from edgespec.backends.tree import DraftTree
from edgespec.decode.generation import Request, StepOutput
from edgespec.decode.stats import ALONE
from edgespec.decode.verification import TypicalPick, accept, accept_sampled, cut
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


class Target:
    """A model that writes, and what all its answers share: cache, drafters, step times, statistics.

    Args:
        backend: the model, and its cache with all sequences.
        curve: measured step times; None where nothing is ever drafted.
        drafter: where drafts come from; None disables speculation.
        more_drafters: those of the cache's other sequences; without, these are never drafted for.
        max_nodes: largest step, roots included; None leaves it to the backend.
        history: counts how many tokens steps of each size emitted, for later plans.
        snapshots_cost: how many times as long plain steps take because the backend keeps snapshots.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        curve: CostCurve | None = None,
        drafter: Drafter | None = None,
        more_drafters: Sequence[Drafter] = (),
        max_nodes: int | None = None,
        history: RoundHistory | None = None,
        snapshots_cost: float = 1.0,
    ) -> None:
        self.backend = backend
        self.curve = curve
        self.drafter = drafter if backend.capabilities.rollback and curve is not None else None
        self._more_drafters = more_drafters
        self.history = history if history is not None else RoundHistory()
        self.sequences = sequences_of(backend)
        self.max_nodes = min(backend.max_nodes, max_nodes or backend.max_nodes)
        self.times = BelievedTimes()
        self.forced = new_counts()  # tokens that grammars force
        self.snapshots_cost = snapshots_cost
        # Other curves, by how many times fewer threads, and how many sequences in a step.
        self._curves: dict[tuple[float, int], CostCurve] = {}

    def drafter_of(self, number: int) -> Drafter | None:
        """What drafts for a sequence; the first one's drafter gone, so are the others."""
        if number == 0 or self.drafter is None:
            return self.drafter
        return self._more_drafters[number - 1] if number <= len(self._more_drafters) else None

    def drafts_beside(self, roots: int) -> int:
        """Drafts that a step over so many sequences has room for; branches of more have none."""
        return min(self.max_nodes - roots, max(0, self.backend.max_nodes - len(self.sequences)))

    def curve_now(self, contention: float, batch_size: int = 1) -> CostCurve | None:
        """Times of steps over so many sequences, with so many times fewer threads than planned."""
        key = contention, batch_size
        if key == (1.0, 1) or self.curve is None:
            return self.curve
        if key not in self._curves:
            curve = self.curve if contention == 1.0 else self.curve.contended(contention)
            self._curves[key] = curve if batch_size == 1 else curve.together(batch_size)
        return self._curves[key]

    @property
    def are_snapshots_worth_it(self) -> bool:
        """Whether drafts save what their snapshots cost; True while too little is known."""
        saved = self.drafter.saved_part if self.drafter is not None else None
        if saved is None or self.snapshots_cost < NO_DIFFERENCE:
            return True
        return (1.0 - saved) * self.snapshots_cost < NO_DIFFERENCE


class SequenceState:
    """A model's work on one request: what it has prefilled, drafted and written in a sequence.

    The prompt is prefilled in chunks (`next_chunk`, `has_prefilled`, `first`). Then each step has
    stages, which `make_step` runs for a whole batch: `propose`, `draft_tree`, `process_output`.
    Where no drafter can be asked for some steps a cooldown begins: plain steps, of which the
    drafter learns behind them (`flush`). After a step of the model what Python uses is no longer in
    the processor's caches: telling the drafter of one step takes 0.1 ms there, which is 3% of a
    step of 3 ms, and of many together as long.

    Args:
        target: the model that writes.
        number: of the sequence in its cache.
        request: what is asked for; its prompt and all that was written for it are prefilled.
        reuse: whether what the cache holds of them is kept.
    """

    def __init__(self, target: Target, number: int, request: Request, reuse: bool) -> None:
        self.target, self.number, self.request = target, number, request
        self.backend = target.sequences[number]
        self._tokens = [*request.prompt, *request.tokens]  # to be prefilled
        self._reuse = reuse
        self._end = -1  # tokens that are in the cache; -1 before `begin`
        self._reused = 0  # of these, the ones that were there before
        self._prefill_s = 0.0
        # Of the image that comes next: its embeddings, its parts, and since when it is worked on.
        self._encoding: Future[Embeddings] | None = None
        self._parts: Generator[Logits | None, None, None] | None = None
        self._image_since = 0.0
        self._row: Logits | None = None  # [V], behind the last chunk
        self._stops: Sequence[int] = ()  # where the backend keeps a state
        self._shown: list[int] | None = None  # the tokens as the drafter knows them, once it does
        self._has_begun_drafts = False  # whether the drafter has all of them
        self._drafter = self._chosen_drafter()
        self._cooldown = 0  # plain steps to come
        # Of the cooldown so far: its first root, the tokens written, and milliseconds of the steps.
        self._plain_root = -1
        self._plain_tokens: list[int] = []
        self._plain_ms: list[float] = []
        self._is_plain = False  # whether this step is one of them
        self._min_probability = 0.0  # of a draft node that can pay
        if self._drafter is not None and target.curve is not None:
            self._min_probability = target.curve.least_useful_probability(len(self._tokens))
        self._root = -1  # the last token, which is not in the cache yet
        self.context: StepContext | None = None  # of the last choice; None: nothing is drafted
        self.proposal = EMPTY
        self._tree = DraftTree.chain((0,))
        self.previous = 0  # tokens fed in the step before
        self.has_unwritten = False  # tokens that the sampler has picked, and no step has written

    def _chosen_drafter(self) -> Drafter | None:
        """What drafts for this request, if anything."""
        request, target = self.request, self.target
        drafter = target.drafter_of(self.number) if request.speculates else None
        if drafter is None or request.grammar is None:
            return drafter
        return GrammarDrafter(request.grammar, drafter, target.forced)

    def curve_now(self, batch_size: int) -> CostCurve | None:
        """Times of steps of a batch, with as many threads as the last one had."""
        return self.target.curve_now(self.backend.contention, batch_size)

    # -- prefill ---------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be prefilled."""
        return len(self._tokens) - max(0, self._end)

    def begin(self) -> None:
        """Keep what the cache has of the tokens, and nothing else."""
        known = common_prefix_length(self.backend.tokens, self._tokens[:-1])
        self._end = self._reused = self.backend.truncate(known if self._reuse else 0)
        self.request.num_read = self.request.num_reused = self._end
        if self._reuse and isinstance(self.backend, KeepsStates):
            self._stops = self.backend.stops(self._tokens, self._end)

    def next_chunk(self, most: int) -> list[int]:
        """The next tokens to prefill, at most `most`, up to an image or a state that is kept."""
        start, end = self._end, self._end + most
        places = (*self.request.images, *self._stops)
        end = min((place for place in places if start < place < end), default=end)
        return self._tokens[start:end]

    @property
    def is_at_image(self) -> bool:
        """Whether an image is read next."""
        return self._end in self.request.images

    def is_encoded(self, wait_s: float) -> bool:
        """Whether the image that comes next was encoded, which begins here, beside steps.

        Waits for it, at most `wait_s`.
        """
        if self._encoding is None:
            image, backend = self.request.images[self._end], self.backend
            assert isinstance(backend, SeesImages), "the prompt has images"
            self._image_since, self._encoding = perf_counter(), backend.encode_image(image)
        return bool(wait([self._encoding], wait_s).done)

    def read_image(self) -> None:
        """Read the image that comes next, or a part of it: in no step of others.

        Raises as its encoder.
        """
        image, backend = self.request.images[self._end], self.backend
        assert isinstance(backend, SeesImages), "the prompt has images"
        if self._parts is None:
            if self._encoding is None:
                self._image_since = perf_counter()
            rows = None if self._encoding is None else self._encoding.result()
            self._parts = backend.read_image_parts(image, rows)
        if (row := next(self._parts)) is not None:
            self._encoding = self._parts = None
            self.has_prefilled(image.ids, row, perf_counter() - self._image_since)

    def drop_image(self) -> None:
        """Nobody waits for its images any more: what has not begun never does."""
        if self._encoding is not None:
            self._encoding.cancel()
        if self._parts is not None:
            self._parts.close()

    def has_prefilled(self, chunk: Sequence[int], row: Logits, spent_s: float) -> None:
        """A chunk is in the cache, with the logits [V] behind it."""
        self._row = row[: self.request.vocab_size]
        self._end += len(chunk)
        self.request.num_read = self._end
        self._prefill_s += spent_s
        if self._drafter is not None:
            tokens = self._shown_tokens()
            part = (self._end - self._reused) / (len(self._tokens) - self._reused)
            self._drafter.prepare(tokens, int(part * len(tokens)))
        if not self.num_pending:
            num_read = len(self._tokens) - self._reused
            self.request.counters.add_reading(num_read, self._reused, self._prefill_s)

    def _shown_tokens(self) -> list[int]:
        """The tokens without images, as the drafter gets them; it learns of them here."""
        if self._shown is None:
            drafter = self.target.drafter_of(self.number)  # a grammar's own keeps no texts
            assert drafter is not None
            drafter.history = self.request.history
            if self.request.prediction:
                drafter.recall([(self.request.history, self.request.prediction)])
            has_images = bool(self.request.images)
            self._shown = [one for one in self._tokens if one >= 0] if has_images else self._tokens
        return self._shown

    def first(self) -> StepOutput | None:
        """The token behind the prompt, after its last chunk; None where another model writes it."""
        row, self._row = self._row, None
        assert row is not None, "the prompt was prefilled"
        if self.request.writers.hands_over(row):
            return None
        self._root = token = self.request.sampler.pick(row)
        self.request.counters.add_first()
        return StepOutput([token], (), self.request.logprobs(row[None], (0,), (token,)))

    # -- a step ----------------------------------------------------------------------------

    @property
    def is_cooling_down(self) -> bool:
        """Whether the next step has no drafts, whatever the last one wrote."""
        return self._drafter is None or self._cooldown > 0

    def propose(self, others: int, replayed: int, kept: int) -> None:
        """What could be drafted, and what the step that verifies it may cost.

        Args:
            others: sequences that share the step.
            replayed: tokens that are fed again in it, this sequence's own included.
            kept: sampled nodes of others, which cannot be left out.
        """
        self.flush()
        self.proposal = EMPTY
        if self._drafter is not None and not self._has_begun_drafts:
            self._drafter.begin([*self._shown_tokens(), self._root])  # no first token waited for it
            self._has_begun_drafts = True
        self.context = context = self._context_of(others, replayed, kept)
        if self._drafter is None or context is None or context.max_nodes <= 0:
            return
        proposal = self._drafter.propose(context)
        self.proposal = proposal if context.branches else likeliest_chain(proposal)
        if not len(self.proposal) and not others:
            self._cooldown = self._drafter.cooldown()

    def _context_of(self, others: int, replayed: int, kept: int) -> StepContext | None:
        """What the next step may draft and cost; None where nothing is ever drafted."""
        request, backend = self.request, self.backend
        curve = self.curve_now(1 + others)
        if self._drafter is None or curve is None:
            return None
        extra = others + replayed
        room = min(
            request.limit - request.counters.generated_tokens - 1,
            backend.context_size - backend.length - 1,
            self.target.drafts_beside(1 + others) - kept,
            # sampled nodes cannot be left out later
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
            sampler=request.draft_sampler,
        )

    def plain_tree(self) -> DraftTree:
        """The root alone, in a step that nothing is drafted for."""
        self.proposal, self._is_plain = EMPTY, True
        self._tree = tree = DraftTree.chain((self._root,))
        return tree

    def draft_tree(self, size: int) -> DraftTree:
        """The root, and the best nodes of the proposal."""
        self._is_plain = False
        self._tree = build_tree(self._root, self.proposal, size)
        return self._tree

    def process_output(
        self, logits: Logits, began_s: float, step_ms: float, node_ms: float | None = None
    ) -> StepOutput | None:
        """Accept, commit and learn, by the rows [n, V] of the tree.

        The step took `step_ms`, of which each draft added `node_ms`; its drafts were begun at
        `began_s` by `perf_counter`. Returns what was written, None where another model writes the
        next token.
        """
        request, tree, backend = self.request, self._tree, self.backend
        counters = request.counters
        if logits.shape[1] > request.vocab_size:
            logits = logits[:, : request.vocab_size]
        self.has_unwritten = True
        path, emitted = self._accept(tree, logits)
        logprobs = () if request.num_best is None else request.logprobs(logits, path, emitted)
        backend.commit(path)
        path = path[: len(emitted)]
        if self._drafter is not None and emitted:
            self._update_drafter(logits, path, emitted, step_ms, node_ms)
        spent_s = perf_counter() - began_s
        counters.contended_rounds += backend.contention > 1.0
        sources = counters.add_round(
            tree, path, step_ms / 1e3, self.proposal.draft_ms / 1e3, spent_s
        )
        if not emitted:
            return None
        self._root = emitted[-1]
        self.has_unwritten = False
        return StepOutput(emitted, sources, logprobs)

    def _accept(self, tree: DraftTree, logits: Logits) -> tuple[list[int], list[int]]:
        """Nodes to keep and tokens to emit: each rule where its proposals need it."""
        sampler, writers = self.request.sampler, self.request.writers
        if not tree.distributions or not isinstance(sampler, Sampler):
            hands_over = None if writers is ALONE else writers.hands_over
            pick: Callable[[Logits], int] = sampler.pick
            if isinstance(sampler, Sampler) and sampler.params.accept_typical and len(tree) > 1:
                pick = TypicalPick(tree, sampler)
            path, emitted = accept(tree, logits, pick, hands_over)
            if isinstance(pick, TypicalPick):
                self.request.counters.changed_tokens += pick.num_taken
        else:
            kept = accept_sampled(
                tree,
                tree.distributions,
                lambda node: sampler.unsorted_distribution(logits[node]),
                sampler,
            )
            path, emitted = cut(*kept, logits, writers.hands_over)
        if len(path) > 1:
            return _until_end(path, emitted, self.backend.tokenizer.is_end)
        return path, emitted

    def _update_drafter(
        self,
        logits: Logits,
        path: list[int],
        emitted: list[int],
        step_ms: float,
        node_ms: float | None,
    ) -> None:
        """Let the drafter and the counts know what the step brought, or keep it until `flush`."""
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
            self.target.history.observe(len(self._tree), len(emitted))
        if self._cooldown > 0 and drafter.has_hit(self._plain_tokens):
            self._cooldown = 0

    def flush(self) -> None:
        """End a cooldown: the drafter, the curve and the counts learn of its steps."""
        tokens, times, context, self._cooldown = self._plain_tokens, self._plain_ms, self.context, 0
        self._plain_tokens, self._plain_ms = [], []
        count = len(tokens)
        if self._drafter is None or context is None or not count:
            return
        tree = DraftTree.chain((self._plain_root, *tokens[:-1]))
        self._drafter.observe(VerifyResult(tree, range(count), tokens, context, rounds=count))
        for _ in tokens:
            self.target.history.observe(1, 1)
        if context.curve is self.curve_now(1):
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
