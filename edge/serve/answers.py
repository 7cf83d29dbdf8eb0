"""Requests on their way to an answer, and answers on theirs to a client: whole, or as events.

All that a body costs before its answer is in the queue is bounded here: its bytes, the values that
are made of it, the texts that are tokenized. The plan has that as `requests`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from edgespec.memory.bytes.requests import AT_ONCE, LARGE_BYTES, LARGEST_BYTES
from edgespec.serve.access import CACHE_SALT
from edgespec.serve.parsing import (
    COME_AGAIN,
    EMBEDDINGS_AT_ONCE,
    ApiError,
    Fields,
    ServedModel,
    anthropic_error,
    api_error_of,
    json_bytes,
    openai_error,
    read_json,
)
from edgespec.serve.pool import CHAT, EMBED, Lease, Member, Pool, keep_alive_of
from edgespec.serve.service import AnswerJob, Task

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


_DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"  # which every client skips
_READING_S = 0.5  # between two events that say how much of a prompt was read
_STOP_S = 0.1  # that what is being sent may take to end when the server does
_ANTHROPIC_STATUS = {503: 529}  # of an overloaded server
_CUT = (408, 413, 503)  # answers that may come before the whole body did
_JSON = (b"content-type", b"application/json")
_BODY = {"type": "http.response.body"}
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_LINES = (b"content-type", b"application/x-ndjson")
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy shall not wait for more
]


class Interface(NamedTuple):
    """How requests of a path are answered, in threads.

    `read` takes the fields of a request, and refuses what is wrong in itself. Of what it returns
    `prepare` makes what a loaded model answers: generations, or the document of the answer. `tell`
    is the form of errors, and `fail` that of an event, if another one. Where events are `lines` of
    JSON, there is a stream unless a request says that it wants none.
    """

    kind: str
    read: Callable[[Fields, ServedModel], Any]
    prepare: Callable[[Any, Any, Task], AnswerJob | Any]
    tell: Callable[[ApiError], dict[str, Any]] = openai_error
    fail: Callable[[ApiError], dict[str, Any]] | None = None
    lines: bool = False


class Endpoint(NamedTuple):
    """An application by ASGI, which Starlette tells from a function that handles requests."""

    interface: Interface
    pool: Pool
    admission: Admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Answer(self, scope, receive, send).run()


class Answer:
    """One request: received, checked, given its model, watched, answered.

    All routes that take a document go this way. Whoever closes the connection leaves every queue,
    and what was begun for him ends. A server that stops tells each of them so.

    """

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._interface, self._pool, self._admission = endpoint
        self._underway = self._pool.shared.underway
        self._scope, self._receive, self._send = scope, receive, send
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[ApiError | None] = loop.create_future()  # None: the client left
        self._loop, self._cancel = loop, threading.Event()
        self._lease: Lease | None = None
        self._job: AnswerJob | None = None
        self._document: Any = None
        self._streams, self._has_begun = False, False
        self._began_s = perf_counter()
        self._event = _line if self._interface.lines else _event

    async def run(self) -> None:
        self._underway.add(self)
        work = asyncio.ensure_future(self._work())
        try:
            both: set[asyncio.Future[Any]] = {work, self._over}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._cancel.set()
                self._end_generations()
                work.cancel()
                # A thread may be at work for it, which ends when it can.
                await asyncio.wait({work}, timeout=_STOP_S if self._over.result() else None)
                if (problem := self._over.result()) is not None:
                    await self._fail(problem)
            else:
                work.result()
        finally:
            work.cancel()
            self._underway.discard(self)

    def stop(self) -> None:
        """The server ends: say so to who waits for an answer, or reads one."""
        self._end(ApiError("the server stops", status=503, code="stopping"))

    def _end(self, problem: ApiError | None) -> None:
        if not self._over.done():
            self._over.set_result(problem)

    async def _work(self) -> None:
        watch: asyncio.Future[None] | None = None
        try:
            self._pool.check()
            self._pool.check_queue(self._interface.kind)
            with self._admission.holding() as count:
                kind = self._interface.kind
                body = await self._admission.receive(
                    kind, Request(self._scope, self._receive), count
                )
                watch = asyncio.ensure_future(self._watch())
                await self._prepare(body)
                del body
            await self._tell()
        except ClientDisconnect:
            pass
        except Exception as problem:
            await self._fail(api_error_of(problem))
        finally:
            if watch is not None:
                watch.cancel()
            self._end_generations()
            if self._lease is not None:
                self._lease.release()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(None)

    def _end_generations(self) -> None:
        if self._job is not None and self._lease is not None:
            for generation in self._job.generations:
                self._lease.loaded.executor.cancel(generation)

    # -- from a body to what answers it ----------------------------------------------------

    async def _prepare(self, body: bytearray) -> None:
        kind = self._interface.kind
        encoding = Request(self._scope).headers.get("content-encoding", "")
        most = self._admission.most_bytes(kind)
        # Bytes that it may come to: of a compressed one that is not known before.
        size = len(body) if encoding.strip().lower() in ("", "identity") else most
        read = partial(read_json, body, self._pool.limits, encoding, most)
        async with self._admission.turn(kind, size):
            wanted = await self._admission.run(kind, lambda: self._begin(read()))
        if wanted is None:
            return
        self._lease = await self._waited(*wanted)
        # What was read is read again: a document takes more than its text, and may wait for long.
        async with self._admission.turn(kind, size):
            await self._admission.run(kind, lambda: self._make(read()))

    def _begin(self, document: Any) -> tuple[Member, float | None] | None:
        """Prepare it where its model is ready; else which model, and how long it is kept."""
        wanted = wanted_model(self._pool, document, self._interface.kind)
        self._lease = self._pool.lease_now(*wanted)
        if self._lease is not None:
            self._make(document, wanted)
            return None
        self._read(document, wanted[0])
        self._streams = isinstance(document, dict) and document.get("stream") is True
        return wanted

    def _make(self, document: Any, wanted: tuple[Member, float | None] | None = None) -> None:
        assert self._lease is not None
        wanted = wanted or wanted_model(self._pool, document, self._interface.kind)
        task = Task(self._loop, self._cancel, wanted[0], self._began_s, wanted[1])
        asked = self._read(document, wanted[0])
        made = self._interface.prepare(self._lease.loaded, asked, task)
        if isinstance(made, AnswerJob):
            self._lease.loaded.executor.submit(made.generations)
            self._job, self._streams = made, made.streams
        else:
            self._document = made

    def _read(self, document: Any, member: Member) -> Any:
        """What a request asks for. What nobody took of it is ignored, and the log names it."""
        fields = Fields(document)
        asked = self._interface.read(fields, member.model.setup)
        fields.end()
        return asked

    async def _waited(self, member: Member, keep_alive_s: float | None) -> Lease:
        """The model, when it is loaded; a stream has comments meanwhile, where it may have some."""
        waits = asyncio.ensure_future(self._pool.lease(member, keep_alive_s))
        most_s = None
        try:
            while not waits.done():
                if self._streams and self._interface.kind == CHAT and not self._interface.lines:
                    most_s = self._pool.limits.comment_s
                    await self._send_part(_COMMENT)
                await asyncio.wait({waits}, timeout=most_s)
            return waits.result()
        except BaseException:
            waits.cancel()
            waits.add_done_callback(_give_back)
            raise

    # -- to the client ---------------------------------------------------------------------

    async def _tell(self) -> None:
        if self._job is None:
            is_long = isinstance(self._document, Iterator)
            await (self._pieces if is_long else self._whole)(self._document)
        elif self._job.streams:
            await self._send_part(b"")  # headers go out at once
            async for event in self._events():
                await self._send_part(event)
            await self._send({**_BODY, "body": b""})
        else:
            choices = []
            for index, generation in enumerate(self._job.generations):
                reader = self._job.make_reader()
                async for chunks in generation.batches():
                    reader.read(chunks)
                reader.finish()
                choices.append(self._job.choice(index, reader))
            await self._whole(self._job.serializer.whole(choices))

    async def _whole(self, document: Any) -> None:
        self._has_begun = True
        await send_json(self._send, 200, document)

    async def _pieces(self, pieces: Iterator[bytes]) -> None:
        """A long document, of which a piece at a time is made and sent."""
        await self._start(200, [_JSON])
        for piece in pieces:
            await self._send({**_BODY, "body": piece, "more_body": True})
        await self._send({**_BODY, "body": b""})

    async def _send_part(self, part: bytes) -> None:
        if not self._has_begun:
            kind = _LINES if self._interface.lines else _EVENTS
            await self._start(200, [kind, *_STREAM_HEADERS])
        if part:
            await self._send({**_BODY, "body": part, "more_body": True})

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, problem: ApiError) -> None:
        """Say what failed: as an answer, or as the last event of a stream that has begun."""
        if not self._has_begun:
            await send_error(self._send, problem, self._interface.tell)
        elif self._streams:
            of_answer = self._job and self._job.fail
            fail = of_answer or self._interface.fail or self._interface.tell
            named = self._job is None or self._job.names_events
            await self._send({**_BODY, "body": self._event(fail(problem), named)})

    async def _events(self) -> AsyncIterator[bytes]:
        assert self._job is not None
        serializer, named = self._job.serializer, self._job.names_events
        choices = []

        def told(events: Sequence[dict[str, Any]]) -> bytes:
            return b"".join(self._event(one, named) for one in events)

        for index, generation in enumerate(self._job.generations):
            reader, events = self._job.make_reader(), serializer.begin(index)
            if events:
                yield told(events)
            most_s = _READING_S if serializer.tells_reading else self._pool.limits.comment_s
            async for chunks in generation.batches(most_s):
                if not chunks and serializer.tells_reading:
                    if generation.is_reading:
                        yield told(serializer.reading(generation.reading))
                elif not chunks:  # for so long that a client might give up
                    yield b"" if self._interface.lines else _COMMENT
                elif self._job.writes and (
                    events := serializer.add(index, reader.read(chunks), chunks)
                ):
                    yield told(events)
            rest = reader.finish() if self._job.writes else None
            events = serializer.add(index, rest, ()) if rest else []
            choices.append(self._job.choice(index, reader))
            yield told(events + serializer.end(choices[-1]))
        if last := told(serializer.close(choices)) + (b"" if named else _DONE):
            yield last


_SALT_CHARS = 256
_LATEST = ":latest"  # what clients of Ollama write behind a name without a tag


def wanted_model(pool: Pool, document: Any, kind: str = CHAT) -> tuple[Member, float | None]:
    """The model that a request means, and how long it wants it kept, which is taken out of it.

    So is its `cache_salt`, which from here on is a part of the one that its cells have, and the
    `:latest` of a name that no model has. Raises ApiError, and UnsupportedError for what is no
    time.
    """
    if not isinstance(document, dict):
        return pool.find(None, kind), None
    keep_alive, salt = document.pop("keep_alive", None), document.pop("cache_salt", None)
    if salt is not None:
        if not isinstance(salt, str) or not 0 < len(salt) <= _SALT_CHARS:
            problem = f"cache_salt must be a text of 1 to {_SALT_CHARS} characters"
            raise ApiError(problem, param="cache_salt")
        CACHE_SALT.set(f"{CACHE_SALT.get()}/{salt}")
    keep_alive_s = None if keep_alive is None else keep_alive_of(keep_alive)
    name = document.get("model")
    if isinstance(name, str) and name.endswith(_LATEST) and not pool.has(name):
        document["model"] = name = name.removesuffix(_LATEST)
    return pool.find(name, kind), keep_alive_s


def _give_back(waits: asyncio.Future[Lease]) -> None:
    if not waits.cancelled() and waits.exception() is None:
        waits.result().release()


async def send_error(
    send: Send, error: ApiError, tell: Callable[[ApiError], dict[str, Any]] = openai_error
) -> None:
    """An error object, in the form of an interface."""
    status = _ANTHROPIC_STATUS.get(error.status) if tell is anthropic_error else None
    await send_json(send, status or error.status, tell(error))


async def send_json(send: Send, status: int, document: Any) -> None:
    """A whole response: a document, or the bytes of one."""
    body = document if isinstance(document, bytes) else json_bytes(document)
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    if status in COME_AGAIN:
        headers.append((b"retry-after", b"1"))
    if status in _CUT:  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({**_BODY, "body": body})


def _event(document: dict[str, Any], named: bool) -> bytes:
    head = f"event: {document['type']}\n" if named and "type" in document else ""
    return head.encode() + b"data: " + json_bytes(document) + b"\n\n"


def _line(document: dict[str, Any], _named: bool) -> bytes:
    return json_bytes(document) + b"\n"
