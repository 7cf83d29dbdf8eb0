"""Workers: devices of other machines, or other processes, that llama.cpp computes on.

Asked directly, so that planning loads no inference library for it, and so that one that is not
there, hangs or speaks another version is told in a sentence: llama.cpp would end the process.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.memory.device import rpc
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.device.llama_binary import PACKAGE

_PATIENCE_S = 5.0  # until a worker that does not answer is given up
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+):(\d{1,5})")


def address_of(worker: str) -> tuple[str, int]:
    """Host and port. Raises UnsupportedError for anything but HOST:PORT."""
    match = _ADDRESS.fullmatch(worker)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise UnsupportedError(
            f"{worker!r} is no worker's address", hint="use HOST:PORT, such as 192.168.1.20:50052"
        )
    return match[1].strip("[]"), int(match[2])


def worker_devices(workers: Sequence[str]) -> tuple[Accelerator, ...]:
    """All devices of these workers, with the memory that is free there now.

    Raises BackendError for a worker that cannot be used, and UnsupportedError for an address that
    is none or named twice.
    """
    if len(set(workers)) < len(workers):
        raise UnsupportedError("a worker is named twice", hint="name each one once in --workers")
    return tuple(device for worker in workers for device in _devices(worker))


def connect(worker: str, patience_s: float = _PATIENCE_S) -> socket.socket:
    """A connection that says what it has at once, and notices a machine that is gone."""
    connection = socket.create_connection(address_of(worker), patience_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:  # some systems refuse where the other end has gone meanwhile
        connection.close()
        raise
    return connection


def status(worker: str, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
    """What an edgespec worker says about itself, even while it computes; `latency_s` is a trip.

    Raises OSError where it does not answer, and ConnectionError where it is another program's.
    """
    with connect(worker, patience_s) as connection:
        rpc.ask(connection, rpc.Command.STATUS)
        start = time.perf_counter()
        document = json.loads(rpc.ask(connection, rpc.Command.STATUS))
        if not isinstance(document, dict):
            raise ConnectionError("no status")
        trip_s = time.perf_counter() - start
        thinking_s = float(document.get("took_s", 0.0))
        return {**document, "latency_s": min(trip_s, max(0.0, trip_s - thinking_s))}


def _devices(worker: str) -> tuple[Accelerator, ...]:
    try:
        try:
            found = status(worker)
        except ConnectionRefusedError:
            raise
        except (ConnectionError, ValueError):  # llama.cpp's own server
            found = _asked(worker)
        require_protocol(worker, tuple(found["protocol"]))
        place, is_only = f"worker {worker}", len(found["devices"]) == 1
        return tuple(
            Accelerator(
                name=worker if is_only else f"{worker}/{number}",
                description=f"{one['description']} of {place}" if one.get("description") else place,
                total_bytes=int(one["total_bytes"]),
                free_bytes=int(one["free_bytes"]),
                shares_memory=False,
                worker=worker,
                number=number,
                bytes_per_s=float(one.get("bytes_per_s", 0.0)),
                latency_s=float(found["latency_s"]),
            )
            for number, one in enumerate(found["devices"])
        )
    except EdgespecError:
        raise
    except OSError as problem:
        raise unreachable(worker, problem) from problem
    except (KeyError, TypeError, ValueError) as problem:
        raise BackendError(f"what worker {worker} says about itself makes no sense") from problem


def _asked(worker: str) -> dict[str, Any]:
    """The same, of llama.cpp's server, which has one connection at a time."""
    with connect(worker) as connection:
        start = time.perf_counter()
        hello = rpc.ask(connection, rpc.Command.HELLO, bytes(rpc.HELLO_BYTES))
        latency_s = time.perf_counter() - start
        require_protocol(worker, (hello[0], hello[1]))
        (count,) = struct.unpack("<I", rpc.ask(connection, rpc.Command.DEVICE_COUNT))
        devices = []
        for number in range(count):
            sizes = rpc.ask(connection, rpc.Command.GET_DEVICE_MEMORY, struct.pack("<I", number))
            free, total = struct.unpack("<QQ", sizes)
            devices.append({"free_bytes": free, "total_bytes": total})
    return {"protocol": list(hello[:2]), "devices": devices, "latency_s": latency_s}


def require_protocol(worker: str, version: tuple[int, ...]) -> None:
    """Raises UnsupportedError for a version that llama.cpp would end the process for."""
    major, minor = version[:2]
    if major != rpc.PROTOCOL[0] or minor > rpc.PROTOCOL[1]:
        ours = ".".join(map(str, rpc.PROTOCOL))
        raise UnsupportedError(
            f"worker {worker} speaks version {major}.{minor} of llama.cpp's protocol, and this "
            f"llama.cpp {ours}",
            hint=f"use the same llama.cpp on both: that of {PACKAGE}",
        )


def unreachable(worker: str, problem: OSError) -> BackendError:
    """The error for a worker that gives no answer."""
    if isinstance(problem, ConnectionRefusedError):
        return BackendError(
            f"there is no worker at {worker}: the connection was refused",
            hint="start one there: edgespec worker",
        )
    if isinstance(problem, TimeoutError):
        return BackendError(
            f"worker {worker} does not answer",
            hint="is it stopped, behind a firewall, or llama.cpp's own and busy with another "
            "program?",
        )
    reason = problem.strerror or str(problem)
    return BackendError(f"worker {worker} cannot be reached: {reason}")
