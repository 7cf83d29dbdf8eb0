"""What a worker lends, and how its front speaks for llama.cpp's server."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing

import pytest
from rpc_workers import NO_RPC, LocalWorker, local_worker

from edgespec.backends.llama.worker import Worker
from edgespec.memory.device import rpc
from edgespec.memory.device.accelerators import has_rpc
from edgespec.memory.device.workers import connect, status, worker_devices

KIB, MIB = 1 << 10, 1 << 20
needs_rpc = pytest.mark.skipif(not has_rpc(), reason=NO_RPC)


def test_what_a_device_has_rounded_up_leaves_nothing() -> None:
    worker = Worker.__new__(Worker)
    worker._memory_bytes, worker._taken = 100, {7: 60}
    assert worker._left_bytes == 40
    worker._taken[9] = 90
    assert worker._left_bytes == 0


@pytest.fixture(scope="module")
def lent() -> Iterator[LocalWorker]:
    with local_worker("--threads", "1", "--memory", "1MiB") as worker:
        yield worker


@needs_rpc
def test_it_tells_about_itself_at_any_time(lent: LocalWorker) -> None:
    (device,) = worker_devices((lent.address,))
    assert device.free_bytes == device.total_bytes == MIB and device.bytes_per_s > 0
    with closing(connect(lent.address)) as program:
        rpc.ask(program, rpc.Command.HELLO, bytes(rpc.HELLO_BYTES))
        assert status(lent.address)["busy"] is True
    assert tuple(status(lent.address)["protocol"][:2]) == rpc.PROTOCOL


@needs_rpc
def test_memory_is_lent_up_to_the_limit(lent: LocalWorker) -> None:
    """Half of it, then no other half and a bit, then that once the first one is given back."""

    def allocate(size: int) -> int:
        request = struct.pack("<IQ", 0, size)
        return int(struct.unpack("<QQ", rpc.ask(connection, rpc.Command.ALLOC_BUFFER, request))[0])

    def free() -> int:
        (free_bytes, _) = struct.unpack(
            "<QQ", rpc.ask(connection, rpc.Command.GET_DEVICE_MEMORY, struct.pack("<I", 0))
        )
        return int(free_bytes)

    with closing(connect(lent.address)) as connection:
        rpc.ask(connection, rpc.Command.HELLO, bytes(rpc.HELLO_BYTES))
        first = allocate(512 * KIB)
        assert first and 500 * KIB < free() <= 512 * KIB
        assert allocate(600 * KIB) == 0
        give_back = rpc.Request(rpc.Command.FREE_BUFFER, 8, struct.pack("<Q", first))
        connection.sendall(give_back.head)
        assert allocate(600 * KIB) != 0
