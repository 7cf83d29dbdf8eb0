"""The loop by which one model writes:

    draft -> verify -> accept -> commit -> learn

It knows no inference library (the backend does), no probabilities (the drafter does), and no other
model (`Writers` does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.backends.base import Backend, Logits
from edgespec.backends.tree import DraftTree
from edgespec.decode.accept import accept, cut
from edgespec.decode.generation import Rounds, Run
from edgespec.decode.verification import accept_sampled
from edgespec.drafting.calibration import Calibration
from edgespec.drafting.controller import build_tree, choose_size, likeliest_chain
from edgespec.drafting.drafters.base import Drafter, Outcome, TopTokens
from edgespec.drafting.drafters.grammar import GrammarDrafter, new_counts
from edgespec.drafting.proposal import Stakes
from edgespec.drafting.top_tokens import top_tokens_of
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import RoundHistory
from edgespec.prefix import common_prefix_length
from edgespec.sampling.constrained import ConstrainedSampler


@dataclass(slots=True)
class Known:
    """What the generations of one engine find out for the next ones, besides its drafter."""

    forced: Calibration = field(default_factory=new_counts)  # text that a grammar forces
    crowded: dict[float, CostCurve] = field(default_factory=dict)  # by how many times fewer threads


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can write, and what it drafts with. A drafter needs a curve."""

    backend: Backend
    curve: CostCurve | None
    drafter: Drafter | None
    max_nodes: int  # of a step, the root included
    history: RoundHistory
    known: Known

    def curve_now(self) -> CostCurve | None:
        """Times of steps with as many threads as the last one had."""
        times = self.backend.crowding
        if times == 1.0 or self.curve is None:
            return self.curve
        if times not in self.known.crowded:
            self.known.crowded[times] = self.curve.crowded(times)
        return self.known.crowded[times]


@dataclass(frozen=True, slots=True)
class Draft:
    """What is verified next, and the ms that models took to draft it."""

    tree: DraftTree
    stakes: Stakes | None  # None where nothing is ever drafted
    draft_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    """One step that was made: `emitted` are the tokens, `path` their nodes in the tree."""

    began_s: float  # by `perf_counter`, when its drafts were begun

    draft: Draft
    logits: Logits  # [n, V], of the nodes
    path: list[int]
    emitted: list[int]
    step_ms: float


