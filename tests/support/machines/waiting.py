"""Threads of tests, and what they wait for: nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import Any

PATIENCE_S = 30.0  # what takes longer hangs
_TICK_S = 0.05


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread; the list has its result when it has ended."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Lived:
    """Seconds of a block that this process has lived: one that was stopped meanwhile had no time.

    Counted in short sleeps by a thread, so a busy machine may count fewer.
    """

    seconds = 0.0

    def __enter__(self) -> Lived:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self.seconds += _TICK_S


def until(is_so: Callable[[], object]) -> None:
    with Lived() as lived:
        while not is_so():
            assert lived.seconds < PATIENCE_S, "it did not come to that"
            sleep(1e-3)
