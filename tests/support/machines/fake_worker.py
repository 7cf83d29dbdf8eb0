"""A worker that computes nothing: it speaks the protocol, and fails as it is told to."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from edgespec.memory.device import rpc

STATUS: dict[str, Any] = {
    "edgespec": "0.1.0",
    "protocol": [7, 0, 0],
    "busy": False,
    "devices": [
        {
            "name": "CPU",
            "description": "Some CPU",
            "free_bytes": 3 << 30,
            "total_bytes": 4 << 30,
            "bytes_per_s": 2e10,
        }
    ],
}
ANSWERS: dict[int, bytes] = {
    rpc.Command.HELLO: bytes((7, 0, 0, 0)) + bytes(24),
    rpc.Command.DEVICE_COUNT: struct.pack("<I", 2),
    rpc.Command.GET_DEVICE_MEMORY: struct.pack("<QQ", 1 << 30, 2 << 30),
    rpc.Command.GET_ALIGNMENT: struct.pack("<Q", 64),
}


class FakeWorker:
    """Answers with `ANSWERS`, and tensors of ones; without `status` it is llama.cpp's own server.

    `silent_on` and `dies_on` are commands after which it says nothing more, or is gone, in the
    middle of the answer where it has one.
    """

    def __init__(
        self,
        status: dict[str, Any] | None = STATUS,
        answers: dict[int, bytes] | None = None,
        silent_on: int | None = None,
        dies_on: int | None = None,
    ) -> None:
        self.received: list[int] = []
        self._status, self._answers = status, ANSWERS if answers is None else answers
        self._silent_on, self._dies_on = silent_on, dies_on
        self._is_silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._open = [self._listener]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            while (request := rpc.read_request(client)) is not None and not self._is_silent:
                for _ in rpc.pieces(request.left, client.recv_into):
                    pass
                if request.command == rpc.Command.STATUS:
                    if self._status is None:
                        return
                    client.sendall(rpc.answer(json.dumps(self._status).encode()))
                    continue
                self.received.append(request.command)
                size = request.answer_bytes
                data = self._answers.get(request.command, b"\1" * (size or 0))
                if request.command == self._dies_on:
                    client.sendall(rpc.answer(data)[: 8 + len(data) // 2])
                    self.close()
                    return
                if request.command == self._silent_on:
                    self._is_silent = True
                    continue
                if size is not None:
                    client.sendall(rpc.answer(data))
            if self._is_silent:
                client.recv(1)  # until the other end closes
