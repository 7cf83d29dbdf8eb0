"""A server that sends what a test says, whatever it is asked: broken streams, pages, redirects."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNKED = HEAD.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
_MOST_PIECES = 5000


def event(text: str, **more: Any) -> bytes:
    """A part of an answer."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": more.pop("reason", None)}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


@contextmanager
def sending(pieces: Iterable[bytes]) -> Iterator[str]:
    """The address of a server that answers one request with these, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(20)
                    connection.recv(1 << 16)
                    for piece in islice(pieces, _MOST_PIECES):
                        connection.sendall(piece)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(30)
