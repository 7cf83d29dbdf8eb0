"""Two models write one text, in turns: lossy, and never on by default.

Each is an `Engine` with its own cache, curve and drafters. The one whose turn it is runs its
ordinary loop (drafts included) until the policy hands over; the other then reads what it missed in
one batched step, which gives its first token. Whose turn it is follows from the tokens alone, so
with drafts and without the same text is written, but for rounding.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import ExitStack
from typing import Any
from warnings import warn

import numpy as np

from edgespec.backends.base import Backend, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL, ModelTurn, Routing
from edgespec.decode.step import Job
from edgespec.errors import BackendError, EdgespecWarning
from edgespec.switching.planning import SwitchPolicy


def entropy_nats(row: Logits) -> float:
    """Entropy of the softmax of logits [V], in nats; minus infinity is a token without a chance.

    Logits are not shifted by their largest first, which would read them once more, unless their
    exponentials do not fit. No BLAS: its threads would wait beside those of the next step.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(row)
        total = float(weights.sum())
        weights *= row
        weighted = float(weights.sum())
    if 1e-3 < total < 1e30 and math.isfinite(weighted):  # exact enough
        return max(0.0, math.log(total) - weighted / total)
    most = row.max()
    if not math.isfinite(most):  # nothing can be chosen, which is for the sampler to say
        return math.nan
    return entropy_nats(np.maximum(row - most, -80.0))  # exp of it adds nothing to an entropy


class Switch(Routing):
    """One answer under a policy: who writes, since when, and how sure; the small model begins."""

    def __init__(self, policy: SwitchPolicy) -> None:
        self.is_due = False  # the other model writes next
        self._policy = policy
        self._recent: deque[float] = deque(maxlen=policy.window)
        self._ended: list[ModelTurn] = []  # that have ended
        self._rows = 0  # tokens of this stay, with one that a row is there for
        self._least = 0  # of a stay; an answer may begin with either model
        self.writer = SMALL if policy.up_nats > 0.0 else LARGE

    @property
    def turns(self) -> list[ModelTurn]:
        """Who wrote how many tokens so far, in order."""
        return [*self._ended, (self.writer, self._rows)]

    @property
    def is_settled(self) -> bool:
        """Whether the writer never hands over, whatever its entropies are."""
        policy = self._policy
        if self.writer == SMALL:
            return policy.up_nats == math.inf
        return policy.down_nats < 0.0 or policy.up_nats <= 0.0

    def switches_model(self, row: Logits) -> bool:
        """As `sees`, of logits [V]."""
        if self.is_settled or self.is_due:
            return self.is_due
        return self.sees(entropy_nats(row))

    def sees(self, nats: float) -> bool:
        """Whether the other model writes the next token, which has this entropy.

        To be told that of each token of the writer, in order, before it is picked.
        """
        if self.is_due:
            return True
        policy = self._policy
        self._recent.append(nats)
        mean = sum(self._recent) / len(self._recent)
        if self.writer == SMALL:
            self.is_due = mean >= policy.up_nats and self._rows >= self._least
            self._rows += not self.is_due
            return self.is_due
        self._rows += 1
        self.is_due = mean <= policy.down_nats and self._rows >= self._least
        return False

    def change(self) -> None:
        """The other model goes on."""
        if self._rows or self._ended:  # who begins does so with a token
            self._ended.append((self.writer, self._rows))
        self.writer = LARGE if self.writer == SMALL else SMALL
        self.is_due, self._rows, self._least = False, 0, self._policy.min_stay
        self._recent.clear()

    def leave_out_small(self) -> None:
        """The large model writes all that follows."""
        if self.writer == SMALL:
            self.change()
        self._policy = SwitchPolicy.always(LARGE)


class SwitchingEngine(Engine):
    """A large model, and a small one that writes what it is confident about.

    Args:
        backend: the large model.
        small: an engine of its own, which this one closes.
        policy: who writes when; it may be replaced between answers.
        options: of the large model, as in `Engine`.

    One vocabulary may end earlier: tokens that only pad the other are never picked.

    A small model that fails is left out for good, which is said once, with an EdgespecWarning: the
    large one writes what is missing, and all later answers.
    """

    def __init__(
        self, backend: Backend, *, small: Engine, policy: SwitchPolicy, **options: Any
    ) -> None:
        options["reuses_cache"] = options.get("reuses_cache", True) and small.reuses_cache
        super().__init__(backend, **options)
        self.small = small
        self.policy = policy
        self._failure: str | None = None  # of the small model
        self._held = ExitStack()  # the small model, by the answer that is written
        self._have_written = set[str]()  # in that answer

    def memory_bytes(self) -> dict[str, int]:
        """As `Engine.memory_bytes`, with the small model's as `switch_...`."""
        small = {f"switch_{name}": size for name, size in self.small.memory_bytes().items()}
        return {**super().memory_bytes(), **small}

    @property
    def draft_failure(self) -> str | None:
        return super().draft_failure or self._failure

    def _free(self) -> None:
        try:
            super()._free()
        finally:
            self.small.close()

    @property
    def vocab_size(self) -> int:
        return min(super().vocab_size, self.small.vocab_size)

    def begin(self, job: Job) -> None:
        """As of `Target`; others cannot use the small model until the end."""
        if not self._held.enter_context(self.small.scheduler.exclusive(lambda: job.is_cancelled)):
            return
        job.routing = Switch(self.policy if self._failure is None else SwitchPolicy.always(LARGE))
        self._have_written.clear()
        self._let_write(job)

    def go_on(self, job: Job) -> None:
        assert isinstance(job.routing, Switch), "it has begun"
        job.routing.change()
        job.counters.switches += 1
        self._let_write(job)

    def survives(self, job: Job, problem: Exception) -> bool:
        """As of `Target`: the large model goes on with what was written."""
        if not isinstance(problem, BackendError) or not isinstance(job.routing, Switch):
            return False
        if job.routing.writer == LARGE or job.sequence.has_unwritten:
            return False
        self._failure = str(problem)
        said = f"the small model failed and is left out: {problem}"
        warn(said, EdgespecWarning, stacklevel=2)
        job.routing.leave_out_small()
        job.counters.switches += 1
        self._let_write(job)
        return True

    def end(self, job: Job) -> None:
        self._held.close()

    def _let_write(self, job: Job) -> None:
        writer = job.routing.writer
        target = self if writer == LARGE else self.small
        reuse = job.reuse or writer in self._have_written
        self._have_written.add(writer)
        job.start(target, 0, reuse)
