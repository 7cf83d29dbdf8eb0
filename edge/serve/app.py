"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.serve.access import Access
from edgespec.serve.answers import Answer, Prepared
from edgespec.serve.bodies import read_json
from edgespec.serve.guard import Guard
from edgespec.serve.histories import HISTORY
from edgespec.serve.page import PAGE_HEADERS, page
from edgespec.serve.prepare import (
    apply_template,
    count_chat,
    count_message,
    prepare_chat,
    prepare_completion,
    prepare_infill,
    prepare_llama,
    prepare_message,
    prepare_response,
)
from edgespec.serve.refusal import COME_AGAIN, Refusal, anthropic_error, openai_error, refusal_of
from edgespec.serve.service import Service
from edgespec.serve.status import metrics, props, slots, status
from edgespec.serve.tokens import detokenize, tokenize

Prepare = Callable[[Service, Any, asyncio.AbstractEventLoop], Prepared]
Handler = Callable[[Request], Awaitable[Response | Answer]]

# What is answered by generating. Each path is also there without /v1.
_GENERATING: dict[str, Prepare] = {
    "/v1/chat/completions": prepare_chat,
    "/v1/completions": prepare_completion,
    "/v1/responses": prepare_response,
    "/v1/messages": prepare_message,
    "/completion": prepare_llama,
    "/infill": prepare_infill,
}
# What is answered at once: from the service alone, and from the document of a request.
_TELLING: dict[str, Callable[[Service], Any]] = {
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
_ANTHROPIC = "/v1/messages"  # below it errors have that interface's form


def make_app(service: Service, access: Access | None = None) -> ASGIApp:
    """The application of a service, which it closes when it is shut down."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(service.close)

    routes = Routes(service)
    app = Starlette(routes=routes.all(), lifespan=lifespan)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(Exception, _failed)
    return Guard(app, access or Access(), service.totals.add_status)


class Routes:
    """Everything that is answered."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def all(self) -> list[Route]:
        """The routes of the application."""
        found: list[tuple[str, str, Handler]] = [
            ("/health", "GET", self._health),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{name:path}", "GET", self._model),
            ("/", "GET", self._page),
            ("/v1/embeddings", "POST", self._no_embeddings),
            ("/v1/responses/{name}", "GET", self._kept_response),
            ("/v1/responses/{name}", "DELETE", self._forget_response),
        ]
        found += [(path, "GET", self._told(tell)) for path, tell in _TELLING.items()]
        found += [(path, "POST", self._asked(answer)) for path, answer in _ANSWERING.items()]
        found += [(path, "POST", self._generating(how)) for path, how in _GENERATING.items()]
        return [
            Route(one, _answered(handler, path), methods=[method])
            for path, method, handler in found
            for one in _places(path)
        ]

    async def _health(self, _request: Request) -> Response:
        self._service.check()
        return JSONResponse({"status": "ok"})

    async def _page(self, _request: Request) -> Response:
        return Response(page(), media_type="text/html", headers=PAGE_HEADERS)

    async def _no_embeddings(self, _request: Request) -> Response:
        raise Refusal(
            "this model writes text and makes no embeddings: serve one that was made for them with "
            "another program, such as llama-server --embeddings, and ask that",
            status=404,
            code="unsupported_endpoint",
        )

    async def _kept_response(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._service.responses.document(HISTORY.get(), name))

    async def _forget_response(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.responses.remove(HISTORY.get(), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def _told(self, tell: Callable[[Service], Any]) -> Handler:
        async def handle(_request: Request) -> Response:
            found = tell(self._service)
            return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found)

        return handle

    def _asked(self, answer: Callable[[Service, Any], Any]) -> Handler:
        async def handle(request: Request) -> Response:
            service = self._service
            read = await reader_of(request, service)
            return JSONResponse(await anyio.to_thread.run_sync(lambda: answer(service, read())))

        return handle

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] not in self._service.setup.names:
            raise Refusal(
                f"there is no such model here, only {self._service.setup.names[0]}",
                status=404,
                code="model_not_found",
            )
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.setup.names[0],
            "object": "model",
            "created": service.started_s,
            "owned_by": "edgespec",
            "context_length": service.setup.context_size,
            "max_model_len": service.setup.context_size,
            "meta": {
                "n_ctx": service.setup.context_size,
                "n_vocab": service.engine.vocab_size,
            },
        }

    def _generating(self, prepare: Prepare) -> Handler:
        async def handle(request: Request) -> Answer:
            service, loop = self._service, asyncio.get_running_loop()
            read = await reader_of(request, service)
            prepared = await anyio.to_thread.run_sync(lambda: prepare(service, read(), loop))
            service.worker.submit(prepared.generations)
            return Answer(prepared, service.worker, service.limits)

        return handle


def _places(path: str) -> set[str]:
    """A path with /v1 and without it; the page has one place."""
    short = path.removeprefix("/v1")
    return {path} if path == "/" else {short, f"/v1{short}"}


async def reader_of(request: Request, service: Service) -> Callable[[], Any]:
    """Receive the body of a request; what is returned makes a document of it, in any thread.

    Raises Refusal where nothing can be answered, and as `read_body`.
    """
    service.check()
    body = await read_body(request, service)
    encoding = request.headers.get("content-encoding", "")
    return lambda: read_json(body, service.limits, encoding)


async def read_body(request: Request, service: Service) -> bytes:
    """The body of a request. Raises Refusal for one that is too large or takes too long."""
    most, parts, size = service.limits.body_bytes, [], 0
    with anyio.move_on_after(service.limits.body_s) as patience:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                raise Refusal(f"the body has more than {most} bytes", status=413)
    if patience.cancelled_caught:
        raise Refusal("the body did not come in time", status=408)
    return b"".join(parts)


def _answered(handler: Handler, path: str) -> ASGIApp:
    """A route's application: what fails becomes an error object."""
    tell = anthropic_error if path.startswith(_ANTHROPIC) else openai_error

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response | Answer = await handler(Request(scope, receive))
        except ClientDisconnect:
            return
        except Exception as problem:
            response = error_response(refusal_of(problem), tell)
        await response(scope, receive, send)

    return _Endpoint(app)


class _Endpoint:
    """Starlette takes a function for a handler of requests, and an object for an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def error_response(
    refusal: Refusal, tell: Callable[[Refusal], dict[str, Any]] = openai_error
) -> Response:
    """An error object; a queue that is full says when to come again."""
    headers = {"retry-after": "1"} if refusal.status in COME_AGAIN else {}
    if refusal.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(tell(refusal), refusal.status, headers)


async def _unknown(request: Request, problem: Exception) -> Response:
    """A path or method that is not there."""
    status = problem.status_code if isinstance(problem, HTTPException) else 500
    what = f"{request.method} {request.scope['path'][:100]} is not supported"
    return error_response(Refusal(what, status=status, code="unknown_path"))


async def _failed(_request: Request, problem: Exception) -> Response:
    """What nothing else caught."""
    return error_response(refusal_of(problem))
