"""What stands before the routes of a server: keys, origins, host names, the log and errors.

Keys, origins and host names are looked at before any route is asked. What is logged names a request
by its id, method, path and status. It never has a header, a body or a key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.log import REQUEST_ID
from edgespec.serve import parsing
from edgespec.serve.access import CACHE_SALT, HISTORY, AuthSettings, history_of, host_name
from edgespec.serve.page import page_files
from edgespec.serve.parsing import ApiError, api_error_of, error_form
from edgespec.serve.pool import Shared
from edgespec.serve.serializers import json_bytes, new_id

# For everybody: they tell nothing of anybody.
_OPEN_PATHS = {"/health", "/v1/health", *page_files()}
_METHODS = ("GET", "POST", "OPTIONS")
# That pages of other origins may read.
_TOLD_HEADERS = ("x-request-id", "request-id", "retry-after")
_REFUSED = (401, 403)
_PATH_CHARS = 100
_ANTHROPIC_STATUS = {503: 529}  # of an overloaded server
_CUT = (408, 413, 503)  # answers that may come before the whole body did
JSON = (b"content-type", b"application/json")
BODY = {"type": "http.response.body"}


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
            app, access.origins, _METHODS, allow_headers=("*",), expose_headers=_TOLD_HEADERS
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
        parsing.LOGGER.log(
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


async def send_error(
    send: Send, error: ApiError, tell: Callable[[ApiError], dict[str, Any]]
) -> None:
    """An error object, in the form of an interface."""
    status = _ANTHROPIC_STATUS.get(error.status) if tell is parsing.anthropic_error else None
    await send_json(send, status or error.status, tell(error))


async def send_json(send: Send, status: int, document: Any) -> None:
    """A whole response: a document, or the bytes of one."""
    body = document if isinstance(document, bytes) else json_bytes(document)
    headers = [JSON, (b"content-length", str(len(body)).encode())]
    if status in parsing.COME_AGAIN:
        headers.append((b"retry-after", b"1"))
    if status in _CUT:  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({**BODY, "body": body})