class Decoding:
    """One model writes, until the text ends or another model goes on.

    Args:
        text: token ids to go on from, not empty.
        reuse: whether what the cache holds of them is kept.
    """

    def __init__(self, model: Model, run: Run, text: list[int], reuse: bool) -> None:
        self._model = model
        self._backend = model.backend
        self._run = run
        self._text = text
        self._reuse = reuse
        self._drafter = self._chosen_drafter()
        self._min_probability = 0.0  # of a draft node that can pay
        if self._drafter is not None and model.curve is not None:
            self._min_probability = model.curve.least_useful_probability(len(text))
        self._previous = 0  # nodes of the step before
        self.has_unsaid = False  # tokens that the sampler has picked, and no round has yielded

    def rounds(self) -> Rounds:
        """Yield the tokens of each round. The first "round" is the last logits of the text.

        Ends before a token that is handed over.
        """
        root = self._first()
        if root is None:
            return
        yield [root]
        while not self._has_ended(root) and not self._run.cancel.is_set():
            began = perf_counter()
            draft = self._draft(root)
            drafted = perf_counter()
            logits = self._backend.verify(draft.tree)[:, : self._run.vocab_size]
            step_ms = (perf_counter() - drafted) * 1e3
            self.has_unsaid = True
            path, emitted = self._accept(draft.tree, logits)
            self._run.note(logits, path, emitted)
            self._backend.commit(path)
            path = path[: len(emitted)]
            self._learn(Round(began, draft, logits, path, emitted, step_ms))
            if not emitted:
                return
            root = emitted[-1]
            self.has_unsaid = False
            yield emitted

    def _chosen_drafter(self) -> Drafter | None:
        """What drafts for this text, if anything."""
        model, grammar = self._model, self._run.grammar
        drafter = model.drafter if self._run.speculates else None
        if drafter is None or grammar is None:
            return drafter
        return GrammarDrafter(grammar, model.backend.tokenizer, drafter, model.known.forced)

    def _first(self) -> int | None:
        """The token behind the text; None where it is handed over or cancelled."""
        logits = self._read()
        if logits is None or self._run.writers.hands_over(logits):
            return None
        token = self._run.sampler.pick(logits)
        self._run.note(logits[None], (0,), (token,))
        if self._drafter is not None:
            self._drafter.begin([*self._text, token])
        self._run.counters.add_first()
        return token

    def _read(self) -> Logits | None:
        """Logits after the text, or None when cancelled on the way."""
        began, text, backend = perf_counter(), self._text, self._backend
        known = common_prefix_length(backend.tokens, text[:-1]) if self._reuse else 0
        kept = backend.truncate(known)
        logits, size = None, backend.batch_size
        for start in range(kept, len(text), size):
            if self._run.cancel.is_set():
                return None
            logits = backend.prefill(text[start : start + size])
        self._run.counters.add_reading(len(text) - kept, kept, perf_counter() - began)
        return logits if logits is None else logits[: self._run.vocab_size]

    def _has_ended(self, token: int) -> bool:
        run = self._run
        return run.counters.generated_tokens >= run.limit or self._backend.tokenizer.is_end(token)

    def _draft(self, root: int) -> Draft:
        """The root, and drafts where they are worth their time."""
        stakes = self._stakes()
        if self._drafter is None or stakes is None or stakes.max_nodes == 0:
            return Draft(DraftTree.chain((root,)), stakes, 0.0)
        proposal = self._drafter.propose(stakes)
        goes_on = self._run.writers.goes_on
        if goes_on < 1.0:
            proposal = proposal.cut_off(goes_on)
        if not stakes.branches:
            proposal = likeliest_chain(proposal)
        size, _ = choose_size(
            proposal.probabilities,
            stakes,
            kept=proposal.kept,
            spent_ms=proposal.draft_ms,
            tries=True,
        )
        return Draft(build_tree(root, proposal, size), stakes, proposal.draft_ms)

    def _stakes(self) -> Stakes | None:
        """What the next round may draft and cost; None where nothing is ever drafted."""
        run, backend = self._run, self._backend
        curve = self._model.curve_now()
        if self._drafter is None or curve is None:
            return None
        room = min(
            run.limit - run.counters.generated_tokens - 1,
            backend.context_size - backend.length - 1,
            self._model.max_nodes - 1,
            len(curve.base) - backend.pending - 2,  # drawn nodes cannot be left out later
        )
        return Stakes(
            max_nodes=max(0, room),
            min_probability=self._min_probability,
            curve=curve,
            depth=backend.length,
            previous=self._previous,
            extra=backend.pending,
            branches=backend.capabilities.tree,
            sampler=run.draft_sampler,
        )

    def _accept(self, tree: DraftTree, logits: Logits) -> tuple[list[int], list[int]]:
        """Nodes to keep and tokens to emit: each rule where its proposals need it."""
        sampler, hands_over = self._run.sampler, self._run.writers.hands_over
        if not tree.distributions or isinstance(sampler, ConstrainedSampler):
            path, emitted = accept(tree, logits, sampler.pick, hands_over)
        else:
            kept = accept_sampled(
                tree,
                tree.distributions,
                lambda node: sampler.unsorted_distribution(logits[node]),
                sampler,
            )
            path, emitted = cut(*kept, logits, hands_over)
        return _until_end(path, emitted, self._backend.tokenizer.is_end)

    def _learn(self, done: Round) -> None:
        """Let the drafter, the counts and the curve know what the round brought and took."""
        self._teach(done)
        counters, spent_s = self._run.counters, perf_counter() - done.began_s
        counters.crowded_rounds += self._backend.crowding > 1.0
        draft, step_s = done.draft, done.step_ms / 1e3
        counters.add_round(draft.tree, done.path, step_s, draft.draft_ms / 1e3, spent_s)

    def _teach(self, done: Round) -> None:
        tree, stakes = done.draft.tree, done.draft.stakes
        if self._drafter is None or stakes is None or not done.emitted:
            return
        top_tokens = _top_tokens(done.logits)
        self._drafter.observe(Outcome(tree, done.path, done.emitted, stakes, top_tokens))
        self._model.history.observe(len(tree), len(done.emitted))
        self._previous = len(tree) + stakes.extra
        if stakes.curve is self._model.curve_now():  # else the team changed for this step
            work_ms = (perf_counter() - done.began_s) * 1e3 - done.draft.draft_ms
            stakes.curve.observe(
                self._previous, stakes.depth, stakes.previous, done.step_ms, work_ms
            )


def _top_tokens(logits: Logits) -> Callable[[int], TopTokens]:
    return lambda node: top_tokens_of(logits[node])


def _until_end(
    path: list[int], emitted: list[int], is_end: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """Drop what came after a token that ends the generation."""
    for place, token in enumerate(emitted):
        if is_end(token):
            return path[: place + 1], emitted[: place + 1]
    return path, emitted
