"""Devices of workers as llama.cpp's own: made known through its C API, each behind a relay.

A relay stands between llama.cpp and one worker, so that a worker that fails does not end the
process. llama.cpp calls abort() when a worker's connection breaks, and waits for ever for one that
hangs. It is connected to a relay on the loopback interface instead, in a thread of this process.
When the worker dies, or says nothing and does not answer when asked whether it is alive, the relay
takes over and answers in its place: zeros of the right size. The step then ends, and whoever
started it asks `failure` before using what it computed.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from edgespec.backends.llama.library import ggml_function, library, set_params
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import HOST, Device
from edgespec.memory.device import rpc
from edgespec.memory.device.accelerators import require_rpc
from edgespec.memory.device.workers import connect, status, unreachable

if TYPE_CHECKING:
    from typing_extensions import Self


_LOOK_S = 2.0  # of silence, after which a worker is asked whether it is alive
_REPLY_S = 3.0  # that it has to say so
# Silence of a server that cannot be asked: llama.cpp's own serves one connection at a time. A batch
# of a prompt on a slow one may take a minute.
_MOST_SILENCE_S = 120.0
_WAITS, _WAIT_S = 20, 0.1  # for a worker that serves somebody
_FAKE_ADDRESS = 1 << 32  # of a buffer that nobody reads: aligned, and not NULL
_STAND_INS: dict[int, bytes] = {
    rpc.Command.GET_ALIGNMENT: struct.pack("<Q", 128),
    rpc.Command.GET_MAX_SIZE: struct.pack("<Q", 1 << 62),
    rpc.Command.BUFFER_GET_BASE: struct.pack("<Q", _FAKE_ADDRESS),
    rpc.Command.SET_TENSOR_HASH: b"\1",  # it has these weights: they are not sent
    rpc.Command.HELLO: struct.pack("<4B", *rpc.PROTOCOL, 0, 0) + bytes(rpc.HELLO_BYTES),
}


class Relay:
    """A way to `worker`, which has `num_devices`; for the rest of this process, or until `close`.

    `endpoint` is where llama.cpp connects to. `failure` is empty as long as the worker answers.
    """

    def __init__(
        self, worker: str, num_devices: int, *, look_s: float = _LOOK_S, reply_s: float = _REPLY_S
    ) -> None:
        self.worker, self.failure, self.hint = worker, "", ""
        self._was_used = False  # whether it has ever answered llama.cpp
        self.look_s, self.reply_s = look_s, reply_s
        self._stand_ins = {**_STAND_INS, rpc.Command.DEVICE_COUNT: struct.pack("<I", num_devices)}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._listen, name=f"relay to {worker}", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those there are end with llama.cpp's."""
        with suppress(OSError):  # the thread that waits in `accept` would take another one
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def fail(self, problem: OSError) -> None:
        """From now on every answer is the relay's own. The first problem is told."""
        if self.failure:
            return
        if not self._was_used:
            told = unreachable(self.worker, problem)
            self.failure, self.hint = str(told), told.hint
        elif isinstance(problem, TimeoutError):
            self.failure = f"worker {self.worker} does not answer any more"
            self.hint = "it hangs, or its machine is gone: what it had of the model is lost; start "
            self.hint += "it again, then this command"
        else:
            self.failure = f"worker {self.worker} is gone: {problem.strerror or problem}"
            self.hint = "it ended or was started anew, and what it had of the model is lost; start "
            self.hint += "this command again when it runs"

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, _Line(self) as line, suppress(OSError):  # of llama.cpp: it is done
            while (request := rpc.read_request(client)) is not None:
                line.send(request.head)
                for piece in rpc.pieces(request.left, client.recv_into):
                    line.send(piece)
                if request.answer_bytes is not None:
                    self._answer(client, line, request.command, request.answer_bytes)
                    self._was_used = self._was_used or not self.failure

    def _answer(self, client: socket.socket, line: _Line, command: int, size: int) -> None:
        """Pass on the worker's answer, or what is missing of it: where it failed, zeros."""
        sent = 0
        try:
            line.expect(size)
            for piece in rpc.answer_pieces(size, line.receive):
                client.sendall(piece)
                sent += len(piece)
        except _WorkerGone as gone:
            self.fail(gone.problem)
            line.close()
            whole = rpc.answer(self._stand_ins.get(command, b"").ljust(size, b"\0"))
            client.sendall(whole[sent:])


