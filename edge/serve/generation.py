"""A generation as the event loop sees it: chunks that the engine's thread puts into a mailbox."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from time import perf_counter
from typing import NamedTuple

from edgespec.decode.generation import Chunk, Result, Stream
from edgespec.log import REQUEST_ID

# Between two wake-ups of the event loop: it shares its cores, and the interpreter's lock, with the
# steps, and sending an event takes 0.4 ms. What a faster model writes meanwhile is sent together.
_PAUSE_S = 1 / 30


class _End(NamedTuple):
    """What comes after the last chunk."""

    result: Result
    problem: Exception | None


class _Stop:
    """What ends a generation early: its reader, or the time it may take.

    Args:
        cancel: the event that its stream was given.
        most_s: from its first token, after which it ends as soon as it has a whole line.
    """

    def __init__(self, cancel: threading.Event, most_s: float | None) -> None:
        self.cancel, self._most_s = cancel, most_s
        self._first_s: float | None = None
        self._has_line = False
        self.ran_out = False  # of time

    def watch(self, text: str, now_s: float) -> None:
        """Look at what was written until now."""
        self._first_s = now_s if self._first_s is None else self._first_s
        self._has_line = self._has_line or "\n" in text
        is_over = self._most_s is not None and now_s - self._first_s >= self._most_s
        if is_over and self._has_line and not self.cancel.is_set():
            self.ran_out = True
            self.cancel.set()


class Generation:
    """One that waits, runs or has ended, and is read by one event loop.

    Args:
        loop: of who reads it.
        stream: of an engine, not yet begun.
        cancel: the event that `stream` was given.
        text: of its prompt, where ids of what was said before are kept; "" elsewhere.
        prompt_ids: ids of the prompt.
        most_s: as of `_Stop`; None is no limit.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: Stream,
        cancel: threading.Event,
        text: str,
        prompt_ids: list[int],
        most_s: float | None = None,
    ) -> None:
        self.stream = stream
        self.text, self.prompt_ids = text, prompt_ids
        self.request_id = REQUEST_ID.get()  # of who asked for it
        self.num_tokens = 0  # so far
        self.slot = 0  # which of those that run at once it is; set when it begins
        self._stop = _Stop(cancel, most_s)
        self._loop = loop
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._end: _End | None = None
        self._woken_s = 0.0

    # -- for the event loop ----------------------------------------------------------------

    def cancel(self) -> None:
        """Stop it after the step under way, or before its first one."""
        self._stop.cancel.set()

    @property
    def ran_out(self) -> bool:
        """Whether its time ended it."""
        return self._stop.ran_out

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
        self.num_tokens += len(chunk.token_ids)
        with self._lock:
            self._chunks.append(chunk)
        now = perf_counter()
        self._stop.watch(chunk.text, now)
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
            self._stop.cancel.set()
