"""The threads that read the engine's streams, behind a bounded queue.

Everything in front of them hands over generations and reads their mailboxes. As many run as the
engine takes at once; which of them share a step is the engine's business.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from edgespec.decode.generation import Result
from edgespec.serve.generation import Generation
from edgespec.serve.refusal import Refusal


class Worker:
    """Runs generations in the order in which they came.

    Args:
        most: generations that may wait.
        on_end: told what each generation brought, in its worker's thread, before its reader is.
        users: generations that run at once.
    """

    def __init__(
        self, most: int, on_end: Callable[[Generation, Result], None], users: int = 1
    ) -> None:
        self._most, self._users = most, users
        self._on_end = on_end
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._change = threading.Condition()
        self.is_closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name="edgespec-engine", daemon=True)
            for slot in range(users)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Generations in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Generation]:
        """Those that have begun."""
        return tuple(self._running)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Put them at the end of the queue. Raises Refusal where they do not all fit."""
        with self._change:
            if self.is_closed:
                raise Refusal("the server stops", status=503, code="stopping")
            there = len(self._waiting) + len(self._running)
            if there + len(generations) > self._most + self._users:
                raise Refusal(
                    f"{len(self._waiting)} generations wait and {self._most} may: try again later",
                    status=429,
                    code="queue_full",
                )
            self._waiting += generations
            self._change.notify_all()

    def cancel(self, generation: Generation) -> None:
        """Stop one after its step, or take it out of the queue."""
        generation.cancel()
        with self._change:
            if generation not in self._waiting:
                return
            self._waiting.remove(generation)
        generation.end(generation.stream.result)

    def close(self) -> None:
        """End all of them and the threads; safe to call twice."""
        with self._change:
            self.is_closed = True
            left = [*self._waiting]
            for generation in self._running:
                generation.cancel()
            self._change.notify_all()
        for generation in left:
            self.cancel(generation)
        for thread in self._threads:
            thread.join()

    def _work(self, slot: int) -> None:
        while (generation := self._next(slot)) is not None:
            try:
                self._run(generation)
            finally:
                with self._change:
                    self._running.remove(generation)

    def _next(self, slot: int) -> Generation | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self.is_closed)
            if self.is_closed:
                return None
            generation = self._waiting.popleft()
            generation.slot = slot
            self._running.append(generation)
            return generation

    def _run(self, generation: Generation) -> None:
        problem: Exception | None = None
        try:
            for chunk in generation.stream:
                generation.put(chunk)
            self._on_end(generation, generation.stream.result)
        except Exception as caught:  # its client is told; the next one gets its turn
            problem = caught
        generation.end(generation.stream.result, problem)
