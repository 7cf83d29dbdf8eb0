"""Workers are asked for their devices, and what keeps them from being used is told."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fake_worker import ANSWERS, STATUS, FakeWorker

from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.device import rpc
from edgespec.memory.device.workers import address_of, status, unreachable, worker_devices


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50052", ("127.0.0.1", 50052)),
        ("jetson.local:1", ("jetson.local", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text", ["jetson", ":50052", "a:0", "a:65536", "a:b", "::1:50052", "a:1:2"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="is no worker's address") as caught:
        address_of(text)
    assert "HOST:PORT" in caught.value.hint


def test_an_edgespec_worker_tells_about_its_devices() -> None:
    with FakeWorker() as worker:
        (found,) = worker_devices((worker.address,))
    assert (found.name, found.worker, found.number) == (worker.address, worker.address, 0)
    assert found.description == f"Some CPU of worker {worker.address}"
    assert (found.free_bytes, found.total_bytes) == (3 << 30, 4 << 30)
    assert (found.bytes_per_s, found.shares_memory) == (2e10, False)
    assert 0 < found.latency_s < 5
    assert worker.received == [], "it may be in use: nothing else is asked"


def test_what_a_worker_takes_to_answer_is_no_part_of_the_trip() -> None:
    with FakeWorker({**STATUS, "took_s": 100.0}) as worker:
        (found,) = worker_devices((worker.address,))
    assert found.latency_s == 0.0


@pytest.mark.parametrize("took", [None, [1]])
def test_what_it_says_of_that_may_make_no_sense(took: Any) -> None:
    with FakeWorker({**STATUS, "took_s": took}) as worker, pytest.raises(BackendError):
        worker_devices((worker.address,))


def test_llama_cpps_own_server_is_asked_in_its_protocol() -> None:
    with FakeWorker(status=None) as worker:
        found = worker_devices((worker.address,))
    assert [one.name for one in found] == [f"{worker.address}/0", f"{worker.address}/1"]
    assert {one.free_bytes for one in found} == {1 << 30}
    assert [one.bytes_per_s for one in found] == [0.0, 0.0], "it does not tell"
    memory = [rpc.Command.GET_DEVICE_MEMORY] * 2
    assert worker.received == [rpc.Command.HELLO, rpc.Command.DEVICE_COUNT, *memory]


@pytest.mark.parametrize(("version", "is_told"), [((6, 9), True), ((8, 0), True), ((7, 1), True)])
def test_another_version_of_the_protocol_is_told(version: tuple[int, int], is_told: bool) -> None:
    own = {**ANSWERS, rpc.Command.HELLO: bytes((*version, 0, 0)) + bytes(24)}
    edgespec_one: dict[str, Any] = {**STATUS, "protocol": [*version, 0]}
    for worker in (FakeWorker(edgespec_one), FakeWorker(None, own)):
        with worker, pytest.raises(UnsupportedError) as caught:
            worker_devices((worker.address,))
        assert f"speaks version {version[0]}.{version[1]}" in str(caught.value)
        assert "this llama.cpp 7.0" in str(caught.value)


def test_no_worker_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BackendError, match=f"no worker at {address}.*refused") as caught:
        worker_devices((address,))
    assert caught.value.hint == "start one there: edgespec worker"


def test_a_worker_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError) as caught:
            status(address, 0.05)
    assert f"worker {address} does not answer" in str(unreachable(address, caught.value))


@pytest.mark.parametrize(
    "wrong",
    [{"devices": 3}, {"devices": [{}]}, {"devices": [{"free_bytes": "x"}]}, {"protocol": []}],
)
def test_nonsense_is_told(wrong: dict[str, Any]) -> None:
    with FakeWorker({**STATUS, **wrong}) as worker, pytest.raises(BackendError) as caught:
        worker_devices((worker.address,))
    assert "makes no sense" in str(caught.value)


def test_a_worker_is_named_once() -> None:
    with pytest.raises(UnsupportedError, match="named twice"):
        worker_devices(("a:1", "b:1", "a:1"))
