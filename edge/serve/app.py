"""The ASGI application: what answers a path, requests and answers on their ways.

All that a body costs before its answer is in the queue is bounded here: its bytes, the values that
are made of it, the texts that are tokenized. The plan has that as `requests`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.decode.generation import ToolCall
from edgespec.memory.bytes.requests import AT_ONCE, LARGE_BYTES, LARGEST_BYTES
from edgespec.serve import (
    chat,
    completions,
    embeddings,
    llama_server,
    messages,
    ollama,
    parsing,
    responses,
    status,
)
from edgespec.serve.access import CACHE_SALT, AuthSettings
from edgespec.serve.middleware import BODY, JSON, AuthMiddleware, send_error, send_json
from edgespec.serve.page import HEADERS as PAGE_HEADERS
from edgespec.serve.page import page_files
from edgespec.serve.parsing import OLLAMA, ApiError, Fields, ServedModel, api_error_of, error_form
from edgespec.serve.pool import ANY, CHAT, EMBED, Lease, Member, Pool, keep_alive_of
from edgespec.serve.serializers import json_bytes
from edgespec.serve.service import AnswerJob, Underway

# -- requests and answers ------------------------------------------------------------------


Made = TypeVar("Made")
# That read requests; those of texts wait in theirs.
_THREADS = {CHAT: 8, EMBED: parsing.EMBEDDINGS_AT_ONCE}


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
        large = self._large[kind] if size > LARGE_BYTES else nullcontext()
        largest = self._largest[kind] if size > LARGEST_BYTES else nullcontext()
        async with large, largest:
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


Read = Callable[[Fields, ServedModel], Any]
Prepare = Callable[[Any, Any, Underway], Any]
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"  # which every client skips
_READING_S = 0.5  # between two events that say how much of a prompt was read
_STOP_S = 0.1  # that what is being sent may take to end when the server does
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_LINES = (b"content-type", b"application/x-ndjson")
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy shall not wait for more
]


class Endpoint(NamedTuple):
    """How requests of a path are answered, in threads: an application by ASGI.

    `read` takes the fields of a request, and refuses what is wrong in itself. Of what it returns
    `prepare` makes what a loaded model answers: generations, or the document of the answer.
    """

    path: str
    pool: Pool
    admission: Admission
    kind: str
    read: Read
    prepare: Prepare

    @property
    def lines(self) -> bool:
        """Events are lines of JSON, and there is a stream unless a request wants none."""
        return self.path.startswith(OLLAMA)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Answer(self, scope, receive, send).run()


class Answer(Underway):
    """One request: received, checked, given its model, watched, answered.

    All routes that take a document go this way. Whoever closes the connection leaves every queue,
    and what was begun for him ends. A server that stops tells each of them so.
    """

    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._endpoint, self._pool, self._admission = endpoint, endpoint.pool, endpoint.admission
        self._underway = self._pool.shared.underway
        self._scope, self._receive, self._send = scope, receive, send
        super().__init__()
        self._over: asyncio.Future[ApiError | None] = self.loop.create_future()  # None: it left
        self._lease: Lease | None = None
        self._job: AnswerJob | None = None
        self._document: Any = None
        self._streams, self._has_begun = False, False
        self._event = _line if self._endpoint.lines else _event

    async def run(self) -> None:
        self._underway.add(self)
        work = asyncio.ensure_future(self._work())
        try:
            both: set[asyncio.Future[Any]] = {work, self._over}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.cancel.set()
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
            self._pool.check_queue(self._endpoint.kind)
            with self._admission.holding() as count:
                kind = self._endpoint.kind
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
        kind = self._endpoint.kind
        encoding = Request(self._scope).headers.get("content-encoding", "")
        most = self._admission.most_bytes(kind)
        # Bytes that it may come to: of a compressed one that is not known before.
        size = len(body) if encoding.strip().lower() in ("", "identity") else most
        read = partial(parsing.read_json, body, self._pool.limits, encoding, most)
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
        wanted = wanted_model(self._pool, document, self._endpoint.kind)
        self._lease = self._pool.lease_now(*wanted)
        if self._lease is not None:
            self._make(document, wanted)
            return None
        self._read(document, wanted[0])
        self._streams = isinstance(document, dict) and document.get("stream") is True
        return wanted

    def _make(self, document: Any, wanted: tuple[Member, float | None] | None = None) -> None:
        assert self._lease is not None
        wanted = wanted or wanted_model(self._pool, document, self._endpoint.kind)
        self.member, self.keep_alive_s = wanted
        asked = self._read(document, self.member)
        made = self._endpoint.prepare(self._lease.loaded, asked, self)
        if isinstance(made, AnswerJob):
            self._lease.loaded.executor.submit(made.generations)
            self._job, self._streams = made, made.streams
        else:
            self._document = made

    def _read(self, document: Any, member: Member) -> Any:
        """What a request asks for. What nobody took of it is ignored, and the log names it."""
        fields = Fields(document)
        fields.ignore("model")  # by which it was found
        asked = self._endpoint.read(fields, member.model.setup)
        fields.end()
        return asked

    async def _waited(self, member: Member, keep_alive_s: float | None) -> Lease:
        """The model, when it is loaded; a stream has comments meanwhile, where it may have some."""
        waits = asyncio.ensure_future(self._pool.lease(member, keep_alive_s))
        most_s = None
        try:
            while not waits.done():
                if self._streams and self._endpoint.kind == CHAT and not self._endpoint.lines:
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
            await self._send({**BODY, "body": b""})
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
        await self._start(200, [JSON])
        for piece in pieces:
            await self._send({**BODY, "body": piece, "more_body": True})
        await self._send({**BODY, "body": b""})

    async def _send_part(self, part: bytes) -> None:
        if not self._has_begun:
            kind = _LINES if self._endpoint.lines else _EVENTS
            await self._start(200, [kind, *_STREAM_HEADERS])
        if part:
            await self._send({**BODY, "body": part, "more_body": True})

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, problem: ApiError) -> None:
        """Say what failed: as an answer, or as the last event of a stream that has begun."""
        path = self._endpoint.path
        if not self._has_begun:
            await send_error(self._send, problem, error_form(path))
        elif self._streams:
            told = self._job and self._job.serializer.failed(problem)
            told = told or _FAILING.get(path, error_form(path))(problem)
            named = self._job is None or self._job.serializer.names_events
            await self._send({**BODY, "body": self._event(told, named)})

    async def _events(self) -> AsyncIterator[bytes]:
        assert self._job is not None
        serializer, choices = self._job.serializer, []
        named = serializer.names_events

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
                    yield b"" if self._endpoint.lines else _COMMENT
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


def wanted_model(pool: Pool, document: Any, kind: str = CHAT) -> tuple[Member, float | None]:
    """The model that a request means, and how long it wants it kept, which is taken out of it.

    So is its `cache_salt`, which from here on is a part of the one that its cells have. Raises
    ApiError, and UnsupportedError for what is no time.
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
    return pool.find(document.get("model"), kind), keep_alive_s


