"""Who may come in: keys, origins, host names and the size of bodies, before any route is asked."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.serve.access import Access
from edgespec.serve.answers import send_json
from edgespec.serve.refusal import Refusal

_OPEN_PATHS = ("/", "/health", "/v1/health")  # for everybody: they tell nothing of anybody
_METHODS = "GET, POST, OPTIONS"
_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"


class Guard:
    """Refuses what may not come in, and lets browsers know what may."""

    def __init__(self, app: ASGIApp, access: Access, seen: Callable[[int], None]) -> None:
        self._app, self._access, self._seen = app, access, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = self._allowed_origin(headers)
        told = self._telling(send, origin)
        try:
            self._check(scope, headers, origin)
        except Refusal as refusal:
            await send_json(told, refusal.status, refusal.document)
            return
        if scope["method"] == "OPTIONS" and origin is not None:
            await _allow(told)
            return
        await self._app(scope, receive, told)

    def _check(self, scope: Scope, headers: Headers, origin: str | None) -> None:
        """Raise Refusal for who may not come in."""
        host = _name_of(headers.get("host", ""))
        if self._access.hosts and host not in self._access.hosts:
            raise Refusal("this server is not known by that host name", status=403)
        if headers.get("origin") is not None and origin is None and not _is_own(headers):
            raise Refusal("pages of this origin may not use the server (--cors)", status=403)
        if scope["method"] == "OPTIONS" or scope["path"] in _OPEN_PATHS:
            return
        if self._access.keys and not self._has_key(headers):
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")

    def _has_key(self, headers: Headers) -> bool:
        given = headers.get("x-api-key", "")
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given = token.strip()
        found = [hmac.compare_digest(given.encode(), key.encode()) for key in self._access.keys]
        return any(found)  # all of them are compared: time tells nothing

    def _allowed_origin(self, headers: Headers) -> str | None:
        origin = headers.get("origin")
        allowed = self._access.origins
        return origin if origin is not None and ("*" in allowed or origin in allowed) else None

    def _telling(self, send: Send, origin: str | None) -> Callable[[Message], Awaitable[None]]:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._seen(message["status"])
                headers = MutableHeaders(scope=message)
                headers["x-content-type-options"] = "nosniff"
                if origin is not None:
                    headers["access-control-allow-origin"] = origin
                    headers["vary"] = "Origin"
            await send(message)

        return told


def _name_of(host: str) -> str:
    """A host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _is_own(headers: Headers) -> bool:
    """Whether the page that asks came from this server."""
    return headers.get("origin", "").partition("://")[2] == headers.get("host")


async def _allow(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", _METHODS.encode()),
        (b"access-control-allow-headers", _HEADERS.encode()),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
