"""Whose earlier texts draft for a request: those of the same API key, and without keys everybody's.

Drafts make an answer faster where it was written before. With the texts of others, the time an
answer takes would tell what they wrote.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.serve.access import Access

HISTORY: ContextVar[str] = ContextVar("history", default="")  # of the request that is served


class Histories:
    """Sets `HISTORY` for each request; keys were checked before."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._has_keys = app, bool(access.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By ASGI."""
        if scope["type"] != "http" or not self._has_keys:
            await self._app(scope, receive, send)
            return
        token = HISTORY.set(history_of(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            HISTORY.reset(token)


def history_of(headers: Headers) -> str:
    """A name made of the key of a request, which does not tell the key."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
    return hashlib.sha256(key.encode()).hexdigest()[:32]
