"""A client of OpenAI's interface, by the standard library alone: streams of answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import BackendError, UnsupportedError

_CONNECT_S, _SILENCE_S = 10.0, 600.0  # until it answers at all; between two of its events


class Client:
    """A server at an address such as `http://localhost:8080`, with or without `/v1`.

    Raises UnsupportedError for what is no such address.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UnsupportedError(
                f"{url} is no address of a server", hint="one is http://localhost:8080"
            )
        self.url = url
        self._parts, self._key = parts, key
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer. Closing the iteration ends the answer.

        Raises UnsupportedError for what the server refuses, BackendError where it cannot be had.
        """
        connection = self._connect()
        try:
            headers = {"content-type": "application/json"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            sent = json.dumps({**body, "stream": True}).encode()
            connection.request("POST", f"{self._base}/v1/{path}", sent, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response.status, response.read())
            yield from _events(response)
        except (OSError, HTTPException) as problem:
            reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
            raise BackendError(f"the server at {self.url} does not answer: {reason}") from problem
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        try:
            port = self._parts.port
        except ValueError as problem:
            raise UnsupportedError(f"{self.url} has no port that can be") from problem
        connection = kind(self._parts.hostname or "", port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except OSError as problem:
            raise BackendError(
                f"there is no server at {self.url}: {problem.strerror or problem}",
                hint="start one with `edgespec serve`",
            ) from problem
        connection.sock.settimeout(_SILENCE_S)
        return connection


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        name, _, value = line.decode(errors="replace").strip().partition(":")
        if name != "data" or value.strip() == "[DONE]":
            continue
        event = json.loads(value)
        if "error" in event:
            raise BackendError(f"the server gave up: {event['error'].get('message')}")
        yield event


def _refused(status: int, body: bytes) -> UnsupportedError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {status}"
    hint = "give its key as EDGESPEC_API_KEY" if status == 401 else ""
    return UnsupportedError(f"the server refuses: {message}", hint=hint)
