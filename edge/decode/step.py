"""The decode loop: one step of all sequences of a batch, from proposals to what is learned.

    propose -> choose -> verify -> accept -> commit -> learn

The drafts of all sequences are chosen together, by one rule: verified are the nodes with the most
expected tokens per measured millisecond of the whole step. Of a batch that is the geometric mean
over its sequences, so that drafts of one do not slow the others down by more than they speed it up.

Prompts of other requests are prefilled in the same step, in chunks: next to what it computes
anyway, a token more costs a fraction of what a step of its own does. Drafts are chosen as if no
prompt were there, and the time of such a step is not charged to them.

A step works on an engine's `Job`s, what it is asked for, each with a `SequenceState`, how far it is
in a sequence of the cache. It knows no inference library (the backend does), no probabilities (the
drafter does), and no other model that writes for the same request (`Routing` does). `reference.py`
is its short form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter

from edgespec.backends.base import (
    Backend,
    DraftTree,
    Embeddings,
    Grammar,
    HoldsSequences,
    ImageRun,
    KeepsLogits,
    KeepsStates,
    Logits,
    SeesImages,
)
from edgespec.decode.generation import (
    ALONE,
    Chunk,
    Progress,
    StepOutput,
    chunk_of,
)
from edgespec.decode.options import GenerationOptions
from edgespec.decode.verification import TypicalPick, accept_sampled, cut
from edgespec.drafting.combined import BelievedTimes, GrammarDrafter, RoundHistory
from edgespec.drafting.model import top_tokens_of
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    Drafter,
    StepContext,
    VerifyResult,
    batch_context,
    build_tree,
    chosen_sizes,
    likeliest_chain,
)
from edgespec.memory.store.cells import Piece
from edgespec.memory.times import CostCurve
from edgespec.prefix import common_prefix_length
from edgespec.sampling.chain import TokenLogprob, logprob_of
from edgespec.sampling.sampling import ConstrainedSampler, LimitedThought, Sampler

# What a step brought a sequence: None where another model writes on, or why it failed.
Outcome = StepOutput | Exception | None
PromptChunk = tuple["SequenceState", Sequence[int]]  # of a prompt, to be prefilled
Parts = list[tuple[int, int]]  # of a text, in order: the number of a part, and its cells


def make_step(
    sequences: Sequence[SequenceState],
    chunks_beside: Callable[[int], Sequence[PromptChunk]] | None = None,
) -> list[Outcome]:
    """One step of some sequences of one cache, with chunks of others' prompts in it.

    `chunks_beside` gives these, told how many tokens the step has without them.
    A sequence that fails does not keep the others from going on. Raises what the backend raises.
    """
    began_s = perf_counter()
    if chunks_beside is None and len(sequences) == 1 and sequences[0].is_cooling_down:
        # Nothing is drafted, so that there is nothing to choose.
        [one] = sequences
        logits = one.backend.verify(one.plain_tree())
        one.previous, one.contention = 1, one.backend.contention
        return [one.process_output(logits, began_s, (perf_counter() - began_s) * 1e3)]
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
        most = batch[0].drafts_beside(len(batch))
        context = batch_context(contexts, len(batch), replayed, most)
        sizes = chosen_sizes(proposals, context, draft_ms)
    trees = [one.draft_tree(size) for one, size in zip(batch, sizes, strict=True)]
    # Verify all trees, and prefill chunks of prompts.
    num_nodes = sum(len(tree.tokens) for tree in trees) + replayed
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
        believed_ms = batch[0].target.times.believed_ms(step_ms, context.ms[1 + num_drafted])
        node_ms = (believed_ms - context.ms[1]) / num_drafted
    contention = batch[0].backend.contention if batch else 1.0
    for one, logits in zip(batch, rows, strict=False):
        one.previous, one.contention = num_fed, contention
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


def accept(
    tree: DraftTree,
    logits: Logits,
    pick: Callable[[Logits], int],
    switches_model: Callable[[Logits], bool] | None = None,
) -> tuple[list[int], list[int]]:
    """Walk the tree from the root while its children carry what `pick` picks: sample-and-match.

    Every token is picked from the target's own logits by its own sampler, so for deterministic
    proposals the output has exactly the target's distribution (SpecInfer, arXiv 2305.09781, section
    4.3); where the sampler draws one random number a token, the same tokens as plain decoding's.

    Args:
        tree: the verified tree.
        logits: one row per node, [n, V].
        pick: chooses the next token from a row, [V]; called once per emitted token, in order.
        switches_model: told each row before its token is picked; true ends the round there. None
            where one model writes alone.

    Returns:
        The nodes to commit (root first) and the tokens emitted. Both have the same length: the
        last token is a correction or a bonus and becomes the next root. Where the round was handed
        over the last node has no token.
    """
    node, last, path, emitted = 0, len(tree.tokens) - 1, [], []
    while node >= 0:
        path.append(node)
        row = logits[node]
        if switches_model is not None and switches_model(row):
            break
        token = pick(row)
        emitted.append(token)
        node = tree.child(node, token) if node < last else -1
    return path, emitted


class Target:
    """A model that writes, and what all its answers share: an engine, which says what they are."""

    backend: Backend
    sequences: Sequence[Backend]  # of its cache
    max_nodes: int  # of a step, roots included
    curve: CostCurve | None  # measured step times; None where nothing is ever drafted
    curves: dict[tuple[float, int], CostCurve]  # others: fewer threads, sequences in a step
    drafter: Drafter | None
    more_drafters: Sequence[Drafter]  # those of the cache's other sequences
    times: BelievedTimes
    forced: Calibration  # tokens that grammars force
    history: RoundHistory

    def drafter_of(self, number: int) -> Drafter | None:
        """What drafts for a sequence; the first one's drafter gone, so are the others."""
        if number == 0 or self.drafter is None:
            return self.drafter
        return self.more_drafters[number - 1] if number <= len(self.more_drafters) else None

    # Which model writes. Another one may write on in a subclass.

    def begin(self, job: Job) -> None:
        """Give a job that has a slot its first state; none where it was cancelled meanwhile."""
        assert job.slot is not None
        job.start(self, job.slot.number, job.reuse)

    def go_on(self, job: Job) -> None:
        """Another model writes next: give the job its state."""

    def survives(self, job: Job, problem: Exception) -> bool:
        """Whether another model goes on where one has failed."""
        return False

    def end(self, job: Job) -> None:
        """No model writes any more; may be said twice."""


