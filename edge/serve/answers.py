"""Answers on their way to a client: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from edgespec.decode.generation import Chunk
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.api_error import COME_AGAIN, ApiError, api_error_of, openai_error
from edgespec.serve.parsing import Limits
from edgespec.serve.shapes import Choice, Shape
from edgespec.serve.worker import Generation, Worker

_DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"  # which every client skips
_PROGRESS_S = 0.2  # between two looks at how much was read
_BODY = {"type": "http.response.body"}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy shall not wait for more
]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Generations that have not begun, and how their answers are told."""

    generations: Sequence[Generation]
    shape: Shape
    streams: bool
    make_reader: Callable[[], AnswerReader] = AnswerReader
    names_events: bool = False  # each event has a line with its type; there is no [DONE] then
    tell: Callable[[ApiError], dict[str, Any]] = openai_error  # what failed
    fail: Callable[[ApiError], dict[str, Any]] | None = None  # the same as an event, if another one
    tells_progress: bool = False  # of the prompt


class _NotRead(Exception):
    """The client does not read what it is sent."""


class Answer:
    """The response to a request. A client that goes away ends its generations.

    Args:
        limits: `write_s` is how long a client may take to take what it is sent, and `comment_s`
            how long a stream may be silent.
        release: called when it has ended.
    """

    def __init__(
        self, prepared: Prepared, worker: Worker, limits: Limits, release: Callable[[], None]
    ) -> None:
        self._prepared, self._worker, self._release = prepared, worker, release
        self.has_headers = False  # whether they were sent already
        self._write_s, self._comment_s = limits.write_s, limits.comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, by ASGI."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await (self._stream(send) if self._prepared.streams else self._whole(send))
        finally:
            watch.cancel()
            self._cancel()
            self._release()

    async def _watch(self, receive: Receive) -> None:
        await _left(receive)
        self._cancel()

    def _cancel(self) -> None:
        for generation in self._prepared.generations:
            self._worker.cancel(generation)

    async def _whole(self, send: Send) -> None:
        try:
            choices = [
                await _choice(index, generation, self._prepared.make_reader())
                for index, generation in enumerate(self._prepared.generations)
            ]
            status, document = 200, self._prepared.shape.whole(choices)
        except Exception as problem:
            error = api_error_of(problem)
            status, document = error.status, self._prepared.tell(error)
        await send_json(send, status, document)

    async def _stream(self, send: Send) -> None:
        """Headers go out at once: what fails from then on is an event."""
        if not self.has_headers:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async for event in self._events():
                await self._send(send, event)
        except _NotRead:
            return  # without an end, so that the connection is closed
        except Exception as problem:
            fail = self._prepared.fail or self._prepared.tell
            last = _event(fail(api_error_of(problem)), self._prepared.names_events)
            await send({**_BODY, "body": last, "more_body": True})
        await send({**_BODY, "body": b""})

    async def _send(self, send: Send, event: bytes) -> None:
        """Raises _NotRead where the client takes nothing for too long."""
        with anyio.move_on_after(self._write_s) as patience:
            await send({**_BODY, "body": event, "more_body": True})
        if patience.cancelled_caught:
            raise _NotRead

    async def _events(self) -> AsyncIterator[bytes]:
        shape, named = self._prepared.shape, self._prepared.names_events
        choices = []
        for index, generation in enumerate(self._prepared.generations):
            reader, events = self._prepared.make_reader(), shape.begin(index)
            if events:
                yield _events(events, named)
            progress = _Progress(generation, events) if self._prepared.tells_progress else None
            async for more in self._chunks(generation, progress):
                if isinstance(more, bytes):
                    yield more
                    continue
                delta = reader.read(more)
                if events := shape.add(index, delta, more):
                    yield _events(events, named)
            rest = reader.finish()
            events = shape.add(index, rest, ()) if rest else []
            choices.append(reader.choice(index, generation.result))
            yield _events(events + shape.end(choices[-1]), named)
        if last := _events(shape.close(choices), named) + (b"" if named else _DONE):
            yield last

    async def _chunks(
        self, generation: Generation, progress: _Progress | None
    ) -> AsyncIterator[list[Chunk] | bytes]:
        """Chunks as they come; before the first ones events that say how far the prompt is read.

        A comment comes where nothing did for a while: a client, or a proxy, may give up else.
        """
        most_s = self._comment_s if progress is None else min(_PROGRESS_S, self._comment_s)
        sent_s, has_begun = perf_counter(), False
        async for chunks in generation.batches(most_s):
            told = progress.events() if progress is not None and not has_begun else []
            if told:
                yield _events(told, self._prepared.names_events)
            elif not chunks and perf_counter() - sent_s >= self._comment_s:
                yield _COMMENT
            elif not chunks:
                continue
            if chunks:
                has_begun = True
                yield chunks
            sent_s = perf_counter()


