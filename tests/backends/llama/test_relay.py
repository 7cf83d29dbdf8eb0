"""A relay passes everything on, and answers where its worker fails: llama.cpp would abort."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from delaying import DelayingProxy
from fake_worker import ANSWERS, STATUS, FakeWorker
from waiting import PATIENCE_S, Lived

from edgespec.backends.llama.workers import Relay
from edgespec.memory.device import rpc
from edgespec.memory.device.workers import address_of


@contextmanager
def client_of(worker: str, **options: Any) -> Iterator[tuple[socket.socket, Relay]]:
    """As llama.cpp is connected to it."""
    relay = Relay(worker, 2, **{"look_s": 0.05, "reply_s": PATIENCE_S, **options})
    try:
        with socket.create_connection(address_of(relay.endpoint), 10.0) as client:
            yield client, relay
    finally:
        relay.close()


def hello(client: socket.socket) -> bytes:
    return rpc.ask(client, rpc.Command.HELLO, bytes(rpc.HELLO_BYTES))


def tensor(client: socket.socket, size: int) -> bytes:
    """Ask for that many bytes of a tensor."""
    data = bytes(288) + struct.pack("<Q", size)
    client.sendall(rpc.Request(rpc.Command.GET_TENSOR, len(data), data).head)
    assert rpc.read_size(client.recv_into) == size
    return rpc.read(size, client.recv_into)


def test_everything_is_passed_on() -> None:
    with FakeWorker() as worker, client_of(worker.address) as (client, relay):
        assert hello(client) == ANSWERS[rpc.Command.HELLO]
        graph = rpc.Request(rpc.Command.GRAPH_COMPUTE, 1 << 20)
        client.sendall(graph.head + bytes(graph.size))
        assert tensor(client, 5) == b"\1" * 5
        assert tensor(client, 3 << 18) == b"\1" * (3 << 18)
        assert worker.received == [
            rpc.Command.HELLO,
            rpc.Command.GRAPH_COMPUTE,
            rpc.Command.GET_TENSOR,
            rpc.Command.GET_TENSOR,
        ]
        assert relay.failure == ""
        relay.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address_of(relay.endpoint), 10.0)


@pytest.mark.parametrize("size", [40, 1 << 20])
def test_a_worker_that_dies_in_the_middle_of_an_answer(size: int) -> None:
    """All bytes come, whatever they are; later requests are answered, too, and the reason told."""
    with (
        FakeWorker(dies_on=rpc.Command.GET_TENSOR) as worker,
        client_of(worker.address) as (client, relay),
    ):
        hello(client)
        assert len(tensor(client, size)) == size
        assert f"worker {worker.address} is gone" in relay.failure
        assert "lost" in relay.hint
        assert tensor(client, 12) == bytes(12)
        client.sendall(rpc.Request(rpc.Command.GRAPH_COMPUTE, 1 << 20).head + bytes(1 << 20))
        assert rpc.ask(client, rpc.Command.ALLOC_BUFFER, bytes(12)) == bytes(16), "no memory"


def test_a_worker_that_hangs_is_noticed() -> None:
    with FakeWorker(silent_on=rpc.Command.GET_TENSOR) as worker, Lived() as lived:
        with client_of(worker.address) as (client, relay):
            hello(client)  # also where this process is stopped for a moment
            relay.reply_s = 0.2
            assert tensor(client, 12) == bytes(12)
            assert f"worker {worker.address} does not answer any more" == relay.failure
    assert lived.seconds < 10


def test_a_network_that_delivers_nothing_any_more_is_noticed() -> None:
    with FakeWorker() as worker, DelayingProxy(address_of(worker.address)) as proxy:
        with client_of(proxy.address) as (client, relay):
            hello(client)
            proxy.is_silent, relay.reply_s = True, 0.2
            assert tensor(client, 12) == bytes(12)
            assert "does not answer any more" in relay.failure


def test_a_worker_that_computes_for_long_is_waited_for() -> None:
    """It says that it is alive."""
    with FakeWorker() as worker, DelayingProxy(address_of(worker.address)) as proxy:
        with client_of(proxy.address) as (client, relay):
            hello(client)
            proxy.trip_s = 0.3
            assert tensor(client, 12) == b"\1" * 12
            assert relay.failure == ""


def test_where_nobody_is_llama_cpp_is_answered_all_the_same() -> None:
    """As far as it needs to be told that there is no memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with client_of(address) as (client, relay):
        assert hello(client)[:2] == bytes(rpc.PROTOCOL)
        assert rpc.ask(client, rpc.Command.DEVICE_COUNT) == struct.pack("<I", 2)
        assert struct.unpack("<Q", rpc.ask(client, rpc.Command.GET_ALIGNMENT, bytes(4))) == (128,)
        assert rpc.ask(client, rpc.Command.BUFFER_GET_BASE, bytes(8)) != bytes(8), "never NULL"
        assert relay.failure.startswith(f"there is no worker at {address}")


def test_a_worker_that_serves_another_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.backends.llama.workers._WAIT_S", 0.01)
    with (
        FakeWorker({**STATUS, "busy": True}) as worker,
        client_of(worker.address) as (client, relay),
    ):
        hello(client)
        assert "another program uses it" in relay.failure
        assert worker.received == []


def test_an_answer_of_another_size_ends_the_connection() -> None:
    answers = {**ANSWERS, rpc.Command.GET_ALIGNMENT: b"123"}
    with FakeWorker(answers=answers) as worker, client_of(worker.address) as (client, relay):
        hello(client)
        assert len(rpc.ask(client, rpc.Command.GET_ALIGNMENT, bytes(4))) == 8
        assert "3 bytes in place of 8" in relay.failure
