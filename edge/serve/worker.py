"""The threads that read the engine's streams, behind a bounded queue.

Everything in front of them hands over generations and reads their mailboxes. As many run as the
engine takes at once; which of them share a step is the engine's business.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.decode.generation import Chunk, Result
from edgespec.decode.stream import Stream
from edgespec.log import REQUEST_ID
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.api_error import ApiError
from edgespec.serve.shapes import Choice, ReadingProgress, Shape, unwritten

if TYPE_CHECKING:
    from edgespec.serve.pool import Member

# Between two wake-ups of the event loop: it shares its cores, and the interpreter's lock, with the
# steps, and sending an event takes 0.4 ms. What a faster model writes meanwhile is sent together.
_PAUSE_S = 1 / 30


class _End(NamedTuple):
    """What comes after the last chunk."""

    result: Result
    problem: Exception | None


class Generation:
    """One that waits, runs or has ended, and is read by one event loop.

    Args:
        loop: of who reads it.
        stream: of an engine, not yet begun.
        cancel: the event that `stream` was given.
        text: of its prompt, where ids of what was said before are kept; "" elsewhere.
        prompt_ids: ids of the prompt.
        most_s: from its first token, after which it ends with the line; None is no limit.
        salt: of what may know its ids.
        yields: it runs only while nobody else waits, and ends where somebody comes, or another
            one that yields, which knows more of what is typed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: Stream,
        cancel: threading.Event,
        text: str,
        prompt_ids: list[int],
        most_s: float | None = None,
        salt: str = "",
        *,
        yields: bool = False,
    ) -> None:
        self.stream = stream
        self.text, self.prompt_ids, self.salt = text, prompt_ids, salt
        self.request_id = REQUEST_ID.get()  # of who asked for it
        self.ran_out = False  # of time, which ended it
        self.yields = yields
        self._cancel, self._most_s = cancel, most_s
        self._first_s: float | None = None
        self._asked_s = perf_counter()
        self._has_line = False
        self._loop = loop
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._end: _End | None = None
        self._woken_s = 0.0

    # -- for the event loop ----------------------------------------------------------------

    def cancel(self) -> None:
        """Stop it after the step under way, or before its first one."""
        self._cancel.set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._end is not None

    @property
    def is_reading(self) -> bool:
        """Whether its first token has not come."""
        return self._first_s is None

    @property
    def reading(self) -> ReadingProgress:
        """How much of its prompt was read, since it was asked for."""
        processed, cache = self.stream.num_read
        time_ms = round(1e3 * (perf_counter() - self._asked_s))
        return ReadingProgress(len(self.prompt_ids), cache, processed, time_ms)

    @property
    def result(self) -> Result:
        """What was generated; only when `batches` has ended."""
        assert self._end is not None
        return self._end.result

    async def batches(self, most_s: float | None = None) -> AsyncIterator[list[Chunk]]:
        """Chunks as they come, those of one moment together. Raises what the engine raised.

        Args:
            most_s: seconds without any, after which an empty list comes; None waits.
        """
        while True:
            try:
                await asyncio.wait_for(self._news.wait(), most_s)
            except asyncio.TimeoutError:
                yield []
                continue
            self._news.clear()
            with self._lock:
                chunks, self._chunks = self._chunks, []
                end = self._end
            if chunks:
                yield chunks
            if end is not None:
                break
        if end.problem is not None:
            raise end.problem

    async def ended(self) -> Result:
        """Wait for its end. Raises as `batches`."""
        async for _ in self.batches():
            pass
        return self.result

    # -- for the engine's thread -----------------------------------------------------------

    def put(self, chunk: Chunk) -> None:
        """Hand over a chunk; never waits for who reads it."""
        with self._lock:
            self._chunks.append(chunk)
        now = perf_counter()
        self._first_s = now if self._first_s is None else self._first_s
        self._has_line = self._has_line or "\n" in chunk.text
        is_over = self._most_s is not None and now - self._first_s >= self._most_s
        if is_over and self._has_line and not self._cancel.is_set():
            self.ran_out = True
            self._cancel.set()
        if now - self._woken_s >= _PAUSE_S:
            self._woken_s = now
            self._wake()

    def end(self, result: Result, problem: Exception | None = None) -> None:
        """Nothing more comes."""
        with self._lock:
            self._end = _End(result, problem)
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            if not self._loop.is_closed():
                raise
            self._cancel.set()


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
            threading.Thread(target=self._work, name="edgespec-engine", daemon=True)
            for _ in range(users)
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

    @property
    def is_full(self) -> bool:
        """Whether no more may come."""
        return len(self._waiting) + len(self._running) >= self._most + self._users

    def submit(self, generations: Sequence[Generation]) -> None:
        """Put them at the end of the queue. Raises ApiError where they do not all fit."""
        with self._change:
            if self.is_closed:
                raise ApiError("the server stops", status=503, code="stopping")
            there = len(self._waiting) + len(self._running)
            if there + len(generations) > self._most + self._users:
                raise ApiError(
                    f"the queue is full ({len(self._waiting)} wait): try again in a second",
                    status=429,
                    code="queue_full",
                )
            others = [*self._running, *self._waiting]
            if all(one.yields for one in generations) and not all(one.yields for one in others):
                left = generations
            else:
                left = [one for one in others if one.yields]
                self._waiting += generations
            self._change.notify_all()
        for one in left:
            self.cancel(one)

    def cancel(self, generation: Generation) -> None:
        """Stop one after its step, or take it out of the queue."""
        generation.cancel()
        with self._change:
            if generation in self._running:
                return
            if generation in self._waiting:
                self._waiting.remove(generation)
        if not generation.has_ended:
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

    def _work(self) -> None:
        while (generation := self._next()) is not None:
            try:
                self._run(generation)
            finally:
                with self._change:
                    self._running.remove(generation)

    def _next(self) -> Generation | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self.is_closed)
            if self.is_closed:
                return None
            generation = self._waiting.popleft()
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """Generations that have not begun, and how their answers are told."""

    generations: Sequence[Generation]
    shape: Shape
    streams: bool
    make_reader: Callable[[], AnswerReader] = AnswerReader
    names_events: bool = False  # each event has a line with its type; there is no [DONE] then
    fail: Callable[[ApiError], dict[str, Any]] | None = None  # what failed, as an event of its own
    writes: bool = True  # else the prompts are read, and nothing is told of what would be written

    def choice(self, index: int, reader: AnswerReader) -> Choice:
        """The answer of a generation that has ended."""
        generation = self.generations[index]
        found = reader.choice(index, generation.result)
        return found if self.writes else unwritten(found, may_be_cut=generation.yields)


class Task(NamedTuple):
    """Whose request is prepared: the loop that reads its answer, and an event when it leaves.

    `began_s` is when it came, by `perf_counter`; `keep_alive_s` how long it wants the model kept.
    """

    loop: asyncio.AbstractEventLoop
    cancel: threading.Event
    member: Member
    began_s: float
    keep_alive_s: float | None
