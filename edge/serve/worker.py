"""The one thread that uses the engine, behind a bounded queue.

Everything in front of it hands over generations and reads their mailboxes. How many of them share a
step is decided here and nowhere else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from edgespec.decode.generation import Result
from edgespec.serve.generation import Generation
from edgespec.serve.refusal import Refusal


class Worker:
    """Runs generations one after the other, in the order in which they came.

    Args:
        most: generations that may wait.
        on_end: told what each generation brought, in the worker's thread, before its reader is.
    """

    def __init__(self, most: int, on_end: Callable[[Generation, Result], None]) -> None:
        self._most = most
        self._on_end = on_end
        self._waiting: deque[Generation] = deque()
        self._running: Generation | None = None
        self._change = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="edgespec-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Generations in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> Generation | None:
        """The one that has the engine."""
        return self._running

    def submit(self, generations: Sequence[Generation]) -> None:
        """Put them at the end of the queue. Raises Refusal where they do not all fit."""
        with self._change:
            if self._is_closed:
                raise Refusal("the server stops", status=503, code="stopping")
            there = len(self._waiting) + (self._running is not None)
            if there + len(generations) > self._most + 1:
                raise Refusal(
                    f"{len(self._waiting)} generations wait and {self._most} may: try again later",
                    status=503,
                    code="queue_full",
                )
            self._waiting += generations
            self._change.notify()

    def cancel(self, generation: Generation) -> None:
        """Stop one after its step, or take it out of the queue."""
        generation.cancel()
        with self._change:
            if generation not in self._waiting:
                return
            self._waiting.remove(generation)
        generation.end(generation.stream.result)

    def close(self) -> None:
        """End all of them and the thread; safe to call twice."""
        with self._change:
            self._is_closed = True
            left = [*self._waiting]
            if self._running is not None:
                self._running.cancel()
            self._change.notify()
        for generation in left:
            self.cancel(generation)
        self._thread.join()

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            self._run(generation)

    def _next(self) -> Generation | None:
        with self._change:
            self._running = None
            self._change.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _run(self, generation: Generation) -> None:
        problem: Exception | None = None
        try:
            for chunk in generation.stream:
                generation.put(chunk)
            self._on_end(generation, generation.stream.result)
        except Exception as caught:  # its client is told; the next one gets its turn
            problem = caught
        generation.end(generation.stream.result, problem)
