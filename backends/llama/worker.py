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
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from edgespec.backends.llama.library import ggml_function, library
from edgespec.backends.llama.workers import rpc_function
from edgespec.errors import BackendError
from edgespec.memory.device import host, rpc
from edgespec.memory.device.bandwidth import measured_bandwidth

_P = ctypes.c_void_p
_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2  # values of ggml_backend_dev_type
_START_S = 20.0  # that the server has to listen
_SIZES = struct.Struct("<QQ")
_NOTHING = _SIZES.pack(0, 0)  # the answer to an allocation that failed
# Silence of a program, then a question to its machine every so often, and how many of them.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

Note = Callable[[str], None]


@dataclass
class Ledger:
    """Bytes that the program which uses the worker has taken of `limit_bytes`."""

    limit_bytes: int
    was_used: bool = False
    _taken: dict[int, int] = field(default_factory=dict)  # by the buffer's address

    @property
    def taken_bytes(self) -> int:
        return sum(self._taken.values())

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.taken_bytes)

    def take(self, buffer: int, size: int) -> None:
        """A buffer that was allocated; address 0 is none."""
        if buffer:
            self._taken[buffer] = size

    def give_back(self, buffer: int) -> None:
        """A buffer that is freed."""
        self._taken.pop(buffer, None)


class Worker:
    """Serves devices until it is closed; `run` listens, one program at a time.

    Raises UnsupportedError where this llama.cpp has no RPC, and BackendError where its server does
    not start.
    """

    def __init__(self, memory_bytes: int | None, threads: int, note: Note) -> None:
        library()
        self._devices = _devices()
        self._is_cpu = self._devices[0].kind == _CPU
        free = host.available_bytes() if self._is_cpu else sum(d.free() for d in self._devices)
        self._memory_bytes = memory_bytes or free
        self._ledger = Ledger(self._memory_bytes)
        self._note = note
        self._busy = threading.Lock()
        self._bytes_per_s = measured_bandwidth() if self._is_cpu else 0.0
        self._server = _start(self._devices, threads)
        self._protocol = _protocol(self._server)

    def run(self, listener: socket.socket) -> None:
        """Serve whoever connects, until the listener is closed."""
        while True:
            try:
                client, address = listener.accept()
            except OSError:
                return
            _watch(client)
            threading.Thread(target=self._serve, args=(client, address[0]), daemon=True).start()

    def describe(self) -> str:
        """The devices and what may be taken of them, in a line."""
        names = ", ".join(device.description for device in self._devices)
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
                    "name": device.name,
                    "description": device.description,
                    "free_bytes": self._free_bytes(device.free()),
                    "total_bytes": self._memory_bytes if self._is_cpu else device.total(),
                    "bytes_per_s": self._bytes_per_s,
                }
                for device in self._devices
            ],
        }
        return {**found, "took_s": time.perf_counter() - start}

    def _free_bytes(self, told: int) -> int:
        """What is free of a device; ggml's processor calls all memory of the machine free."""
        return min(self._ledger.left_bytes, host.available_bytes() if self._is_cpu else told)

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
                if self._ledger.was_used:
                    self._note(f"{who} is done")
                self._ledger = Ledger(self._memory_bytes)  # the server frees what it had
                self._busy.release()

    def _pass(
        self, client: socket.socket, server: socket.socket, first: rpc.Request, who: str
    ) -> None:
        request: rpc.Request | None = first
        while request is not None:
            if request.command == rpc.Command.ALLOC_BUFFER and not self._ledger.was_used:
                self._ledger.was_used = True
                self._note(f"{who} uses this worker")
            if not self._exceeds(request):
                server.sendall(request.head)
                for piece in rpc.pieces(request.left, client.recv_into):
                    server.sendall(piece)
                if request.answer_bytes is not None:
                    self._pass_answer(client, server, request)
            else:
                client.sendall(rpc.answer(_NOTHING))
            request = rpc.read_request(client)

    def _exceeds(self, request: rpc.Request) -> bool:
        """Whether it asks for more memory than is left; what it gives back is taken down."""
        if request.command == rpc.Command.FREE_BUFFER:
            self._ledger.give_back(struct.unpack("<Q", request.data)[0])
        if request.command != rpc.Command.ALLOC_BUFFER:
            return False
        size = struct.unpack("<IQ", request.data)[1]
        if size <= self._ledger.left_bytes:
            return False
        self._note(f"refused {size >> 20} MiB: {self._ledger.left_bytes >> 20} MiB are left")
        return True

    def _pass_answer(
        self, client: socket.socket, server: socket.socket, request: rpc.Request
    ) -> None:
        size = rpc.read_size(server.recv_into)
        if request.command in (rpc.Command.ALLOC_BUFFER, rpc.Command.GET_DEVICE_MEMORY):
            data = rpc.read(size, server.recv_into)
            first, second = _SIZES.unpack(data)
            if request.command == rpc.Command.ALLOC_BUFFER:
                self._ledger.take(first, second)
            else:
                data = _SIZES.pack(self._free_bytes(first), min(second, self._memory_bytes))
            client.sendall(rpc.answer(data))
            return
        head = rpc.answer_head(size)
        for piece in rpc.pieces(size, server.recv_into):
            client.sendall(head + bytes(piece) if head else piece)
            head = b""


@dataclass(frozen=True)
class _Device:
    handle: int
    kind: int
    name: str
    description: str

    def free(self) -> int:
        return self._memory()[0]

    def total(self) -> int:
        return self._memory()[1]

    def _memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.POINTER(ctypes.c_size_t)
        ggml_function("ggml_backend_dev_memory", None, _P, sizes, sizes)(
            self.handle, ctypes.byref(free), ctypes.byref(total)
        )
        return free.value, total.value


def _devices() -> list[_Device]:
    """The GPUs, or the processor where there are none."""
    get = ggml_function("ggml_backend_dev_get", _P, ctypes.c_size_t)
    kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, _P)
    name = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, _P)
    text = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, _P)
    count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)()
    found = [
        _Device(one, kind(one), name(one).decode(), text(one).decode(errors="replace"))
        for one in map(get, range(count))
    ]
    gpus = [one for one in found if one.kind in (_GPU, _INTEGRATED_GPU)]
    return gpus or [one for one in found if one.kind == _CPU][:1]


def _start(devices: list[_Device], threads: int) -> int:
    """llama.cpp's server on a free port of the loopback interface; which one."""
    start = rpc_function(
        "ggml_backend_rpc_start_server",
        *(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t),
        ctypes.POINTER(_P),
    )
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = int(free.getsockname()[1])
    handles = (_P * len(devices))(*(device.handle for device in devices))
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


def _watch(client: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone: nobody else is served before."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silence_c() -> None:
    """What llama.cpp prints of every connection goes nowhere; stdout of Python stays."""
    import sys

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(kept, "w")
