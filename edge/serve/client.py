"""A client of OpenAI's interface, by the standard library alone: streams of answers.

Whatever a server sends ends in an answer or in one sentence, in bounded time and memory.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from edgespec.errors import BackendError, UnsupportedError

_CONNECT_S, _SILENCE_S = 10.0, 600.0  # until it answers at all; its headers, or between events
_LINE_BYTES, _ANSWER_BYTES = 1 << 20, 64 << 20  # most of one event, and of all
_ERROR_BYTES, _MESSAGE_CHARS = 64 << 10, 500
_NAMELESS = "it sent what is no answer of OpenAI's interface"


class Event(NamedTuple):
    """A part of an answer."""

    text: str
    finish_reason: str  # "" while it goes on
    usage: dict[str, float]
    timings: dict[str, float]


_NOTHING = Event("", "", {}, {})


class Client:
    """A server at an address such as `http://localhost:8080`, with or without `/v1`.

    Raises UnsupportedError for what is no such address.
    """

    def __init__(self, url: str, key: str = "") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_one = is_one and parts.port != 0 and url.isprintable()
        except ValueError:
            is_one = False
        if not is_one:
            raise UnsupportedError(
                f"{url[:_MESSAGE_CHARS]} is no address of a server",
                hint="one is http://localhost:8080",
            )
        self.url = url
        self._parts, self._key = parts, key
        self._base = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Event]:
        """The parts of an answer as they come. Closing the iteration ends the answer.

        Raises UnsupportedError for what the server refuses, BackendError where it cannot be had or
        breaks off.
        """
        headers: dict[str, str | bytes] = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}".encode()
        sent = json.dumps({**body, "stream": True}).encode()
        connection = self._connect()
        try:
            with _limited(connection.sock):
                try:
                    connection.request("POST", f"{self._base}/v1/{path}", sent, headers)
                except ValueError as problem:  # a line break in a key
                    raise UnsupportedError("EDGESPEC_API_KEY is no key") from problem
                response = connection.getresponse()
                if response.status != 200:
                    raise _refused(response)
            yield from _events(response)
        except (OSError, HTTPException) as problem:
            reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
            raise BackendError(f"the server at {self.url} broke off: {_short(reason)}") from problem
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except (OSError, UnicodeError) as problem:  # a name may be too long for the network
            raise BackendError(
                f"there is no server at {self.url}: {getattr(problem, 'strerror', '') or problem}",
                hint="start one with `edgespec serve`",
            ) from problem
        connection.sock.settimeout(_SILENCE_S)
        return connection


@contextmanager
def _limited(connection: socket.socket) -> Iterator[None]:
    """End the connection where the block takes too long, however often a byte comes."""
    limit = threading.Timer(_SILENCE_S, _shut, (connection,))
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _events(response: HTTPResponse) -> Iterator[Event]:
    """Raises BackendError for a stream that does not end as an answer does."""
    size, is_answer, is_whole = 0, False, False
    while line := response.readline(_LINE_BYTES + 1):
        size += len(line)
        for most, sent, what in (
            (_LINE_BYTES, len(line), "a line"),
            (_ANSWER_BYTES, size, "an answer"),
        ):
            if sent > most:
                raise BackendError(f"the server sends {what} of more than {most} bytes")
        name, _, value = line.decode(errors="replace").strip().partition(":")
        if not name and value:  # a comment, so that an answer can be stopped meanwhile
            yield _NOTHING
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            is_whole = True
            continue
        event = _event(value)
        is_answer, is_whole = True, is_whole or bool(event.finish_reason)
        yield event
    kind = _short(response.headers.get("content-type", "nothing"))
    if not is_answer and not kind.startswith("text/event-stream"):
        raise BackendError(
            f"the server does not answer: {_NAMELESS}, but {kind}",
            hint="give the address of a server such as `edgespec serve`, without a page's path",
        )
    if not is_whole:
        raise BackendError("the server broke off before the answer was complete")


def _event(line: str) -> Event:
    """Raises BackendError for what is none, and for a failure that it tells of."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BackendError(f"the server broke off: {_NAMELESS}: {_short(line)}")
    if "error" in document:
        raise BackendError(f"the server gave up: {_message_of(document) or 'without a word'}")
    choices = document.get("choices")
    choice = _table(choices[0]) if isinstance(choices, list) and choices else {}
    text = choice.get("text") or _table(choice.get("delta")).get("content")
    reason = choice.get("finish_reason")
    return Event(
        text if isinstance(text, str) else "",
        reason if isinstance(reason, str) else "",
        _numbers(document.get("usage")),
        _numbers(document.get("timings")),
    )


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float]:
    """What can be counted with of a table."""
    return {
        name: number
        for name, number in _table(value).items()
        if isinstance(number, int | float) and abs(number) < 1e15 and math.isfinite(number)
    }


def _message_of(document: Any) -> str:
    """What a server says is wrong, or ""."""
    problem = _table(document).get("error")
    message = _table(problem).get("message") if isinstance(problem, dict) else problem
    return _short(message) if isinstance(message, str) else ""


def _short(text: str) -> str:
    """A stranger's words on one line, and not too many."""
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_CHARS else line[: _MESSAGE_CHARS - 1] + "…"


def _refused(response: HTTPResponse) -> UnsupportedError:
    status, message = response.status, ""
    if 300 <= status < 400:
        place = _short(response.headers.get("location") or "no address")
        return UnsupportedError(
            f"the server sends elsewhere, to {place}", hint="give that address if you trust it"
        )
    with suppress(ValueError, RecursionError, HTTPException, OSError):
        message = _message_of(json.loads(response.read(_ERROR_BYTES)))
    hint = "give its key as EDGESPEC_API_KEY" if status == 401 else ""
    return UnsupportedError(f"the server refuses: {message or f'status {status}'}", hint=hint)
