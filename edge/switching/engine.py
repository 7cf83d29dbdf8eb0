"""Two models write one text, in turns: lossy, and never on by default.

Each is an `Engine` with its own cache, curve and drafters. The one whose turn it is runs its
ordinary loop (drafts included) until the policy hands over; the other then reads what it missed in
one batched step, which gives its first token. Whose turn it is follows from the tokens alone, so
with drafts and without the same text is written, but for rounding.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from warnings import warn

from edgespec.backends.base import Backend
from edgespec.decode.engine import Engine
from edgespec.decode.sequence import Job
from edgespec.decode.stats import LARGE
from edgespec.errors import BackendError, EdgespecWarning
from edgespec.switching.policy import SwitchPolicy
from edgespec.switching.switch import Switch


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
        if not self._held.enter_context(self.small.exclusive(lambda: job.is_cancelled)):
            return
        job.writers = Switch(self.policy if self._failure is None else SwitchPolicy.always(LARGE))
        self._have_written.clear()
        self._let_write(job)

    def go_on(self, job: Job) -> None:
        """As of `Target`."""
        assert isinstance(job.writers, Switch), "it has begun"
        job.writers.change()
        job.counters.switches += 1
        self._let_write(job)

    def survives(self, job: Job, problem: Exception) -> bool:
        """As of `Target`: the large model goes on with what was written."""
        if not isinstance(problem, BackendError) or not isinstance(job.writers, Switch):
            return False
        if job.writers.writer == LARGE or job.sequence.has_unwritten:
            return False
        self._failure = str(problem)
        said = f"the small model failed and is left out: {problem}"
        warn(said, EdgespecWarning, stacklevel=2)
        job.writers.leave_out_small()
        job.counters.switches += 1
        self._let_write(job)
        return True

    def end(self, job: Job) -> None:
        """As of `Target`."""
        self._held.close()

    def _let_write(self, job: Job) -> None:
        writer = job.writers.writer
        target = self if writer == LARGE else self.small
        reuse = job.reuse or writer in self._have_written
        self._have_written.add(writer)
        job.start(target, 0, reuse)
