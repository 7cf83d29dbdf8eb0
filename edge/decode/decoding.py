"""A text that a model writes: what is read, drafted, accepted and learned, stage by stage.

It knows no inference library (the backend does), no probabilities (the drafter does), no other
model (`Writers` does), and no other text (`step` does).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.backends.base import Backend, Embeddings, KeepsStates, Logits, SeesImages
from edgespec.backends.tree import DraftTree
from edgespec.decode.generation import Run, Written
from edgespec.decode.verification import TypicalPick, accept, accept_sampled, cut
from edgespec.decode.writers import ALONE
from edgespec.drafting import constants
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.controller import build_tree, likeliest_chain
from edgespec.drafting.drafters.base import Drafter, TopTokens, VerifyResult
from edgespec.drafting.drafters.grammar import GrammarDrafter, new_counts
from edgespec.drafting.ledger import StepTimes
from edgespec.drafting.proposal import EMPTY, StepContext
from edgespec.drafting.top_tokens import top_tokens_of
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import RoundHistory
from edgespec.prefix import common_prefix_length
from edgespec.sampling.sampling import Sampler


@dataclass(slots=True)
class Known:
    """What the generations of one engine find out for the next ones, besides its drafter."""

    steps: StepTimes = field(default_factory=StepTimes)
    forced: Calibration = field(default_factory=new_counts)  # text that a grammar forces
    snapshots_cost: float = 1.0  # times as long that plain steps take for keeping snapshots
    # Other curves, by how many times fewer threads, and how many texts in a step.
    curves: dict[tuple[float, int], CostCurve] = field(default_factory=dict)

    def are_snapshots_worth_it(self, drafter: Drafter) -> bool:
        """Whether drafts save what their snapshots cost; True while too little is known."""
        saved, cost = drafter.saved_part, self.snapshots_cost
        if saved is None or cost < constants.NO_DIFFERENCE:
            return True
        return (1.0 - saved) * cost < constants.NO_DIFFERENCE


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
        times = self.backend.crowding
        key = times, texts
        if key == (1.0, 1) or self.curve is None:
            return self.curve
        if key not in self.known.curves:
            curve = self.curve if times == 1.0 else self.curve.crowded(times)
            self.known.curves[key] = curve if texts == 1 else curve.together(texts)
        return self.known.curves[key]


_ROOT_ALONE = range(-1, 0)  # the parents of its nodes


class Decoding:
    """One model writes, until the text ends or another model goes on.

    Its text is read in pieces (`has_read`, `first`); then each round has stages, which `step` runs
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
        self._is_drafted_from = False  # whether the drafter was given it
        self._drafter = self._chosen_drafter()
        self._cooldown = 0  # plain rounds to come
        # Of the cooldown so far: the root, the token written, and milliseconds of the step.
        self._plain_rounds: list[tuple[int, int, float]] = []
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
        if not self.num_unread:
            num_read = len(self._text) - self._reused
            self.run.counters.add_reading(num_read, self._reused, self._read_s)

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
            assert self.model.drafter is not None
            self.model.drafter.history = self.run.history
            if self.run.prediction:
                self.model.drafter.recall([(self.run.history, self.run.prediction)])
            text = [one for one in self._text if one >= 0] if self.run.images else self._text
            self._drafter.begin([*text, self._root])  # for which no first token waited
            self._is_drafted_from = True
        self.context = context = self._context_of(others, pending, kept)
        if self._drafter is None or context is None or context.max_nodes <= 0:
            return
        proposal = self._drafter.propose(context)
        if (goes_on := self.run.writers.goes_on) < 1.0:
            proposal = proposal.cut_off(goes_on)
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
        self._tree = tree = DraftTree((self._root,), _ROOT_ALONE)
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
        counters.crowded_rounds += backend.crowding > 1.0
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
            self._plain_rounds.append((self._root, emitted[0], step_ms))
            self._cooldown -= 1
        elif context is not None:
            rows = _top_tokens(logits)
            result = VerifyResult(self._tree, path, emitted, context, rows, node_ms=node_ms)
            drafter.observe(result)
            self.model.history.observe(len(self._tree), len(emitted))
        if self._cooldown > 0 and drafter.has_hit([token for _, token, _ in self._plain_rounds]):
            self._cooldown = 0

    def tell(self) -> None:
        """Let the drafter, the curve and the counts know of the cooldown's rounds; it ends."""
        told, context, self._cooldown = self._plain_rounds, self.context, 0
        count, self._plain_rounds = len(told), []
        if self._drafter is None or context is None or not count:
            return
        tokens = [token for _, token, _ in told]
        tree = DraftTree.chain((told[0][0], *tokens[:-1]))
        self._drafter.observe(VerifyResult(tree, range(count), tokens, context, rounds=count))
        for _ in told:
            self.model.history.observe(1, 1)
        if context.curve is self.model.curve_now():
            depth = max(0, self.backend.length - count)  # 0: it failed
            for place, (_, _, step_ms) in enumerate(told):
                context.curve.observe(1, depth + place, 1, step_ms)


def _top_tokens(logits: Logits) -> Callable[[int], TopTokens]:
    return lambda node: top_tokens_of(logits[node])


def _until_end(
    path: list[int], emitted: list[int], is_end: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Drop what came after a token that ends the generation; nothing did after the last node's."""
    for place, token in enumerate(emitted[: len(path) - 1]):
        if is_end(token):
            return path[: place + 1], emitted[: place + 1]
    return path, emitted
