"""The ASGI application: who may come in, which path is answered by what, who asked for what.

Keys, origins and host names are looked at before any route is asked. What is logged names a request
by its id, method, path and status. It never has a header, a body or a key.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from functools import partial
from time import perf_counter
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.decode.generation import ToolCall
from edgespec.log import REQUEST_ID
from edgespec.serve.access import CACHE_SALT, HISTORY, AuthSettings, history_of, host_name
from edgespec.serve.answers import Admission, Endpoint, Interface, send_error, wanted_model
from edgespec.serve.chat import (
    apply_template,
    count_chat,
    prepare_chat,
    read_chat,
    read_template,
)
from edgespec.serve.completions import prepare_completion, read_completion
from edgespec.serve.embeddings import embeddings, read_embeddings, read_rerank, rerank
from edgespec.serve.llama import (
    detokenize,
    prepare_infill,
    prepare_llama,
    read_ids,
    read_infill,
    read_llama,
    read_text,
    tokenize,
)
from edgespec.serve.messages import prepare_message, read_messages
from edgespec.serve.ollama import (
    embed,
    ollama_version,
    prepare_ollama,
    read_embed,
    read_ollama_chat,
    read_ollama_prompt,
    running,
    show,
    tags,
)
from edgespec.serve.page import HEADERS as PAGE_HEADERS
from edgespec.serve.page import page_files
from edgespec.serve.parsing import (
    LOGGER,
    OLLAMA,
    ApiError,
    Fields,
    ServedModel,
    api_error_of,
    error_form,
    read_json,
    scales_of,
)
from edgespec.serve.pool import ANY, CHAT, EMBED, Member, Pool, Shared
from edgespec.serve.responses import (
    ResponsesSerializer,
    count_response,
    prepare_response,
    read_response,
)
from edgespec.serve.serializers import new_id
from edgespec.serve.service import Task
from edgespec.serve.status import adapters, metrics, props, status

# For everybody: they tell nothing of anybody.
_OPEN_PATHS = {"/health", "/v1/health", *page_files()}
_METHODS = ("GET", "POST", "OPTIONS")
_TOLD_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
)  # that pages of other origins may read
_REFUSED = (401, 403)
_PATH_CHARS = 100


class AuthMiddleware:
    """Refuses what may not come in, lets browsers know what may, and logs each request."""

    def __init__(self, routes: ASGIApp, access: AuthSettings, shared: Shared) -> None:
        self._routes, self._access, self._seen = routes, access, shared.totals.add_status
        self._most, self._count = shared.limits.connections, 0  # requests at once
        # Inside, so that a page of an origin that is allowed can read why it was refused.
        self._app: ASGIApp = _Origins(self._answer, access) if access.origins else self._answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        scope, host = _local(scope)
        exchange = scope["exchange"] = _Exchange(scope, send, self._seen)
        token = REQUEST_ID.set(exchange.request_id)
        self._count += 1
        try:
            self._check(Headers(scope=scope), host)
            await self._app(scope, receive, exchange.send)
        except Exception as problem:
            await _refuse(scope, exchange.send, problem)
        finally:
            self._count -= 1
            REQUEST_ID.reset(token)
            exchange.log()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer to who has a key, where keys are asked for."""
        tokens = None
        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if self._access.keys and path not in _OPEN_PATHS:
                headers = Headers(scope=scope)
                kind, _, token = headers.get("authorization", "").partition(" ")
                sent = token if kind.lower() == "bearer" else headers.get("x-api-key", "")
                key = sent.strip()
                if not self._access.has_key(key):
                    problem = "the API key is missing or wrong"
                    raise ApiError(problem, status=401, code="invalid_api_key")
                owner = history_of(key)
                salt = owner if len(self._access.keys) > 1 else ""
                tokens = HISTORY.set(owner), CACHE_SALT.set(salt)
            await self._routes(scope, receive, send)
        except Exception as problem:
            await _refuse(scope, send, problem)
        finally:
            if tokens is not None:
                HISTORY.reset(tokens[0])
                CACHE_SALT.reset(tokens[1])

    def _check(self, headers: Headers, host: str) -> None:
        """Raise ApiError for names and origins that are not allowed, and for too many at once."""
        if self._count > self._most:
            raise ApiError(
                f"{self._most} requests are under way: try again later",
                status=503,
                code="too_many_requests",
            )
        if not self._access.takes_host(host):
            name = _shown(host_name(host))
            raise ApiError(
                f"the Host header says {name or 'nothing'}, and without a key only names of this "
                f"machine are answered: start with --allowed-host {name or 'NAME'}",
                status=403,
            )
        origin = headers.get("origin")
        is_own = origin is None or origin.partition("://")[2].lower() == host.lower()
        if origin is not None and not is_own and not self._access.takes_origin(origin):
            raise ApiError("pages of this origin may not use the server (--cors)", status=403)


