"""Streams for asynchronous code: a thread reads the stream, the event loop waits for its chunks.

A generation computes in C and would hold the loop for as long as a step takes. One thread a stream,
for as long as it runs: what the engine lets run at once, and who waits, is then the same between
tasks as between threads.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

Chunk = TypeVar("Chunk", covariant=True)


class Closable(Protocol[Chunk]):
    """A stream or a turn."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _End:
    """What comes after the last chunk."""

    problem: BaseException | None


async def chunks_of(stream: Closable[Chunk]) -> AsyncGenerator[Chunk, None]:
    """The chunks of `stream`, without blocking the event loop.

    Leaving the iteration early, or cancelling the task, stops the generation after the step under
    way and waits for that; so does closing the event loop, which waits for nothing. Raises what the
    stream raises.
    """
    import asyncio  # costs 40 ms, which commands do not need

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Chunk | _End] = asyncio.Queue()

    def put(item: Chunk | _End) -> bool:
        """False where nobody can wait for it any more: the event loop is closed."""
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:
            if not loop.is_closed():
                raise
            return False
        return True

    def read() -> None:
        problem: BaseException | None = None
        try:
            for chunk in stream:
                if not put(chunk):
                    stream.close()
                    break
        except BaseException as caught:
            problem = caught
        put(_End(problem))

    threading.Thread(target=read, name="edgespec-stream", daemon=True).start()
    end: _End | None = None
    try:
        while end is None:
            item = await queue.get()
            if isinstance(item, _End):
                end = item
            else:
                yield item
    finally:
        if end is None:
            stream.close()
            while not isinstance(await queue.get(), _End):
                pass
    if end.problem is not None:
        raise end.problem
