"""A TCP proxy that delivers everything late, as a network does; and one that stops delivering."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

_PIECE = 1 << 16


class DelayingProxy:
    """Stands before `target` (host, port); a trip there and back takes `trip_s` longer.

    While `is_silent`, nothing is delivered any more. `port` is its own; 0 is any.
    """

    def __init__(self, target: tuple[str, int], trip_s: float = 0.0, port: int = 0) -> None:
        self.trip_s, self.is_silent = trip_s, False
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT to connect to."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        """Break all connections off."""
        self.is_silent = False  # threads that deliver end
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> DelayingProxy:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                server = socket.create_connection(self._target)
                self._open.append(server)
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pass(client, server)
                self._pass(server, client)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def take() -> None:
            with suppress(OSError):
                while data := source.recv(_PIECE):
                    under_way.put((time.monotonic() + self.trip_s / 2, data))
            under_way.put((0.0, b""))

        def deliver() -> None:
            with suppress(OSError):
                while True:
                    due, data = under_way.get()
                    time.sleep(max(0.0, due - time.monotonic()))
                    while self.is_silent:
                        time.sleep(0.01)
                    if not data:
                        target.shutdown(socket.SHUT_WR)
                        return
                    target.sendall(data)

        for one in (take, deliver):
            threading.Thread(target=one, daemon=True).start()