def _give_back(waits: asyncio.Future[Lease]) -> None:
    if not waits.cancelled() and waits.exception() is None:
        waits.result().release()


def _event(document: dict[str, Any], named: bool) -> bytes:
    head = f"event: {document['type']}\n" if named and "type" in document else ""
    return head.encode() + b"data: " + json_bytes(document) + b"\n\n"


def _line(document: dict[str, Any], _named: bool) -> bytes:
    return json_bytes(document) + b"\n"


# -- routes --------------------------------------------------------------------------------


Handler = Callable[[Request], Awaitable[Response]]


# What takes a document. Each path is also there without /v1, but for those of Ollama's interface,
# whose streams are lines.
_ASKED: dict[str, tuple[str, Read, Prepare]] = {
    "/v1/chat/completions": (CHAT, chat.read_chat, chat.prepare_chat),
    "/v1/completions": (CHAT, completions.read_completion, completions.prepare_completion),
    "/v1/responses": (CHAT, responses.read_response, responses.prepare_response),
    "/v1/messages": (CHAT, messages.read_messages, messages.prepare_message),
    "/completion": (CHAT, llama_server.read_llama, llama_server.prepare_llama),
    "/infill": (CHAT, llama_server.read_infill, llama_server.prepare_infill),
    "/tokenize": (CHAT, llama_server.read_text, llama_server.tokenize),
    "/detokenize": (CHAT, llama_server.read_ids, llama_server.detokenize),
    "/apply-template": (CHAT, chat.read_template, chat.apply_template),
    "/v1/messages/count_tokens": (CHAT, messages.read_counted, chat.count_chat),
    "/v1/chat/completions/input_tokens": (CHAT, chat.read_chat, chat.count_chat),
    "/v1/responses/input_tokens": (CHAT, responses.read_response, responses.count_response),
    "/api/chat": (CHAT, ollama.read_talk, partial(ollama.prepare, is_chat=True)),
    "/api/generate": (CHAT, ollama.read_prompt, partial(ollama.prepare, is_chat=False)),
    "/api/embed": (EMBED, ollama.read_embed, ollama.embed),
    "/api/embeddings": (EMBED, ollama.read_embed, ollama.embed),
    "/v1/embeddings": (EMBED, embeddings.read_embeddings, embeddings.embeddings),
    "/v1/rerank": (EMBED, embeddings.read_rerank, embeddings.rerank),
}
# What fails before there is an answer, as an event, where it is another one.
_FAILING: dict[str, Callable[[ApiError], dict[str, Any]]] = {
    "/v1/responses": lambda problem: responses.ResponsesSerializer("", {}).failed(problem)
}
# What is told at once, from the models that there are.
_TELLING: dict[str, Callable[[Pool, Member], Any]] = {
    "/props": status.props,
    "/status": status.status,
    "/lora-adapters": status.adapters,
    "/metrics": status.metrics,
    "/api/version": ollama.versions,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.running,
}


