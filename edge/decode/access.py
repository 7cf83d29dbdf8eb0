"""Who may use an engine of one user: one generation at a time, in one process, until it is closed.

One of several users has a `Scheduler` for the first of these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from edgespec.errors import UnsupportedError

_PATIENCE_S = 0.05  # between two looks at whether a waiting generation was cancelled


class Flag(Protocol):
    """Whether to stop waiting."""

    def is_set(self) -> bool: ...


class Endable(Protocol):
    """A generation that can be ended from outside."""

    def end(self) -> bool:
        """End it now, or after the step that some thread computes: False then."""


class Access:
    """The lock of an engine, which knows whose it is and whether there is still an engine."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_freed = False  # the model, too
        self.user: Endable | None = None  # the generation that holds it
        self._lock = threading.Lock()
        # The thread that took the lock, or ran its generation last: numbers are given again.
        self._owner: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """A forked process has the memory, but none of the threads that wait for each step."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise UnsupportedError where the engine cannot be used any more, or not from here."""
        if not self.is_of_this_process:
            raise UnsupportedError(
                "the engine was loaded by another process, of which this one is a fork",
                hint="load the model in the process that uses it",
            )
        if self.is_closed:
            raise UnsupportedError("the engine is closed", hint="load the model again")

    @contextmanager
    def held(self, cancel: Flag, user: Endable | None = None) -> Iterator[bool]:
        """Hold the engine, for a generation that `take_over` may end.

        Yields False, without holding it, where `cancel` was set while it waited. Raises
        UnsupportedError where this thread has it already, and as `check`.
        """
        self.check()
        if not self._acquire(cancel):
            yield False
            return
        try:
            self.check()
            self.user = user
            yield True
        finally:
            self.release()

    def pass_on(self) -> None:
        """The running thread is the owner now: a generation may move between threads."""
        self._owner = threading.current_thread()

    def take_over(self) -> None:
        """Acquire the engine from whoever has it: an unfinished stream ends.

        One that is not running, whoever reads it, ends here; a running one after its step.
        """
        while not self._lock.acquire(blocking=False):
            user = self.user
            has_ended = user is not None and user.end()
            if not has_ended and self._owner is threading.current_thread():
                raise UnsupportedError(
                    "the engine cannot be closed by what runs within its own step",
                    hint="close it in another thread, or when the stream has ended",
                )
            if self._lock.acquire(timeout=_PATIENCE_S):
                break
        self._owner = threading.current_thread()

    def release(self) -> None:
        """Let the next one have it."""
        self._owner = self.user = None
        self._lock.release()

    def _acquire(self, cancel: Flag) -> bool:
        """Wait for other threads' generations; False when cancelled meanwhile."""
        if self._owner is threading.current_thread():
            raise UnsupportedError(
                "another stream of this engine is unfinished in this thread",
                hint="read it to its end or close() it first; one in another thread is waited for",
            )
        while not self._lock.acquire(timeout=_PATIENCE_S):
            if cancel.is_set():
                return False
            self.check()
        self._owner = threading.current_thread()
        return True
