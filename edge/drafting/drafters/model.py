"""A draft model: a smaller model with the target's vocabulary writes ahead.

It drafts a spine of tokens, one step of its own each, and beside them its next best tokens where
the target verifies branches: what DySpec's greedy expansion (arXiv 2410.11744) comes to when each
step of the draft model extends the likeliest path alone. Drafting stops where one more token is
not expected to raise the tokens/ms of the round: a rule by value, not a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, TypeGuard
from warnings import warn

import numpy as np

from edgespec.backends.base import Backend, Logits
from edgespec.backends.tree import DraftTree
from edgespec.common import common_length
from edgespec.drafting.controller import choose_size
from edgespec.drafting.drafters.base import Outcome, count_hits
from edgespec.drafting.drafters.growth import Growth, new_calibration
from edgespec.drafting.proposal import EMPTY, Proposal, Prospects, Stakes
from edgespec.drafting.successors import successors_of
from edgespec.errors import DraftModelWarning, EdgespecError, UnsupportedError
from edgespec.memory.times.curve import CostCurve
from edgespec.models.exits.early_exit import ExitInfo

_LONGEST = 16  # tokens drafted ahead
_FIRST_HOPE = 0.7  # that a drafted token is accepted, before anything was counted
_HOPE_RATE = 0.05
_USUAL_STEPS, _USUAL_RATE = 3.0, 0.05  # of a round, before there was one; of each one later
_SETTLED = 100  # rounds after which all count alike
_PACE_MEMORY = 0.95  # of what rounds took, from round to round
_SLOWEST = 10.0  # times as long as the curve says
_FIRST_STEPS = 10.0  # that the curve's own times count for
_FAILURES = (EdgespecError, OSError, MemoryError)  # of a backend; all else is a mistake of ours


class ModelDrafter:
    """Drafts with `backend`, whose steps take what `curve` says, for a target of `vocab_size`.

    A text with a token from `readable` on, which only the target has, is not drafted for. An early
    exit reads no more than its window at once: it begins with the last tokens of a text, and does
    so again where it has missed more of them or where its context is full.

    A backend that fails is said so once, with a DraftModelWarning, and never asked again: what
    failed would fail in each round, and take its time. Answers go on without.

    Raises UnsupportedError for a backend that cannot take back what was only a draft.
    """

    name = "model"
    nbytes = 0  # of tables; the model's own bytes are in the plan

    def __init__(
        self,
        backend: Backend,
        curve: CostCurve,
        vocab_size: int,
        readable: int | None = None,
        early_exit: ExitInfo | None = None,
    ) -> None:
        if not backend.capabilities.truncate:
            raise UnsupportedError(
                f"this model cannot draft: {backend.capabilities.reason}",
                hint="use a draft model without sliding windows or recurrent layers",
            )
        self.failure: str | None = None  # of the backend, in its words
        self._backend = backend
        self._curve = curve
        self._vocab_size = vocab_size
        self._readable = vocab_size if readable is None else readable
        self._window = early_exit.window if early_exit else None
        # The target's tokens that the rows of logits stand for; None are the first ones.
        self._ids = np.array(early_exit.token_ids) if early_exit else None
        self._reads = True  # every token of the text so far
        self._calibration = new_calibration()
        self._hope = _FIRST_HOPE  # that a drafted token is accepted when the one before it was
        # Rounds take longer than their steps: other threads have just run, and there is the work
        # on this side. What they took lately, and what the curve says of them.
        self._taken_ms = self._curve_ms = _FIRST_STEPS * curve.base[1]
        # What a round drafts: probabilities of its nodes, best first, and the steps it takes.
        self._usual = [_FIRST_HOPE ** (i + 1) for i in range(_LONGEST)]
        self._usual_steps, self._rounds = _USUAL_STEPS, 0
        self._text: list[int] = []  # as far as the draft model has to see it
        self._cached: list[int] = []  # tokens in the draft model's cache
        self._shared = 0  # of them, those the text begins with
        self._proposal = EMPTY
        self._cells: list[int] = []
        self._spine: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text; nothing is computed before it pays."""
        self._calibration.forget_recent()
        self._proposal, self._spine = EMPTY, []
        self._text = list(tokens[-self._window :] if self._window else tokens)
        self._reads = max(tokens, default=0) < self._readable
        self._shared = common_length(self._cached, self._text)

    def forget(self) -> None:
        """Empty the cache, which knows the last text; what was learned stays."""
        self._backend.truncate(0)
        self._cached, self._shared = [], 0

    # -- drafting --------------------------------------------------------------------------

    def prospects(self, stakes: Stakes) -> Prospects | None:
        """What drafting brought lately, and what it would take now; None once it has failed."""
        if self.failure is not None:
            return None
        if not self._can_read():
            return Prospects((), 0.0, 0.0)
        before_ms = self._catch_up_ms(self._missing())
        draft_ms = self._usual_steps * self._step_ms()
        return Prospects(self._usual[: stakes.max_nodes], before_ms, draft_ms)

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """A spine of the draft model's tokens, with siblings where they can be verified."""
        self._proposal, self._spine = EMPTY, []
        if not self._can_read():
            return EMPTY
        began, missing = perf_counter(), self._missing()
        growth = Growth(stakes, self._calibration)
        try:
            self._grow(growth, stakes)
        except _FAILURES as error:
            self.failure = str(error) or type(error).__name__
        if self.failure is None:
            if missing <= self._curve.max_nodes:  # what reading more takes is a guess
                self._keep_pace((perf_counter() - began) * 1e3, missing, growth.depth)
            self._keep_usual(growth)
        # What was drawn before a failure stays: dropping it because its own token could not be fed
        # would bias the output.
        self._spine = growth.spine()
        self._proposal, self._cells = growth.proposal((perf_counter() - began) * 1e3)
        if self.failure is not None:
            warn(f"the draft model failed and is left out: {self.failure}", DraftModelWarning, 2)
        return self._proposal

    def _grow(self, growth: Growth, stakes: Stakes) -> None:
        logits = self._catch_up()
        # What was read serves many rounds. This one pays for the step behind its first token, or it
        # would seem so dear already that any number of further drafts were cheap.
        start = perf_counter() - self._step_ms() / 1e3
        while self._extend(growth, logits, stakes):
            if not self._goes_on(growth, stakes, (perf_counter() - start) * 1e3):
                break
            logits = self._feed([growth.tip])
            self._cached.append(growth.tip)

    def _goes_on(self, growth: Growth, stakes: Stakes, spent_ms: float) -> bool:
        """Whether one more token of the spine is expected to raise the round's tokens/ms."""
        if growth.is_full or growth.depth >= _LONGEST:
            return False
        spine, depth = growth.spine_probabilities(), growth.depth
        ahead = [growth.chance * self._hope ** (i + 1) for i in range(_LONGEST - depth)]
        size, _ = choose_size(
            [*spine, *ahead],
            stakes,
            kept=depth if stakes.sampler else 0,
            spent_ms=spent_ms,
            node_ms=self._step_ms(),
            drafted=depth,
        )
        return size > depth

    def _can_read(self) -> bool:
        fits = len(self._text) + _LONGEST <= self._backend.context_size
        return self._reads and fits and self.failure is None

    def _leave_behind(self) -> None:
        """Begin anew with the last tokens where that is less to read, or all that fits."""
        window, length = self._window, len(self._text)
        if window and (
            length - self._shared > window or length + _LONGEST > self._backend.context_size
        ):
            del self._text[:-window]
            self._shared = 0

    def _catch_up_ms(self, missing: int) -> float:
        """What it takes to feed so many tokens, beyond the step that drafts the first one."""
        return self._pace * self._curve.read_ms(missing, len(self._text)) - self._step_ms()

    def _missing(self) -> int:
        """Tokens to be fed before anything can be drafted; the last one is fed in any case."""
        return max(1, len(self._text) - self._shared)

    @property
    def _pace(self) -> float:
        """How long steps take lately, in units of what the curve says."""
        return self._taken_ms / self._curve_ms

    def _step_ms(self) -> float:
        return self._pace * self._curve.step_ms(1, len(self._text))

    def _keep_pace(self, ms: float, missing: int, num_drafted: int) -> None:
        """Learn how long rounds take: this one read and drafted so many tokens in `ms`."""
        curve_ms = (self._catch_up_ms(missing) + num_drafted * self._step_ms()) / self._pace
        # A round that stood still must not keep others from being asked for, and so from showing.
        self._taken_ms = _PACE_MEMORY * self._taken_ms + min(ms, _SLOWEST * curve_ms)
        self._curve_ms = _PACE_MEMORY * self._curve_ms + curve_ms

    def _catch_up(self) -> Logits:
        """Feed what the draft model has not seen; logits after the last token, [V]."""
        backend = self._backend
        kept = backend.truncate(min(self._shared, len(self._text) - 1))
        self._cached, self._shared = self._text[:kept], kept  # should a step fail
        missing = self._text[kept:]
        while len(missing) > backend.max_nodes:
            size = min(backend.batch_size, len(missing) - 1)
            backend.prefill(missing[:size])
            missing = missing[size:]
        self._cached, self._shared = list(self._text), len(self._text)
        return self._feed(missing)

    def _feed(self, tokens: Sequence[int]) -> Logits:
        logits = self._backend.verify(DraftTree.chain(tokens))
        self._backend.commit(range(len(tokens)))
        last: Logits = logits[-1]
        return last

    def _extend(self, growth: Growth, logits: Logits, stakes: Stakes) -> bool:
        """Let it grow by a row of the draft model; False for a broken one."""
        logits = logits[: self._vocab_size]  # the rest pads it
        if not np.isfinite(logits.max()):
            return False
        if stakes.sampler is not None:
            growth.draw(self._spread(logits), stakes.sampler)
            return True
        tokens, shares = successors_of(logits)
        growth.take(tokens if self._ids is None else self._ids[tokens].tolist(), shares)
        return True

    def _spread(self, logits: Logits) -> Logits:
        """The row over the target's tokens [V]; those it has no row for get -inf."""
        if self._ids is None and len(logits) == self._vocab_size:
            return logits
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[slice(len(logits)) if self._ids is None else self._ids] = logits
        return row

    # -- learning --------------------------------------------------------------------------

    def _keep_usual(self, growth: Growth) -> None:
        """Learn what a round usually drafts, from this one."""
        rate = max(_USUAL_RATE, 1.0 / (self._rounds + 2))
        self._rounds += 1
        self._usual_steps += rate * (growth.depth - self._usual_steps)
        found = [*sorted(growth.probabilities, reverse=True), *[0.0] * _LONGEST]
        self._usual = [p + rate * (q - p) for p, q in zip(self._usual, found, strict=False)]

    def observe(self, outcome: Outcome) -> None:
        """Count what was accepted; drafts that were right stay in the draft model's cache."""
        count_hits(self._proposal, self._cells, outcome.emitted, self._calibration)
        for drafted, written in zip(self._spine, outcome.emitted, strict=False):
            self._hope += _HOPE_RATE * ((drafted == written) - self._hope)
            if drafted != written:
                break
        self._proposal, self._spine = EMPTY, []
        self._text += outcome.emitted
        self._reads = self._reads and max(outcome.emitted, default=0) < self._readable
        self._shared = common_length(self._cached, self._text, self._shared)
        self._leave_behind()

    def state(self) -> dict[str, Any]:
        """The counts."""
        usual = {"usual": self._usual, "usual_steps": self._usual_steps}
        return {**self._calibration.as_json(), "hope": self._hope, **usual}

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Start from the counts of an earlier run."""
        self._calibration.load_json(document)
        hope = (document or {}).get("hope")
        if isinstance(hope, float) and 0.0 <= hope <= 1.0:
            self._hope = hope
        usual, steps = ((document or {}).get(key) for key in ("usual", "usual_steps"))
        if _is_usual(usual) and isinstance(steps, float) and 1.0 <= steps <= _LONGEST:
            self._usual, self._usual_steps, self._rounds = usual, steps, _SETTLED

    def memory_bytes(self) -> dict[str, int]:
        """What the draft model's engine says it allocated, by component."""
        return {f"draft_{name}": size for name, size in self._backend.memory_bytes().items()}

    def close(self) -> None:
        """Free the draft model."""
        self._backend.close()


def _is_usual(value: Any) -> TypeGuard[list[float]]:
    if not isinstance(value, list) or len(value) != _LONGEST:
        return False
    return all(isinstance(part, float) and 0.0 <= part <= 1.0 for part in value)