class _WorkerGone(Exception):
    """The worker's end failed, and not llama.cpp's."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _Line:
    """The connection of a relay to its worker; one that failed takes everything and has nothing."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._connection: socket.socket | None = None
        self._is_telling = False  # whether it can be asked while it computes

    def __enter__(self) -> Self:
        if self._relay.failure:
            return self
        try:
            self._require_free()
            self._connection = connect(self._relay.worker)
            self._connection.settimeout(self._relay.look_s)
        except OSError as problem:
            self._relay.fail(problem)
        return self

    def _require_free(self) -> None:
        """Wait a moment for a worker that serves somebody: maybe our own connection just ended."""
        for _ in range(_WAITS):
            found = self._status()
            self._is_telling = found is not None
            if found is None or not found.get("busy"):
                return
            time.sleep(_WAIT_S)
        raise ConnectionError("another program uses it")

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it, if the worker is there."""
        view = memoryview(data)
        try:
            while view and self._connection is not None:
                view = view[self._patiently(self._connection.send, view) :]
        except _WorkerGone as gone:
            self._relay.fail(gone.problem)
            self.close()

    def expect(self, size: int) -> None:
        """Begin to read an answer of this size. Raises _WorkerGone."""
        told = rpc.read_size(self.receive)
        if told != size:
            raise _WorkerGone(ConnectionError(f"it answered with {told} bytes in place of {size}"))

    def receive(self, view: memoryview) -> int:
        """What has come, at most as much as there is room for. Raises _WorkerGone."""
        if self._connection is None:
            raise _WorkerGone(ConnectionError("the connection was closed"))
        count = self._patiently(self._connection.recv_into, view)
        if not count:
            raise _WorkerGone(ConnectionError("it closed the connection"))
        return count

    def _patiently(self, move: Callable[[memoryview], int], view: memoryview) -> int:
        """Wait as long as the worker is alive."""
        start = time.monotonic()
        while True:
            try:
                return move(view)
            except TimeoutError as problem:
                silent = time.monotonic() - start > _MOST_SILENCE_S
                try:
                    is_gone = self._status() is None if self._is_telling else silent
                except OSError:
                    is_gone = True
                if is_gone:
                    raise _WorkerGone(problem) from problem
            except OSError as problem:
                raise _WorkerGone(problem) from problem

    def _status(self) -> dict[str, Any] | None:
        """What it says about itself; None where it says nothing. Raises where nobody is there."""
        try:
            return status(self._relay.worker, self._relay.reply_s)
        except ConnectionRefusedError:
            raise
        except (OSError, ValueError):
            return None


_P = ctypes.c_void_p
_NO_TENSOR = "^no tensor has this name$"
_relays: dict[str, Relay] = {}  # by worker
_lock = threading.Lock()


class Placed:
    """Layers of one model on several devices; without any, `gpu_layers` as llama.cpp spreads them.

    What is computed where its weights lie keeps to what was planned: llama.cpp would copy weights
    of the processor's layers to a GPU for each larger batch, into memory that it takes there, and
    would not rearrange them for its processor's kernels.
    `overrides` are as of `RunConfig`.
    `labels` has what the bytes of each are reported under, by the name in llama.cpp's log.
    Raises UnsupportedError where this llama.cpp has no RPC, and BackendError for a device that is
    not there any more.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        gpu_layers: int,
        overrides: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._devices = devices
        self._overrides = overrides
        self._gpu_layers = gpu_layers
        most: dict[str, int] = {}
        for device in devices:
            if device.worker:
                most[device.worker] = max(device.number + 1, most.get(device.worker, 0))
        with _lock:  # kept, since llama.cpp never forgets an endpoint, until one fails
            for worker, count in most.items():
                if worker not in _relays or _relays[worker].failure:
                    _relays[worker] = Relay(worker, count)
            self._relays = {worker: _relays[worker] for worker in most}
        self.has_workers = bool(self._relays)
        self._kept: list[Any] = []  # what llama.cpp has addresses of
        names = (
            f"RPC{one.number}[{self._relays[one.worker].endpoint}]" if one.worker else one.name
            for one in devices
        )
        self.labels = {name: one.label for name, one in zip(names, devices, strict=True)}

    def apply(self, params: Any) -> None:
        """Let a model be loaded like that."""
        devices = self._devices
        set_params(params, n_gpu_layers=self._gpu_layers, no_host=True)
        if not devices and self._gpu_layers:
            return
        handles = [self._handle(device) for device in devices]
        table = (_P * (len(handles) + 1))(*handles, None)
        self._kept = [table]
        # None: a GPU computes nothing either.
        set_params(params, devices=ctypes.cast(table, _P).value)
        if devices:
            most = max(len(devices), int(library().llama_max_devices()))
            shares = (ctypes.c_float * most)(*(device.layers for device in devices))
            self._kept.append(shares)
            set_params(params, tensor_split=shares)
        if devices or self._overrides:
            self._override(params, handles)

    def _override(self, params: Any, handles: Sequence[int]) -> None:
        memory_of = ggml_function("ggml_backend_dev_buffer_type", _P, _P)
        memories = {HOST: ggml_function("ggml_backend_cpu_buffer_type", _P)()}
        for device, handle in zip(self._devices, handles, strict=False):
            memories[device.label] = memory_of(handle)
        table = (_P * (2 * len(self._overrides) + 4))()
        # No tensor has this name. With any such rule steps run one after the other: computing
        # several at once takes four copies of what passes between devices, and serves prompts only.
        for i, (pattern, label) in enumerate([*self._overrides, (_NO_TENSOR, HOST)]):
            text = ctypes.c_char_p(pattern.encode(errors="surrogatepass"))
            self._kept.append(text)
            table[2 * i], table[2 * i + 1] = ctypes.cast(text, _P), memories[label]
        self._kept.append(table)
        set_params(params, tensor_buft_overrides=ctypes.cast(table, _P).value)

    def check(self) -> None:
        """Raises BackendError where a worker failed since the model was loaded."""
        for relay in self._relays.values():
            if relay.failure:
                raise BackendError(relay.failure, hint=relay.hint)

    def _handle(self, device: Device) -> int:
        if not device.worker:
            by_name = ggml_function("ggml_backend_dev_by_name", _P, ctypes.c_char_p)
            handle = by_name(device.name.encode())
        else:
            relay = self._relays[device.worker]
            registry = rpc_function("ggml_backend_rpc_add_server", _P, ctypes.c_char_p)(
                relay.endpoint.encode()
            )
            self.check()
            get = ggml_function("ggml_backend_reg_dev_get", _P, _P, ctypes.c_size_t)
            handle = get(registry, device.number) if registry else None
        if not handle:
            raise BackendError(f"llama.cpp does not see {device.name} any more")
        return int(handle)


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp's RPC part, which is asked for by name. Raises UnsupportedError."""
    require_rpc()
    registry = ggml_function("ggml_backend_reg_by_name", _P, ctypes.c_char_p)(b"RPC")
    find = ggml_function("ggml_backend_reg_get_proc_address", _P, _P, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(registry, name.encode()))
