"""Frames of the workers' protocol: read, passed on in pieces, and refused where they are none."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from edgespec.memory.device import rpc


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_small_request_is_read_as_a_whole(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    theirs.sendall(struct.pack("<BQ", rpc.Command.FREE_BUFFER, 8) + bytes(range(8)))
    request = rpc.read_request(ours)
    assert request == rpc.Request(rpc.Command.FREE_BUFFER, 8, bytes(range(8)))
    assert request.head == struct.pack("<BQ", rpc.Command.FREE_BUFFER, 8) + bytes(range(8))
    assert (request.left, request.answer_bytes) == (0, None)


def test_of_a_large_request_the_head_comes_first(
    line: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = line
    size, data = 1 << 17, bytes(range(256)) * 512
    theirs.sendall(struct.pack("<BQ", rpc.Command.GRAPH_COMPUTE, size))
    request = rpc.read_request(ours)
    assert request is not None and (request.left, request.data) == (size, b"")
    theirs.sendall(data)
    assert b"".join(map(bytes, rpc.pieces(request.left, ours.recv_into))) == data


def test_a_tensor_has_as_many_bytes_as_are_asked_for() -> None:
    data = bytes(300) + struct.pack("<Q", 12345)
    assert rpc.Request(rpc.Command.GET_TENSOR, len(data), data).answer_bytes == 12345
    assert rpc.Request(rpc.Command.HELLO, 24, bytes(24)).answer_bytes == 28


def test_the_end_of_a_connection_is_told_from_a_request_that_breaks_off(
    line: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = line
    theirs.sendall(b"\1\2")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="closed"):
        rpc.read_request(ours)
    assert rpc.read_request(ours) is None


@pytest.mark.parametrize(
    ("command", "size"),
    [
        (rpc.Command.GRAPH_COMPUTE, 1 << 60),
        (rpc.Command.GET_TENSOR, 3),
        (rpc.Command.GET_TENSOR, 1 << 20),
    ],
)
def test_a_request_of_an_impossible_size_is_none(
    line: tuple[socket.socket, socket.socket], command: int, size: int
) -> None:
    ours, theirs = line
    theirs.sendall(struct.pack("<BQ", command, size))
    with pytest.raises(ConnectionError, match=f"{size} bytes"):
        rpc.read_request(ours)


def test_an_answer_of_another_size_is_refused(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    theirs.sendall(rpc.answer(b"12345"))
    with pytest.raises(ConnectionError, match="5 bytes"):
        rpc.ask(ours, rpc.Command.DEVICE_COUNT)