async def _refuse(scope: Scope, send: Send, problem: Exception) -> None:
    """Say why there is no answer, in the form of its path; of one that has begun the log does."""
    if isinstance(problem, HTTPException):
        what = f"{scope['method']} {scope['path'][:_PATH_CHARS]} is not supported"
        error = ApiError(what, status=problem.status_code, code="unknown_path")
    else:
        error = api_error_of(problem)
    if scope["exchange"].status is None:
        await send_error(send, error, error_form(scope["path"]))


class _Origins(CORSMiddleware):
    """Any header may be sent from an origin that is allowed: clients add many of their own."""

    def __init__(self, app: ASGIApp, access: AuthSettings) -> None:
        super().__init__(
            app,
            access.origins,
            _METHODS,
            allow_headers=("*",),
            expose_headers=_TOLD_HEADERS,
        )
        self.allow_private_network = True  # a page of the internet that asks this machine
        self._access = access

    def is_allowed_origin(self, origin: str) -> bool:
        return self._access.takes_origin(origin)


class _Exchange:
    """One request and what is known of its answer."""

    def __init__(self, scope: Scope, send: Send, seen: Callable[[int], None]) -> None:
        self.request_id = new_id("req_")
        self.status: int | None = None
        self._scope, self._send, self._seen = scope, send, seen
        self._began_s = perf_counter()

    async def send(self, message: Message) -> None:
        """Send on, with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._seen(message["status"])
            headers = MutableHeaders(scope=message)
            headers["x-content-type-options"] = "nosniff"
            headers["x-request-id"] = headers["request-id"] = self.request_id
        await self._send(message)

    def log(self) -> None:
        """Say what was asked and how it ended; those that were refused with their address."""
        peer = (self._scope.get("client") or ("?",))[0]
        is_refused = self.status in _REFUSED
        LOGGER.log(
            logging.WARNING if is_refused else logging.INFO,
            "%s %s %s %s %.0f ms%s",
            self.request_id,
            _shown(self._scope["method"]),
            _shown(self._scope["path"]),
            self.status or "closed",
            (perf_counter() - self._began_s) * 1e3,
            f" from {_shown(str(peer))}" if is_refused else "",
        )


def _local(scope: Scope) -> tuple[Scope, str]:
    """A request with the path as routes know it, and the host it was sent to.

    A target may be a whole address (`GET http://host/path`); its host counts then. Slashes too many
    at either end, as in `/v1/models/`, change nothing.
    """
    path, root = scope["path"], scope.get("root_path", "")
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if not path.startswith("/") and "://" in path:
        host, _, path = path.partition("://")[2].partition("/")
        host = host.rpartition("@")[2]
    path = path.removeprefix(root) if root and path.startswith(f"{root}/") else path
    if "host" not in headers and path in _OPEN_PATHS:
        host = "localhost"  # HTTP/1.0, as HAProxy asks for health; every browser names a host
    # The routes raise for a path that is not there, whatever application they are mounted in.
    more: dict[str, Any] = {"app": None, "starlette.exception_handlers": ({}, {})}
    return {**scope, **more, "path": f"{root}/{path.strip('/')}"}, host


def _shown(text: str) -> str:
    """On one line, whatever a client sent."""
    return ascii(text[:_PATH_CHARS])[1:-1]


Read = Callable[[Fields, ServedModel], Any]
Prepare = Callable[[Any, Any, Task], Any]
Handler = Callable[[Request], Awaitable[Response]]


def _told(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Task], Any]:
    return lambda service, asked, _task: answer(service, asked)


# What takes a document. Each path is also there without /v1, but for those of Ollama's interface,
# whose streams are lines.
_ASKED: dict[str, tuple[str, Read, Prepare]] = {
    "/v1/chat/completions": (CHAT, read_chat, prepare_chat),
    "/v1/completions": (CHAT, read_completion, prepare_completion),
    "/v1/responses": (CHAT, read_response, prepare_response),
    "/v1/messages": (CHAT, read_messages, prepare_message),
    "/completion": (CHAT, read_llama, prepare_llama),
    "/infill": (CHAT, read_infill, prepare_infill),
    "/tokenize": (CHAT, read_text, _told(tokenize)),
    "/detokenize": (CHAT, read_ids, _told(detokenize)),
    "/apply-template": (CHAT, read_template, _told(apply_template)),
    "/v1/messages/count_tokens": (CHAT, partial(read_messages, counts=True), _told(count_chat)),
    "/v1/chat/completions/input_tokens": (CHAT, read_chat, _told(count_chat)),
    "/v1/responses/input_tokens": (CHAT, read_response, _told(count_response)),
    "/api/chat": (CHAT, read_ollama_chat, partial(prepare_ollama, is_chat=True)),
    "/api/generate": (CHAT, read_ollama_prompt, partial(prepare_ollama, is_chat=False)),
    "/api/embed": (EMBED, read_embed, embed),
    "/api/embeddings": (EMBED, read_embed, embed),
    "/v1/embeddings": (EMBED, read_embeddings, embeddings),
    "/v1/rerank": (EMBED, read_rerank, rerank),
}
# What fails before there is an answer, as an event, where it is another one.
_FAILING = {"/v1/responses": lambda problem: ResponsesSerializer("", {}).failed(problem)}
# What is told at once, from the models that there are.
_TELLING: dict[str, Callable[[Pool, Member], Any]] = {
    "/props": props,
    "/status": status,
    "/lora-adapters": adapters,
    "/metrics": metrics,
    "/api/version": ollama_version,
    "/api/tags": tags,
    "/api/ps": running,
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
        for path, (kind, read, prepare) in asked.items():
            interface = Interface(
                *(kind, read, prepare, error_form(path), _FAILING.get(path)),
                lines=path.startswith(OLLAMA),
            )
            handlers.append((path, "POST", Endpoint(interface, self._pool, self._admission)))
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
        name = request.path_params["name"]
        found = [one for one in self._pool.members if name in one.model.names]
        if not found:
            names = ", ".join(one.name for one in self._pool.members)
            raise ApiError(
                f"there is no such model here, only {names}", status=404, code="model_not_found"
            )
        return JSONResponse(self._told_card(request, found[0]))

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

    def _loaded(self, _loaded: Any, _asked: Any, task: Task) -> dict[str, Any]:
        return {"success": True, **self._card(task.member)}

    async def _adapt(self, request: Request) -> Response:
        """Scales of a model's adapters for requests that say none, from now on."""
        _, values = await self._named(request)
        member = self._pool.find(request.query_params.get("model"), CHAT)
        count = len(adapters(self._pool, member))
        given = {"body": values if isinstance(values, list) else [values]}
        found = scales_of(Fields(given), "body")
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
            document = await self._admission.run(ANY, lambda: read_json(body, self._pool.limits))
        return wanted_model(self._pool, document, ANY)[0], document

    async def _show(self, request: Request) -> Response:
        return JSONResponse(show(self._pool, *await self._named(request)))

    async def _unload_model(self, request: Request) -> Response:
        member, _ = await self._named(request)
        await self._pool.unload(member)
        return JSONResponse({"success": True, **self._card(member)})


def _places(path: str) -> set[str]:
    """A path with /v1 and without it; the page's files and Ollama's paths have one place."""
    short = path.removeprefix("/v1")
    return {path} if path in page_files() or path.startswith(OLLAMA) else {short, f"/v1{short}"}
