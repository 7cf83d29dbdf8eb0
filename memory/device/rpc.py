"""The protocol of llama.cpp's RPC workers, as far as one has to know it to stand in between.

A request is a command (1 byte), a size (8 bytes) and so many bytes; an answer, which few commands
have, a size and so many bytes. Requests of a connection come one after the other, and its first one
is HELLO (`llama.cpp: ggml/src/ggml-rpc/ggml-rpc.cpp`). STATUS is edgespec's own: llama.cpp's server
closes the connection on it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

# Of llama-cpp-python 0.3.36. Other major versions, and later minor ones, end a client's process.
PROTOCOL = (7, 0)


class Command(IntEnum):
    """Those of the protocol; some without an answer, which nobody here looks at, are left out."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    STATUS = 0xED


HELLO_BYTES = 24  # of the request: what the connection could do besides TCP, all zero here
_ANSWER_BYTES: dict[int, int] = {
    Command.ALLOC_BUFFER: 16,
    Command.GET_ALIGNMENT: 8,
    Command.GET_MAX_SIZE: 8,
    Command.BUFFER_GET_BASE: 8,
    Command.SET_TENSOR_HASH: 1,
    Command.COPY_TENSOR: 1,
    Command.GET_DEVICE_MEMORY: 16,
    Command.GET_ALLOC_SIZE: 8,
    Command.HELLO: 28,
    Command.DEVICE_COUNT: 4,
}
_HEAD, _SIZE = struct.Struct("<BQ"), struct.Struct("<Q")
_SMALL = 1 << 16  # bytes of a request that is read as a whole
_PIECE = 1 << 18
_MOST_BYTES = 1 << 40

Receive = Callable[[memoryview], int]


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `data` are all of its bytes, or none where they are many and still to be read."""

    command: int
    size: int
    data: bytes = b""

    @property
    def head(self) -> bytes:
        """What it begins with, and all of it where it is small: sent at once, it is one packet."""
        return _HEAD.pack(self.command, self.size) + self.data

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        return self.size - len(self.data)

    @property
    def answer_bytes(self) -> int | None:
        """Bytes of the answer, or None where there is none."""
        if self.command == Command.GET_TENSOR:  # ends with how many are wanted
            return int(_SIZE.unpack_from(self.data, len(self.data) - _SIZE.size)[0])
        return _ANSWER_BYTES.get(self.command)


def read_request(connection: socket.socket) -> Request | None:
    """The next request, or None where the other end is done. Raises OSError where it breaks off."""
    receive, head = connection.recv_into, connection.recv(_HEAD.size)
    if not head:
        return None
    command, size = _HEAD.unpack(head + read(_HEAD.size - len(head), receive))
    if size > _MOST_BYTES or (command == Command.GET_TENSOR and not _SIZE.size <= size <= _SMALL):
        raise ConnectionError(f"a request of {size} bytes")
    return Request(command, size, read(size, receive) if size <= _SMALL else b"")


def read(size: int, receive: Receive) -> bytes:
    """Exactly so many bytes. Raises ConnectionError where the other end has gone."""
    return b"".join(map(bytes, pieces(size, receive)))


def pieces(size: int, receive: Receive) -> Iterator[memoryview]:
    """So many bytes as they come; each piece is overwritten by the next one."""
    buffer = memoryview(bytearray(min(size, _PIECE)))
    while size:
        count = receive(buffer[: min(size, _PIECE)])
        if not count:
            raise ConnectionError("the connection was closed")
        size -= count
        yield buffer[:count]


def read_size(receive: Receive) -> int:
    """The size of an answer."""
    return int(_SIZE.unpack(read(_SIZE.size, receive))[0])


def answer(data: bytes) -> bytes:
    """An answer as it is sent."""
    return _SIZE.pack(len(data)) + data


def answer_pieces(size: int, receive: Receive) -> Iterator[bytes | memoryview]:
    """An answer of that many bytes as it comes; a small one is one packet."""
    head = _SIZE.pack(size)
    for piece in pieces(size, receive):
        yield head + bytes(piece) if head else piece
        head = b""


def ask(connection: socket.socket, command: int, data: bytes = b"") -> bytes:
    """Send a request and read its answer. Raises OSError, also where the answer is no such one."""
    request = Request(command, len(data), data)
    connection.sendall(request.head)
    size, expected = read_size(connection.recv_into), request.answer_bytes
    if size > _SMALL or expected not in (None, size):
        raise ConnectionError(f"an answer of {size} bytes")
    return read(size, connection.recv_into)