_CALLS_AT_ONCE = 8  # of tools, each of which has a thread
_ANTHROPIC_HEADER = "anthropic-version"  # which all of its clients send


def make_app(pool: Pool, access: AuthSettings | None = None) -> ASGIApp:
    """The application of some models, which it closes when it is shut down."""

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        await anyio.sleep(0)  # it imports its half for asyncio now, not within the first request
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(pool.close)

    routes = Router(Routes(pool).all(), lifespan=lifespan)
    return AuthMiddleware(routes, access or AuthSettings(), pool.shared)


class Routes:
    """Everything that is answered."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._shared, self._admission = pool, pool.shared, Admission(pool)
        self._calls = anyio.CapacityLimiter(_CALLS_AT_ONCE)

    def all(self) -> list[Route]:
        handlers: list[tuple[str, str, Any]] = [
            ("/health", "GET", self._health),
            ("/v1/models", "GET", self._models),
            ("/v1/models/unload", "POST", self._unload_model),
            ("/api/show", "POST", self._show),
            ("/lora-adapters", "POST", self._adapt),
            ("/tools", "GET", self._tools),
            ("/tools", "POST", self._call_tool),
            ("/v1/models/{name:path}", "GET", self._model),
        ]
        handlers += [(path, "GET", self._told(tell)) for path, tell in _TELLING.items()]
        for path, (kind, content) in page_files().items():
            handlers.append((path, "GET", Response(content, media_type=kind, headers=PAGE_HEADERS)))
        asked = {**_ASKED, "/v1/models/load": (ANY, lambda fields, _: fields.take(), self._loaded)}
        for path, how in asked.items():
            handlers.append((path, "POST", Endpoint(path, self._pool, self._admission, *how)))
        return [
            Route(one, handler, methods=[method])
            for path, method, handler in handlers
            for one in _places(path)
        ]

    async def _health(self, _request: Request) -> Response:
        self._pool.check()
        return JSONResponse({"status": "ok"})

    def _told(self, tell: Callable[[Pool, Member], Any]) -> Handler:
        async def handle(request: Request) -> Response:
            member = self._pool.find(request.query_params.get("model"), ANY)
            found = tell(self._pool, member)
            return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

        return handle

    # -- models ----------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        cards = [self._told_card(request, one) for one in self._pool.members]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        more = ends if _ANTHROPIC_HEADER in request.headers else {"object": "list"}
        return JSONResponse({"data": cards, **more})

    async def _model(self, request: Request) -> Response:
        member = self._pool.find(request.path_params["name"], ANY)
        return JSONResponse(self._told_card(request, member))

    def _told_card(self, request: Request, member: Member) -> dict[str, Any]:
        """A model, in Anthropic's form for its clients."""
        card = self._card(member)
        if _ANTHROPIC_HEADER not in request.headers:
            return card
        created = datetime.fromtimestamp(self._shared.started_s, timezone.utc).isoformat()
        return {**card, "type": "model", "display_name": member.name, "created_at": created}

    def _card(self, member: Member) -> dict[str, Any]:
        told = {"object": "model", "created": self._shared.started_s, "owned_by": "edgespec"}
        return {"id": member.name, **told, **member.card}

    def _loaded(self, _loaded: Any, _asked: Any, request: Underway) -> dict[str, Any]:
        return {"success": True, **self._card(request.member)}

    async def _adapt(self, request: Request) -> Response:
        """Scales of a model's adapters for requests that say none, from now on."""
        _, values = await self._named(request)
        member = self._pool.find(request.query_params.get("model"), CHAT)
        count = len(status.adapters(self._pool, member))
        given = {"body": values if isinstance(values, list) else [values]}
        found = parsing.scales_of(Fields(given), "body")
        if unknown := [one for one in found if one >= count]:
            raise ApiError(f"there is no adapter {unknown[0]} of {count}", param="id")
        member.loaded.lora = found
        return JSONResponse({"success": True})

    async def _tools(self, _request: Request) -> Response:
        """The tools of MCP servers, and the names of those that need no asking."""
        if (tools := self._shared.tools) is None:
            return JSONResponse({"tools": [], "allowed": []})
        return JSONResponse({"tools": tools.tools, "allowed": sorted(tools.allowed)})

    async def _call_tool(self, request: Request) -> Response:
        """The result of a call that a person has agreed to, as OpenAI's interface names it."""
        member, document = await self._named(request)
        fields = Fields(document)
        fields.ignore("model")
        name, arguments = fields.text("name"), fields.text("arguments", "{}")
        fields.end()
        if (tools := self._shared.tools) is None:
            raise ApiError("there are no tools here (--mcp)", status=404, param="name")
        size = member.model.about["context_length"] or 0
        result = partial(tools.result, ToolCall("", name, arguments), size)
        content = await anyio.to_thread.run_sync(result, limiter=self._calls)
        return JSONResponse({"content": content})

    async def _named(self, request: Request) -> tuple[Member, Any]:
        """The model that a request's document names, and that document."""
        with self._admission.holding() as count:
            body = await self._admission.receive(ANY, request, count)
            read = partial(parsing.read_json, body, self._pool.limits)
            document = await self._admission.run(ANY, read)
        return wanted_model(self._pool, document, ANY)[0], document

    async def _show(self, request: Request) -> Response:
        return JSONResponse(ollama.show(self._pool, *await self._named(request)))

    async def _unload_model(self, request: Request) -> Response:
        member, _ = await self._named(request)
        await self._pool.unload(member)
        return JSONResponse({"success": True, **self._card(member)})


def _places(path: str) -> set[str]:
    """A path with /v1 and without it; the page's files and Ollama's paths have one place."""
    short = path.removeprefix("/v1")
    return {path} if path in page_files() or path.startswith(OLLAMA) else {short, f"/v1{short}"}
