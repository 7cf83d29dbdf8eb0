"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeAlias

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.serve.access import HISTORY, Access
from edgespec.serve.answers import Answer, LoadingAnswer, Prepared
from edgespec.serve.api_error import (
    COME_AGAIN,
    ApiError,
    anthropic_error,
    api_error_of,
    openai_error,
)
from edgespec.serve.embeddings import embeddings, rerank
from edgespec.serve.guard import Guard
from edgespec.serve.parsing import LargeBodies, read_json
from edgespec.serve.pool import ANY, CHAT, EMBED, Lease, Member, Pool, keep_alive_of
from edgespec.serve.prepare import (
    apply_template,
    count_chat,
    count_message,
    detokenize,
    prepare_chat,
    prepare_completion,
    prepare_infill,
    prepare_llama,
    prepare_message,
    prepare_response,
    tokenize,
)
from edgespec.serve.service import Service, Shared, metrics, props, slots, status

Prepare = Callable[[Service, Any, asyncio.AbstractEventLoop], Prepared]
Handler = Callable[[Request], Awaitable[Response | ASGIApp]]
Found: TypeAlias = "list[tuple[str, str, Handler]]"  # path, method, and what answers

# What is answered by generating. Each path is also there without /v1.
_GENERATING: dict[str, Prepare] = {
    "/v1/chat/completions": prepare_chat,
    "/v1/completions": prepare_completion,
    "/v1/responses": prepare_response,
    "/v1/messages": prepare_message,
    "/completion": prepare_llama,
    "/infill": prepare_infill,
}
# What is answered at once: from the models that there are, and from the document of a request.
_TELLING: dict[str, Callable[[Pool, Shared, Member], Any]] = {
    "/props": props,
    "/slots": slots,
    "/status": status,
    "/metrics": metrics,
}
_ANSWERING: dict[str, Callable[[Service, Any], Any]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/messages/count_tokens": count_message,
    "/v1/chat/completions/input_tokens": count_chat,
}
_EMBEDDING: dict[str, Callable[[Any, Any], Any]] = {
    "/v1/embeddings": embeddings,
    "/v1/rerank": rerank,
}
_ANTHROPIC = "/v1/messages"  # below it errors have that interface's form