class Slot:
    """A sequence of the cache."""

    def __init__(self, number: int, backend: Backend) -> None:
        self.number, self.backend = number, backend
        self.promised = 0  # cells; 0: nobody has it
        self.most = 0  # cells that its text may come to need
        self.last_used = 0  # the larger the later
        self.prompt = 0  # tokens of the last text that began here
        self.salt = ""  # of the text in its cells: no other salt's texts match it
        # Parts that began in other slots, and the one that begins here.
        self.shared: Parts = []
        self.own = 0

    @property
    def is_free(self) -> bool:
        return self.promised == 0

    @property
    def goes_back(self) -> bool:
        """Whether it may hold a part of what another sequence has."""
        return self.backend.capabilities.truncate or isinstance(self.backend, KeepsStates)

    def common(self, text: Sequence[int], salt: str) -> int:
        """How many tokens of a text with this salt it has."""
        return common_prefix_length(self.backend.tokens, text) if self.salt == salt else 0

    def reach(self, text: Sequence[int], salt: str, *, shared: bool = False) -> int:
        """How many of these it can go back to, or share with another sequence."""
        length = self.common(text, salt)
        if isinstance(self.backend, KeepsStates):
            return self.backend.reach(length, shared=shared)
        return length

    def parts(self, size: int) -> Parts:
        """The parts of its first `size` cells."""
        found = []
        for number, length in [*self.shared, (self.own, size)]:
            if size > 0:
                found.append((number, min(length, size)))
                size -= length
        return found

    def held(self) -> Parts:
        """The parts that it has, or may come to have."""
        return self.parts(self.promised or len(self.backend.tokens))


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Progress):
    """One generation: what is asked for, how far it is, and what its reader has not read yet."""

    target: Target  # that was asked
    asked: GenerationOptions
    sampler: Sampler | ConstrainedSampler | LimitedThought
    draft_sampler: Sampler | None  # draws drafts, independently of the sampler
    is_end: Callable[[int], bool]
    limit: int  # tokens that may be generated: what the context has room for, too
    vocab_size: int  # of a row: what comes behind pads a vocabulary
    salt: str = ""  # of its cells: those of other salts are not reused
    scales: tuple[float, ...] = ()  # of the model's adapters: a step has the same for all
    prediction: tuple[int, ...] = ()  # the end of the prompt, and what probably follows
    grammar: Grammar | None = None
    reuse: bool = False  # what the cache already holds of the prompt
    stored: Piece | None = None  # which has more of the prompt than the cache had
    images: Mapping[int, ImageRun] = field(default_factory=dict)  # by where they begin
    # How far it is.
    slot: Slot | None = None  # the sequence of the cache that it has
    state: SequenceState | None = None  # of the model that writes in it
    asked_s: float = field(default_factory=lambda: perf_counter())  # when it was called
    began_s: float = 0.0  # by the clock of the scheduler
    first_s: float = 0.0
    tokens: list[int] = field(default_factory=list)  # that models have written
    chunks: SimpleQueue[Chunk | None] = field(default_factory=SimpleQueue)  # then None
    problem: Exception | None = None

    def start(self, target: Target, number: int, reuse: bool) -> None:
        """Let a model go on, in a sequence of its cache, with all that there is."""
        self.state = SequenceState(target, number, self, reuse)
        self.state.begin()

    @property
    def sequence(self) -> SequenceState:
        """The state of the model that writes."""
        assert self.state is not None, "it has begun"
        return self.state

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is not in the cache yet."""
        return self.state is not None and self.state.num_pending > 0

    @property
    def is_cancelled(self) -> bool:
        """Whether it shall stop: it was closed, or its user's event is set."""
        cancel = self.asked.cancel
        return self.was_closed or (cancel is not None and cancel.is_set())

    @property
    def is_over(self) -> bool:
        """Whether the last token was the last one."""
        return self.finish_reason != "cancelled"

    def logprobs(
        self, rows: Logits, path: Sequence[int], emitted: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of emitted tokens, by the rows [n, V] of their nodes, if asked for."""
        if (count := self.asked.logprobs) is None:
            return ()
        pairs = zip(path, emitted, strict=False)
        return tuple(logprob_of(rows[node], token, count) for node, token in pairs)

    def add(self, written: StepOutput, now_s: float) -> None:
        """Take what a step wrote; its text is made here, where the vocabulary is there."""
        counters = self.counters
        if counters.rounds == 0:
            self.first_s, counters.prompt_s = now_s, now_s - self.began_s
            counters.time_to_first_token_s = perf_counter() - self.asked_s
        counters.decode_s = now_s - self.first_s
        pieces: list[str] = []
        for token in written.tokens:
            pieces.append(self.text.push(token))
            if self.text.stopped:
                break
        self.tokens += written.tokens
        self.chunks.put(chunk_of(written, pieces, self.routing.writer))
        self.num_chunks += 1
        if self.text.stopped or self.is_end(written.tokens[-1]):
            self.finish_reason = "stop"
        elif counters.generated_tokens >= self.limit:
            is_asked = counters.generated_tokens >= self.asked.max_tokens
            self.finish_reason = "length" if is_asked else "context_full"

    def finish(self, problem: Exception | None = None) -> None:
        """Tell the reader that no more comes."""
        self.problem, self.has_ended = problem, True
        self.chunks.put(None)


class SequenceState:
    """A model's work on one job: what it has prefilled, drafted and written in a sequence.

    The prompt is prefilled in chunks (`next_chunk`, `has_prefilled`, `first`). Then each step has
    stages, which `make_step` runs for a whole batch: `propose`, `draft_tree`, `process_output`.
    Where no drafter can be asked for some steps a cooldown begins: plain steps, of which the
    drafter learns behind them (`flush`). After a step of the model what Python uses is no longer in
    the processor's caches: updating the drafter with one step takes 0.1 ms there, which is 3% of a
    step of 3 ms, and of many together as long.

    Args:
        target: the model that writes.
        number: of the sequence in its cache.
        job: what is asked for; its prompt and all that was written for it are prefilled.
        reuse: whether what the cache holds of them is kept.
    """

    def __init__(self, target: Target, number: int, job: Job, reuse: bool) -> None:
        self.target, self.number, self.job = target, number, job
        self.backend = target.sequences[number]
        self._tokens = [*job.prompt, *job.tokens]  # to be prefilled
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
        self._drafter = target.drafter_of(number) if job.asked.speculate else None
        if self._drafter is not None and job.grammar is not None:
            self._drafter = GrammarDrafter(job.grammar, self._drafter, target.forced)
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
        self.contention = self.backend.contention  # in that step
        self.has_unwritten = False  # tokens that the sampler has picked, and no step has written

    def curve_now(self, batch_size: int) -> CostCurve | None:
        """Times of steps over so many sequences, with as many threads as the last one had."""
        curve, known, contention = self.target.curve, self.target.curves, self.contention
        key = contention, batch_size
        if key == (1.0, 1) or curve is None:
            return curve
        if key not in known:
            curve = curve if contention == 1.0 else curve.contended(contention)
            known[key] = curve if batch_size == 1 else curve.together(batch_size)
        return known[key]

    def drafts_beside(self, roots: int) -> int:
        """Most drafts of a step over so many sequences: branches share one longest draft's room."""
        target = self.target
        most = max(0, target.backend.max_nodes - len(target.sequences))
        return min(target.max_nodes - roots, most)

    # -- prefill ---------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be prefilled."""
        return len(self._tokens) - max(0, self._end)

    def begin(self) -> None:
        """Keep what the cache has of the tokens, and nothing else.

        Where that is all of them, with the logits behind the last one, nothing is to be prefilled.
        """
        backend, tokens = self.backend, self._tokens
        known = common_prefix_length(backend.tokens, tokens) if self._reuse else 0
        is_all = known == len(tokens) == backend.length and self.job.routing is ALONE
        if is_all and isinstance(backend, KeepsLogits):
            self._row = backend.last_logits()
        if self._row is None:  # the last token's are wanted
            known = backend.truncate(min(known, len(tokens) - 1))
        self._end = self._reused = self.job.num_read = self.job.num_reused = known
        if self._reuse and isinstance(backend, KeepsStates):
            self._stops = backend.stops(tokens, known)
        if self._row is not None:
            self._row = self._row[: self.job.vocab_size]
            self._has_all()

    def next_chunk(self, most: int) -> list[int]:
        """The next tokens to prefill, at most `most`, up to an image or a state that is kept."""
        start, end = self._end, self._end + most
        places = (*self.job.images, *self._stops)
        end = min((place for place in places if start < place < end), default=end)
        return self._tokens[start:end]

    @property
    def is_at_image(self) -> bool:
        """Whether an image is read next."""
        return self._end in self.job.images

    def is_encoded(self, wait_s: float) -> bool:
        """Whether the image that comes next was encoded, which begins here, beside steps.

        Waits for it, at most `wait_s`.
        """
        if self._encoding is None:
            image, backend = self.job.images[self._end], self.backend
            assert isinstance(backend, SeesImages), "the prompt has images"
            self._image_since, self._encoding = perf_counter(), backend.encode_image(image)
        return bool(wait([self._encoding], wait_s).done)

    def read_image(self) -> None:
        """Read the image that comes next, or a part of it: in no step of others.

        Raises as its encoder.
        """
        image, backend = self.job.images[self._end], self.backend
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
        self._row = row[: self.job.vocab_size]
        self._end += len(chunk)
        self.job.num_read = self._end
        self._prefill_s += spent_s
        if not self.num_pending:
            self._has_all()
        ahead = self.job.asked.ahead
        if self._drafter is not None and (self.num_pending or ahead):
            tokens = self._shown_tokens()  # the last of them behind the first token
            part = (self._end - self._reused) / (len(self._tokens) - self._reused)
            self._drafter.prepare(tokens, int(part * len(tokens)), ahead=ahead)

    def _has_all(self) -> None:
        """Count the prefill, which is over: all tokens are in the cache."""
        counters = self.job.counters
        if counters.generated_tokens == 0:  # it was the prompt
            counters.reused_tokens = self._reused
        else:  # what another model wrote
            counters.caught_up_tokens += len(self._tokens) - self._reused
            counters.catch_up_s += self._prefill_s

    def _shown_tokens(self) -> list[int]:
        """The tokens without images, as the drafter gets them; it learns of them here."""
        if self._shown is None:
            drafter = self.target.drafter_of(self.number)  # a grammar's own keeps no texts
            assert drafter is not None
            drafter.history = history = self.job.asked.history
            if self.job.prediction and not self.job.asked.ahead:
                drafter.recall([(history, self.job.prediction)])
            has_images = bool(self.job.images)
            self._shown = [one for one in self._tokens if one >= 0] if has_images else self._tokens
        return self._shown

    def first(self) -> StepOutput | None:
        """The token behind the prompt, after its last chunk; None where another model writes it."""
        row, self._row = self._row, None
        assert row is not None, "the prompt was prefilled"
        self.contention = self.backend.contention
        if self.job.routing.switches_model(row):
            return None
        self._root = token = self.job.sampler.pick(row)
        # Behind a prompt this is no round; behind a hand-over, what was caught up with is one.
        counters = self.job.counters
        counters.rounds += counters.generated_tokens > 0
        counters.generated_tokens += 1
        return StepOutput([token], (), self.job.logprobs(row[None], (0,), (token,)))

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
        if not self.proposal.tokens and not others:
            self._cooldown = self._drafter.cooldown()

    def _context_of(self, others: int, replayed: int, kept: int) -> StepContext | None:
        """What the next step may draft and cost; None where nothing is ever drafted."""
        job, backend = self.job, self.backend
        curve = self.curve_now(1 + others)
        if self._drafter is None or curve is None:
            return None
        extra, length = others + replayed, backend.length
        remaining = job.limit - job.counters.generated_tokens
        room = min(
            remaining - 1,
            backend.context_size - length - 1,
            self.drafts_beside(1 + others) - kept,
            # sampled nodes cannot be left out later
            len(curve.base) - extra - kept - 2,
        )
        return StepContext(
            max_nodes=max(0, room),
            min_probability=self._min_probability,
            curve=curve,
            depth=length,
            previous=self.previous,
            extra=extra,
            others=others,
            remaining=remaining,
            branches=backend.capabilities.tree,
            sampler=job.draft_sampler,
        )

    def plain_tree(self) -> DraftTree:
        """The root alone, in a step that nothing is drafted for."""
        self.proposal, self._is_plain = EMPTY, True
        self._tree = tree = DraftTree.chain((self._root,))
        return tree

    def draft_tree(self, size: int) -> DraftTree:
        """The root, and the best nodes of the proposal."""
        self._is_plain = False
        root = self._root
        self._tree = build_tree(root, self.proposal, size) if size else DraftTree.chain((root,))
        return self._tree

    def process_output(
        self, logits: Logits, began_s: float, step_ms: float, node_ms: float | None = None
    ) -> StepOutput | None:
        """Accept, commit and learn, by the rows [n, V] of the tree.

        The step took `step_ms`, of which each draft added `node_ms`; its drafts were begun at
        `began_s` by `perf_counter`. Returns what was written, None where another model writes the
        next token.
        """
        job, tree, backend = self.job, self._tree, self.backend
        counters = job.counters
        if logits.shape[1] > job.vocab_size:
            logits = logits[:, : job.vocab_size]
        self.has_unwritten = True
        path, emitted = self._accept(tree, logits)
        logprobs = () if job.asked.logprobs is None else job.logprobs(logits, path, emitted)
        backend.commit(path)
        path = path[: len(emitted)]
        if self._drafter is not None and emitted:
            self._update_drafter(logits, path, emitted, step_ms, node_ms)
        spent_s = perf_counter() - began_s
        counters.contended_rounds += self.contention > 1.0
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
        sampler, routing = self.job.sampler, self.job.routing
        if len(tree.tokens) == 1 and routing is ALONE:
            return [0], [sampler.pick(logits[0])]
        if not tree.distributions or not isinstance(sampler, Sampler):
            switches_model = None if routing is ALONE else routing.switches_model
            pick: Callable[[Logits], int] = sampler.pick
            if isinstance(sampler, Sampler) and sampler.params.accept_typical and len(tree) > 1:
                pick = TypicalPick(tree, sampler)
            path, emitted = accept(tree, logits, pick, switches_model)
            if isinstance(pick, TypicalPick):
                self.job.counters.changed_tokens += pick.num_taken
        else:
            kept = accept_sampled(
                tree,
                tree.distributions,
                lambda node: sampler.unsorted_distribution(logits[node]),
                sampler,
            )
            path, emitted = cut(*kept, logits, routing.switches_model)
        # Drop what came after a token that ends the text; nothing did after the last node's.
        for place, token in enumerate(emitted[: len(path) - 1]):
            if self.backend.tokenizer.is_end(token):
                return path[: place + 1], emitted[: place + 1]
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
            self.target.history.observe(len(self._tree.tokens), len(emitted))
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
