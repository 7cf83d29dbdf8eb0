"""A draft model: a smaller model with the target's vocabulary writes ahead.

It drafts a spine of tokens, one step of its own each, and beside them its next best tokens where
the target verifies branches: what DySpec's greedy expansion (arXiv 2410.11744) comes to when each
step of the draft model extends the likeliest path alone. Drafting stops where one more token is
not expected to raise the tokens/ms of the round: a rule by value, not a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any
from warnings import warn

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Backend, Logits
from edgespec.drafting.controller import choose_size
from edgespec.drafting.drafters.base import Outcome, count_hits
from edgespec.drafting.drafters.model_rounds import LONGEST, RoundTimes, UsualRound
from edgespec.drafting.drafters.model_text import DraftText, ModelText
from edgespec.drafting.drafters.proposal_builder import ProposalBuilder, new_calibration
from edgespec.drafting.proposal import EMPTY, Proposal, Prospects, Stakes
from edgespec.drafting.top_tokens import top_tokens_of
from edgespec.errors import DraftModelWarning, EdgespecError, UnsupportedError
from edgespec.memory.times.curve import CostCurve
from edgespec.models.early_exit import WINDOW, ExitInfo, gains_of

_FAILURES = (EdgespecError, OSError, MemoryError)  # of a backend; all else is a mistake of ours


class WritingDrafter:
    """Drafts with an engine of its own that reads the text and writes ahead.

    An engine that fails is said so once, with a DraftModelWarning, and never asked again: what
    failed would fail in each round, and take its time. Answers go on without.
    """

    name = ""
    nbytes = 0  # of tables; the engine's own bytes are in the plan
    _who = _component = ""
    _block = 0  # tokens that one step drafts; 0: one by one
    _text: DraftText

    def __init__(
        self,
        curve: CostCurve,
        vocab_size: int,
        token_ids: Sequence[int] | NDArray[np.int64] | None = None,
        promised: Sequence[float] = (),
    ) -> None:
        self.failure: str | None = None  # of the backend, in its words
        self._times = RoundTimes(curve)
        self._usual, self.is_promised = UsualRound(promised), bool(promised)
        self._vocab_size = vocab_size
        # The target's tokens that the rows of logits stand for; None are the first ones.
        self._ids = None if token_ids is None else np.array(token_ids)
        self._calibration = new_calibration()
        self._proposal = EMPTY
        self._cells: list[int] = []
        self._spine: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text; nothing is computed before it pays."""
        self._calibration.forget_recent()
        self._usual.begin()
        self._proposal, self._spine = EMPTY, []
        self._text.begin(tokens)

    def forget(self) -> None:
        """Empty the cache, which knows the last text; what was learned stays."""
        self._text.forget()

    # -- drafting --------------------------------------------------------------------------

    def prospects(self, stakes: Stakes) -> Prospects | None:
        """What drafting brought lately, and what it would take now; None once it has failed."""
        if self.failure is not None:
            return None
        if not self._text.can_be_read:
            return Prospects((), 0.0, 0.0)
        before_ms = self._times.catch_up_ms(self._text.num_missing, len(self._text.tokens))
        draft_ms = self._steps_of(self._usual.num_steps) * self._step_ms()
        return Prospects(self._usual.probabilities[: stakes.max_nodes], before_ms, draft_ms)

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """A spine of the draft model's tokens, with siblings where they can be verified."""
        self._proposal, self._spine = EMPTY, []
        if self.failure is not None or not self._text.can_be_read:
            return EMPTY
        began, missing = perf_counter(), self._text.num_missing
        builder = ProposalBuilder(stakes, self._calibration)
        try:
            self._build(builder, stakes)
        except _FAILURES as error:
            self.failure = str(error) or type(error).__name__
        if self.failure is None:
            ms = (perf_counter() - began) * 1e3
            steps = self._steps_of(builder.depth)
            self._times.learn(ms, missing, steps, len(self._text.tokens))
            self._usual.learn(builder.probabilities, builder.depth)
        # What was drawn before a failure stays: dropping it because its own token could not be fed
        # would bias the output.
        self._spine = builder.spine()
        self._proposal, self._cells = builder.proposal((perf_counter() - began) * 1e3)
        if self.failure is not None:
            warn(f"{self._who} failed and is left out: {self.failure}", DraftModelWarning, 2)
        return self._proposal

    def _build(self, builder: ProposalBuilder, stakes: Stakes) -> None:
        logits = self._text.catch_up()
        # What was read serves many rounds. This one pays for the step behind its first token, or it
        # would seem so dear already that any number of further drafts were cheap.
        start = perf_counter() - self._step_ms() / 1e3
        while self._extend(builder, logits, stakes):
            if not self._goes_on(builder, stakes, (perf_counter() - start) * 1e3):
                break
            logits = self._text.feed_draft(builder.tip)

    def _goes_on(self, builder: ProposalBuilder, stakes: Stakes, spent_ms: float) -> bool:
        """Whether one more token of the spine is expected to raise the round's tokens/ms."""
        longest = self._block or LONGEST
        if builder.is_full or builder.depth >= longest:
            return False
        spine, depth = builder.spine_probabilities(), builder.depth
        ahead = [builder.chance * self._usual.hope ** (i + 1) for i in range(longest - depth)]
        size, _ = choose_size(
            [*spine, *ahead],
            stakes,
            kept=depth if stakes.sampler else 0,
            spent_ms=spent_ms,
            node_ms=0.0 if self._block else self._step_ms(),
            drafted=depth,
        )
        return size > depth

    def _steps_of(self, depth: float) -> float:
        """That drafting so many tokens takes."""
        return min(1.0, depth) if self._block else depth

    def _step_ms(self) -> float:
        return self._times.step_ms(len(self._text.tokens))

    def _extend(self, builder: ProposalBuilder, logits: Logits, stakes: Stakes) -> bool:
        """Let it grow by a row of the draft model; False for a broken one."""
        logits = logits[: self._vocab_size]  # the rest pads it
        if not np.isfinite(logits.max()):
            return False
        if stakes.sampler is not None:
            builder.draw(self._spread(logits), stakes.sampler)
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

    def observe(self, outcome: Outcome) -> None:
        """Count what was accepted; drafts that were right stay in the draft model's cache."""
        count_hits(self._proposal, self._cells, outcome.emitted, self._calibration)
        self._usual.learn_hits(self._spine, outcome.emitted)
        self._proposal, self._spine = EMPTY, []
        self._text.append(outcome.emitted)

    def state(self) -> dict[str, Any]:
        """The counts."""
        return {**self._calibration.as_json(), **self._usual.state()}

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Start from the counts of an earlier run."""
        self._calibration.load_json(document)
        self._usual.load_state(document or {})

    def memory_bytes(self) -> dict[str, int]:
        """What the draft model's engine says it allocated, by component."""
        found = self._text.backend.memory_bytes()
        return {f"{self._component}_{name}": size for name, size in found.items()}

    def close(self) -> None:
        """Free the draft model."""
        self._text.backend.close()


class ModelDrafter(WritingDrafter):
    """Drafts with `backend`, whose steps take what `curve` says, for a target of `vocab_size`.

    A text with a token from `readable` on, which only the target has, is not drafted for. An early
    exit reads no more than its window at once: it begins with the last tokens of a text, and does
    so again where it has missed more of them or where its context is full.

    Raises UnsupportedError for a backend that cannot take back what was only a draft.
    """

    name = "model"
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
