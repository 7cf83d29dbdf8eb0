"""Answers on their way to a client: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from edgespec.serve.answer_text import AnswerText, PlainReader, Reader
from edgespec.serve.generation import Generation
from edgespec.serve.refusal import COME_AGAIN, Refusal, openai_error, refusal_of
from edgespec.serve.shapes import Choice, Shape
from edgespec.serve.worker import Worker

_DONE = b"data: [DONE]\n\n"
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
    make_reader: Callable[[], Reader] = PlainReader
    names_events: bool = False  # each event has a line with its type; there is no [DONE] then
    tell: Callable[[Refusal], dict[str, Any]] = openai_error  # what failed


class _NotRead(Exception):
    """The client does not read what it is sent."""


class Answer:
    """The response to a request. A client that goes away ends its generations.

    Args:
        write_s: seconds within which a client has to take what it is sent.
    """

    def __init__(self, prepared: Prepared, worker: Worker, write_s: float) -> None:
        self._prepared, self._worker, self._write_s = prepared, worker, write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, by ASGI."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await (self._stream(send) if self._prepared.streams else self._whole(send))
        finally:
            watch.cancel()
            self._cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        for generation in self._prepared.generations:
            self._worker.cancel(generation)

    async def _whole(self, send: Send) -> None:
        try:
            choices = [
                await _choice(generation, AnswerText(index, self._prepared.make_reader()))
                for index, generation in enumerate(self._prepared.generations)
            ]
            status, document = 200, self._prepared.shape.whole(choices)
        except Exception as problem:
            refusal = refusal_of(problem)
            status, document = refusal.status, self._prepared.tell(refusal)
        await send_json(send, status, document)

    async def _stream(self, send: Send) -> None:
        """The first event waits for the first token, so that what fails before has its status."""
        has_begun = False
        try:
            async for event in self._events():
                if not has_begun:
                    start = {"type": "http.response.start", "status": 200}
                    await send({**start, "headers": _STREAM_HEADERS})
                    has_begun = True
                await self._send(send, event)
        except _NotRead:
            return  # without an end, so that the connection is closed
        except Exception as problem:
            refusal = refusal_of(problem)
            if not has_begun:
                await send_json(send, refusal.status, self._prepared.tell(refusal))
                return
            last = _event(self._prepared.tell(refusal), self._prepared.names_events)
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
            text, events = AnswerText(index, self._prepared.make_reader()), shape.begin(index)
            async for chunks in generation.batches():
                delta = text.push("".join(chunk.text for chunk in chunks))
                events += shape.add(index, delta, chunks)
                if events:
                    yield _events(events, named)
                events = []
            if rest := text.finish():
                events += shape.add(index, rest, ())
            choices.append(text.choice(generation.result))
            yield _events(events + shape.end(choices[-1]), named)
        if last := _events(shape.close(choices), named) + (b"" if named else _DONE):
            yield last


async def send_json(send: Send, status: int, document: Any) -> None:
    """A whole response."""
    body = json.dumps(document, ensure_ascii=False).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status in COME_AGAIN:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({**_BODY, "body": body})


async def _choice(generation: Generation, text: AnswerText) -> Choice:
    async for chunks in generation.batches():
        text.push("".join(chunk.text for chunk in chunks))
    text.finish()
    return text.choice(generation.result)


def _events(documents: Sequence[dict[str, Any]], named: bool) -> bytes:
    return b"".join(_event(document, named) for document in documents)


def _event(document: dict[str, Any], named: bool) -> bytes:
    head = f"event: {document['type']}\n" if named and "type" in document else ""
    return f"{head}data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()