def make_app(pool: Pool, shared: Shared, access: Access | None = None) -> ASGIApp:
    """The application of some models, which it closes when it is shut down."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(pool.close)

    routes = [
        Route(one, _answered(handler, path), methods=[method])
        for path, method, handler in Routes(pool, shared).all()
        for one in _places(path)
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(Exception, _failed)
    return Guard(app, access or Access(), shared.totals.add_status)


class Routes:
    """Everything that is answered."""

    def __init__(self, pool: Pool, shared: Shared) -> None:
        self._pool, self._shared = pool, shared
        self._large = LargeBodies(shared.limits)

    def all(self) -> Found:
        """The routes of the application."""
        found: Found = [
            ("/health", "GET", self._health),
            ("/v1/models", "GET", self._models),
            ("/v1/models/load", "POST", self._load_model),
            ("/v1/models/unload", "POST", self._unload_model),
            ("/v1/models/{name:path}", "GET", self._model),
            ("/", "GET", self._page),
            ("/v1/responses/{name}", "GET", self._kept_response),
            ("/v1/responses/{name}", "DELETE", self._forget_response),
        ]
        found += [(path, "GET", self._told(tell)) for path, tell in _TELLING.items()]
        found += [(path, "POST", self._asked(answer)) for path, answer in _ANSWERING.items()]
        found += [(path, "POST", self._asked(how, EMBED)) for path, how in _EMBEDDING.items()]
        found += [(path, "POST", self._generating(path, how)) for path, how in _GENERATING.items()]
        return found

    async def _health(self, _request: Request) -> Response:
        self._pool.check()
        return JSONResponse({"status": "ok"})

    async def _page(self, _request: Request) -> Response:
        return Response(page(), media_type="text/html", headers=PAGE_HEADERS)

    async def _kept_response(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._shared.responses.document(HISTORY.get(), name))

    async def _forget_response(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._shared.responses.remove(HISTORY.get(), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def _told(self, tell: Callable[[Pool, Shared, Member], Any]) -> Handler:
        async def handle(request: Request) -> Response:
            member = self._pool.find(request.query_params.get("model"), ANY)
            found = tell(self._pool, self._shared, member)
            return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

        return handle

    # -- models ----------------------------------------------------------------------------

    async def _models(self, _request: Request) -> Response:
        cards = [self._card(one) for one in self._pool.members]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = [one for one in self._pool.members if name in one.model.names]
        if not found:
            names = ", ".join(one.name for one in self._pool.members)
            raise ApiError(
                f"there is no such model here, only {names}", status=404, code="model_not_found"
            )
        return JSONResponse(self._card(found[0]))

    def _card(self, member: Member) -> dict[str, Any]:
        told = {"object": "model", "created": self._shared.started_s, "owned_by": "edgespec"}
        return {"id": member.name, **told, **member.card}

    async def _load_model(self, request: Request) -> Response:
        read = await reader_of(request, self._pool)
        member, keep_alive_s = _take_model(self._pool, await anyio.to_thread.run_sync(read), ANY)
        (await self._pool.lease(member, keep_alive_s)).release()
        return JSONResponse({"success": True, **self._card(member)})

    async def _unload_model(self, request: Request) -> Response:
        read = await reader_of(request, self._pool)
        member, _ = _take_model(self._pool, await anyio.to_thread.run_sync(read), ANY)
        await self._pool.unload(member)
        return JSONResponse({"success": True, **self._card(member)})

    # -- requests to one of them -----------------------------------------------------------

    def _asked(self, answer: Callable[[Any, Any], Any], kind: str = CHAT) -> Handler:
        async def handle(request: Request) -> Response:
            with self._large.admits() as check:
                read = await reader_of(request, self._pool, check)
                document = await anyio.to_thread.run_sync(read)
                lease = await self._pool.lease(*_take_model(self._pool, document, kind))
                try:
                    found = await anyio.to_thread.run_sync(lambda: answer(lease.loaded, document))
                finally:
                    lease.release()
            return JSONResponse(found)

        return handle

    def _generating(self, path: str, prepare: Prepare) -> Handler:
        tell = _teller(path)

        async def handle(request: Request) -> ASGIApp:
            with self._large.admits() as check:
                return await handle_body(await reader_of(request, self._pool, check))

        async def handle_body(read: Callable[[], Any]) -> ASGIApp:
            loop = asyncio.get_running_loop()

            def begun(lease: Lease, document: Any) -> Answer:
                service: Service = lease.loaded
                try:
                    prepared = prepare(service, document, loop)
                    service.worker.submit(prepared.generations)
                except BaseException:
                    lease.release()
                    raise
                return Answer(prepared, service.worker, service.limits, lease.release)

            def begin() -> tuple[Answer | None, Any]:
                document = read()
                wanted = _take_model(self._pool, document)
                lease = self._pool.lease_now(*wanted)
                return (None, (wanted, document)) if lease is None else (begun(lease, document), ())

            answer, rest = await anyio.to_thread.run_sync(begin)
            if answer is not None:
                return answer
            wanted, document = rest

            async def loaded() -> Answer:
                lease = await self._pool.lease(*wanted)
                return await anyio.to_thread.run_sync(begun, lease, document)

            if document.get("stream") is True:
                return LoadingAnswer(loaded, tell, self._shared.limits.comment_s)
            return await loaded()

        return handle


def _take_model(pool: Pool, document: Any, kind: str = CHAT) -> tuple[Member, float | None]:
    """The model that a request means, and how long it wants it kept, which is taken out of it.

    Raises ApiError, and UnsupportedError for what is no time.
    """
    if not isinstance(document, dict):
        return pool.find(None, kind), None
    keep_alive = document.pop("keep_alive", None)
    keep_alive_s = None if keep_alive is None else keep_alive_of(keep_alive)
    return pool.find(document.get("model"), kind), keep_alive_s


def _places(path: str) -> set[str]:
    """A path with /v1 and without it; the page has one place."""
    short = path.removeprefix("/v1")
    return {path} if path == "/" else {short, f"/v1{short}"}


async def reader_of(
    request: Request, pool: Pool, admit: Callable[[int], None] | None = None
) -> Callable[[], Any]:
    """Receive the body of a request; what is returned makes a document of it, in any thread.

    `admit` is asked for one that is larger, where a model sees images. Raises ApiError where none
    is answered, and for a body that is too large or takes too long.
    """
    pool.check()
    limits, body = pool.limits, bytearray()
    sees = admit is not None and pool.sees_images
    most = limits.image_body_bytes if sees else limits.body_bytes
    with anyio.move_on_after(limits.body_s) as patience:
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise ApiError(f"the body has more than {most} bytes", status=413)
            if admit is not None:
                admit(len(body))
    if patience.cancelled_caught:
        raise ApiError("the body did not come in time", status=408)
    encoding = request.headers.get("content-encoding", "")
    return lambda: read_json(body, limits, encoding, most)


def _answered(handler: Handler, path: str) -> ASGIApp:
    """A route's application: what fails becomes an error object."""
    tell = _teller(path)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response | ASGIApp = await handler(Request(scope, receive))
        except ClientDisconnect:
            return
        except Exception as problem:
            response = error_response(api_error_of(problem), tell)
        await response(scope, receive, send)

    return _Endpoint(app)


def _teller(path: str) -> Callable[[ApiError], dict[str, Any]]:
    return anthropic_error if path.startswith(_ANTHROPIC) else openai_error


class _Endpoint:
    """Starlette takes a function for a handler of requests, and an object for an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def error_response(
    error: ApiError, tell: Callable[[ApiError], dict[str, Any]] = openai_error
) -> Response:
    """An error object; a queue that is full says when to come again."""
    headers = {"retry-after": "1"} if error.status in COME_AGAIN else {}
    if error.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(tell(error), error.status, headers)


async def _unknown(request: Request, problem: Exception) -> Response:
    """A path or method that is not there."""
    status = problem.status_code if isinstance(problem, HTTPException) else 500
    what = f"{request.method} {request.scope['path'][:100]} is not supported"
    return error_response(ApiError(what, status=status, code="unknown_path"))


async def _failed(_request: Request, problem: Exception) -> Response:
    """What nothing else caught."""
    return error_response(api_error_of(problem))


# -- the page at `/` ---------------------------------------------------------------------------

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; media-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@functools.cache
def page() -> bytes:
    """One file that needs nothing from outside, and fetches from its server alone."""
    return files("edgespec.serve").joinpath("page.html").read_bytes()
