"""A worker: lends this machine's devices to another one, by llama.cpp's RPC server.

That server is reached through a front of ours in the same process, which adds what it does not
have: a limit of memory, free bytes as the system counts them, an error in place of silence for a
second program, an end for programs whose machine is gone, and answers about itself at any time.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.metadata import version
from typing import Any

from edgespec.backends.llama.library import library
from edgespec.backends.llama.workers import rpc_function
from edgespec.errors import BackendError
from edgespec.memory.device import host, rpc
from edgespec.memory.device.accelerators import CPU, GPU, INTEGRATED_GPU, registered_devices
from edgespec.memory.device.bandwidth import measured_bandwidth
from edgespec.memory.device.structures import DeviceProperties

_P = ctypes.c_void_p
_START_S = 20.0  # that the server has to listen
_SIZES = struct.Struct("<QQ")
_NOTHING = _SIZES.pack(0, 0)  # the answer to an allocation that failed
# Silence of a program, then a question to its machine every so often, and how many of them.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

Note = Callable[[str], None]


class Worker:
    """Serves devices until it is closed; `run` listens, one program at a time.

    Raises UnsupportedError where this llama.cpp has no RPC, and BackendError where its server does
    not start.
    """

    def __init__(self, memory_bytes: int | None, threads: int, note: Note) -> None:
        library()
        lent = _lent()
        self._is_cpu = lent[0][1].type == CPU
        free = host.available_bytes() if self._is_cpu else sum(told.memory_free for _, told in lent)
        self._memory_bytes = memory_bytes or free
        self._taken = dict[int, int]()  # bytes of the program that uses it, by a buffer's address
        self._is_used = False
        self._note = note
        self._busy = threading.Lock()
        self._bytes_per_s = measured_bandwidth() if self._is_cpu else 0.0
        self._server = _start([handle for handle, _ in lent], threads)
        self._protocol = _protocol(self._server)

    def run(self, listener: socket.socket) -> None:
        """Serve whoever connects, until the listener is closed."""
        while True:
            try:
                client, address = listener.accept()
            except OSError:
                return
            # It is noticed within half a minute that the other machine is gone: nobody else is
            # served before.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            threading.Thread(target=self._serve, args=(client, address[0]), daemon=True).start()

    def describe(self) -> str:
        """The devices and what may be taken of them, in a line."""
        names = ", ".join(_text(told.description) for _, told in _lent())
        return f"{names}, {self._memory_bytes >> 20} MiB"

    def status(self) -> dict[str, Any]:
        """What a program learns that asks; `took_s` is not a part of the trip."""
        start = time.perf_counter()
        found = {
            "edgespec": version("edgespec"),
            "protocol": self._protocol,
            "busy": self._busy.locked(),
            "devices": [
                {
                    "name": _text(told.name),
                    "description": _text(told.description),
                    "free_bytes": self._free_bytes(told.memory_free),
                    "total_bytes": self._memory_bytes if self._is_cpu else told.memory_total,
                    "bytes_per_s": self._bytes_per_s,
                }
                for _, told in _lent()
            ],
        }
        return {**found, "took_s": time.perf_counter() - start}

    @property
    def _left_bytes(self) -> int:
        """What may still be taken; a device may have rounded up what was."""
        return max(0, self._memory_bytes - sum(self._taken.values()))

    def _free_bytes(self, told: int) -> int:
        """What is free of a device; ggml's processor calls all memory of the machine free."""
        return min(self._left_bytes, host.available_bytes() if self._is_cpu else told)

    def _serve(self, client: socket.socket, who: str) -> None:
        """One connection: questions about the worker, or one program's work with it."""
        with client, suppress(OSError):
            request = rpc.read_request(client)
            while request is not None and request.command == rpc.Command.STATUS:
                client.sendall(rpc.answer(json.dumps(self.status()).encode()))
                request = rpc.read_request(client)
            if request is None:
                return
            if not self._busy.acquire(blocking=False):
                self._note(f"{who} was turned away: another program uses this worker")
                return
            try:
                with socket.create_connection(("127.0.0.1", self._server)) as server:
                    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._pass(client, server, request, who)
            finally:
                if self._is_used:
                    self._note(f"{who} is done")
                self._is_used, self._taken = False, {}  # the server frees what it had
                self._busy.release()

    def _pass(
        self, client: socket.socket, server: socket.socket, first: rpc.Request, who: str
    ) -> None:
        request: rpc.Request | None = first
        while request is not None:
            command, size = request.command, 0
            if command == rpc.Command.ALLOC_BUFFER:
                size = struct.unpack("<IQ", request.data)[1]
                if not self._is_used:
                    self._note(f"{who} uses this worker")
                self._is_used = True
            elif command == rpc.Command.FREE_BUFFER:
                self._taken.pop(struct.unpack("<Q", request.data)[0], None)
            if size > self._left_bytes:
                self._note(f"refused {size >> 20} MiB: {self._left_bytes >> 20} MiB are left")
                client.sendall(rpc.answer(_NOTHING))
            else:
                server.sendall(request.head)
                for piece in rpc.pieces(request.left, client.recv_into):
                    server.sendall(piece)
                if request.answer_bytes is not None:
                    self._pass_answer(client, server, command)
            request = rpc.read_request(client)

    def _pass_answer(self, client: socket.socket, server: socket.socket, command: int) -> None:
        size = rpc.read_size(server.recv_into)
        if command in (rpc.Command.ALLOC_BUFFER, rpc.Command.GET_DEVICE_MEMORY):
            data = rpc.read(size, server.recv_into)
            first, second = _SIZES.unpack(data)
            if command == rpc.Command.ALLOC_BUFFER:
                self._taken[first] = second
            else:
                data = _SIZES.pack(self._free_bytes(first), min(second, self._memory_bytes))
            client.sendall(rpc.answer(data))
            return
        for piece in rpc.answer_pieces(size, server.recv_into):
            client.sendall(piece)


def _lent() -> list[tuple[int, DeviceProperties]]:
    """The GPUs, or the processor where there are none: ggml's handles, and what it says of each."""
    found = registered_devices()
    gpus = [one for one in found if one[1].type in (GPU, INTEGRATED_GPU)]
    return gpus or [one for one in found if one[1].type == CPU][:1]


def _text(told: bytes) -> str:
    return told.decode(errors="replace")


def _start(devices: list[int], threads: int) -> int:
    """llama.cpp's server on a free port of the loopback interface; which one."""
    start = rpc_function(
        "ggml_backend_rpc_start_server",
        *(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t),
        ctypes.POINTER(_P),
    )
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = int(free.getsockname()[1])
    handles = (_P * len(devices))(*devices)
    endpoint = f"127.0.0.1:{port}".encode()
    arguments = (endpoint, None, threads, len(devices), handles)
    threading.Thread(target=start, args=arguments, daemon=True).start()
    return port


def _protocol(port: int) -> list[int]:
    """The version that the server speaks. Raises BackendError where it does not start."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                return list(rpc.ask(connection, rpc.Command.HELLO, bytes(rpc.HELLO_BYTES))[:3])
        except OSError:
            time.sleep(0.02)
    raise BackendError("llama.cpp's RPC server does not start")


def silence_c() -> None:
    """What llama.cpp prints of every connection goes nowhere; stdout of Python stays."""
    import sys

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(kept, "w")
