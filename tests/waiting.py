"""Threads of tests, and what they wait for: nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

PATIENCE_S = 30.0  # what takes longer hangs


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread; the list has its result when it has ended."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def until(is_so: Callable[[], object]) -> None:
    end = monotonic() + PATIENCE_S
    while not is_so():
        assert monotonic() < end, "it did not come to that"
        sleep(1e-3)