class _Progress:
    """Events that say how much of a prompt was read, as llama.cpp's server tells it.

    Args:
        begun: events that the answer began with, whose last one these look like.
    """

    def __init__(self, generation: Generation, begun: Sequence[dict[str, Any]]) -> None:
        self._generation = generation
        self._begun = begun[-1] if begun else {"index": 0, "content": "", "stop": False}
        self._began_s, self._last = perf_counter(), -1

    def events(self) -> list[dict[str, Any]]:
        """What was read since the last ones; the first one tells what the cache had."""
        num_read, cached = self._generation.stream.num_read
        if not num_read:
            return []
        news = [cached, num_read] if self._last < 0 else [num_read]
        news = [one for one in dict.fromkeys(news) if one != self._last]
        self._last = num_read
        told = {
            "total": len(self._generation.prompt_ids),
            "cache": cached,
            "time_ms": round((perf_counter() - self._began_s) * 1e3),
        }
        return [{**self._begun, "prompt_progress": {**told, "processed": one}} for one in news]


class LoadingAnswer:
    """A stream whose model is loaded first: headers and comment lines are sent meanwhile.

    Args:
        begin: waits for the model and makes the answer.
        tell: what failed, as the last event.
        comment_s: between two comment lines.
    """

    def __init__(
        self,
        begin: Callable[[], Awaitable[Answer]],
        tell: Callable[[ApiError], dict[str, Any]],
        comment_s: float,
    ) -> None:
        self._begin, self._tell, self._comment_s = begin, tell, comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By ASGI. A client that goes away waits no longer."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        waits = asyncio.ensure_future(self._begin())
        leaves = asyncio.ensure_future(_left(receive))
        try:
            while not waits.done():
                await send({**_BODY, "body": _COMMENT, "more_body": True})
                both = {waits, leaves}
                await asyncio.wait(both, timeout=self._comment_s, return_when="FIRST_COMPLETED")
                if leaves.done():
                    return
        finally:
            leaves.cancel()
            if not waits.done():
                waits.cancel()
        try:
            answer = waits.result()
        except Exception as problem:
            failed = _event(self._tell(api_error_of(problem)), named=True)
            await send({**_BODY, "body": failed})
            return
        answer.has_headers = True
        await answer(scope, receive, send)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, document: Any) -> None:
    """A whole response."""
    body = json_bytes(document)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status in COME_AGAIN:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({**_BODY, "body": body})


async def _choice(index: int, generation: Generation, reader: AnswerReader) -> Choice:
    async for chunks in generation.batches():
        reader.read(chunks)
    reader.finish()
    return reader.choice(index, generation.result)


def _events(documents: Sequence[dict[str, Any]], named: bool) -> bytes:
    return b"".join(_event(document, named) for document in documents)


def _event(document: dict[str, Any], named: bool) -> bytes:
    head = f"event: {document['type']}\n" if named and "type" in document else ""
    return head.encode() + b"data: " + json_bytes(document) + b"\n\n"


def json_bytes(document: Any) -> bytes:
    """JSON as it is sent: without needless spaces, of which an event would have 25."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
