"""What is let in: bodies of requests as they come, and how many of them are read at once.

All that a body costs before its answer is in the queue is bounded here: its bytes, the values that
are made of it, the texts that are tokenized. The plan has that as `requests`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TypeVar

import anyio
from starlette.requests import Request

from edgespec.memory.bytes.requests import AT_ONCE, LARGE_BYTES, LARGEST_BYTES
from edgespec.serve.api_error import ApiError, api_error_of
from edgespec.serve.parsing import EMBEDDINGS_AT_ONCE
from edgespec.serve.pool import CHAT, EMBED, Pool

Made = TypeVar("Made")
_THREADS = {CHAT: 8, EMBED: EMBEDDINGS_AT_ONCE}  # that read requests; those of texts wait in theirs


class Admission:
    """Who may send a body, and who may have it read. For one event loop.

    Small bodies are read beside each other. Two large ones are, of each kind of model; what others
    send meanwhile is held up to `limits.held_bodies` times the largest body.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool, self._limits = pool, pool.limits
        self._held = 0  # bytes of large bodies
        self._threads = {kind: anyio.CapacityLimiter(most) for kind, most in _THREADS.items()}
        self._large = {kind: anyio.CapacityLimiter(AT_ONCE) for kind in _THREADS}
        self._largest = {kind: anyio.CapacityLimiter(1) for kind in _THREADS}

    def most_bytes(self, kind: str) -> int:
        """Of a body; those with images may have more."""
        sees = kind == CHAT and self._pool.sees_images
        return self._limits.image_body_bytes if sees else self._limits.body_bytes

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """A call to say how many bytes of a body there are so far, until they are let go.

        It raises ApiError where others hold too many.
        """
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            more = size - counted if size > LARGE_BYTES else 0
            if self._held + more > self._limits.held_bodies * self.most_bytes(CHAT):
                raise ApiError(
                    "other large requests are being read: try again later",
                    status=503,
                    code="too_many_bodies",
                )
            counted += more
            self._held += more

        try:
            yield count
        finally:
            self._held -= counted

    async def receive(self, kind: str, request: Request, count: Callable[[int], None]) -> bytearray:
        """The body of a request to a kind of model.

        Raises ApiError for one that is too large or takes too long, or where `count` does.
        """
        body, most = bytearray(), self.most_bytes(kind)
        with anyio.move_on_after(self._limits.body_s) as patience:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise ApiError(f"the body has more than {most} bytes", status=413)
                count(len(body))
        if patience.cancelled_caught:
            raise ApiError("the body did not come in time", status=408)
        return body

    @asynccontextmanager
    async def turn(self, kind: str, size: int) -> AsyncIterator[None]:
        """While a body of so many bytes is parsed, prepared and tokenized.

        Large ones wait for their turn, and the largest ones for each other.
        """
        kind = kind or CHAT
        async with AsyncExitStack() as taken:
            if size > LARGE_BYTES:
                await taken.enter_async_context(self._large[kind])
            if size > LARGEST_BYTES:
                await taken.enter_async_context(self._largest[kind])
            yield

    async def run(self, kind: str, work: Callable[[], Made]) -> Made:
        """Do it in a thread, when one is free. Raises ApiError, which holds on to nothing of it."""

        def do() -> Made:
            try:
                return work()
            except Exception as problem:
                error = api_error_of(problem)
            error.__cause__ = error.__context__ = None  # whose frames have the document
            raise error.with_traceback(None)

        return await anyio.to_thread.run_sync(do, limiter=self._threads[kind or CHAT])


def most_size(body: bytearray, encoding: str, most: int) -> int:
    """Bytes that a body may come to: of a compressed one that is not known before."""
    return len(body) if encoding.strip().lower() in ("", "identity") else most
