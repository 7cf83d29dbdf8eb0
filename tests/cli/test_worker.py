"""`edgespec worker`, and `--workers` of the commands that plan."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from command_line import Command
from fake_worker import FakeWorker
from laid_out import machine_by_hand
from random_gguf import Q8_0, write_model

from edgespec.backends.llama import worker as served
from edgespec.memory.device import accelerators


class Served:
    """In place of a worker that serves until it is stopped."""

    asked: tuple[int | None, int] | None = None

    def __init__(self, memory_bytes: int | None, threads: int, _note: object) -> None:
        Served.asked = memory_bytes, threads

    def describe(self) -> str:
        return "Some CPU, 64 MiB"

    def run(self, _listener: socket.socket) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "Worker", Served)
    monkeypatch.setattr(served, "silence_c", lambda: None)
    monkeypatch.setattr(accelerators, "has_rpc", lambda: True)


@pytest.mark.usefixtures("stand_in")
def test_it_listens_on_this_machine_alone(command: Command) -> None:
    status, out, told = command("worker", "--port", "0", "--memory", "64MiB", "--threads", "3")
    assert (status, out, Served.asked) == (0, "", (64 << 20, 3))
    assert told.startswith("lending Some CPU, 64 MiB at 127.0.0.1:") and "warning" not in told


@pytest.mark.usefixtures("stand_in")
def test_others_are_let_in_only_where_it_is_said_twice(command: Command) -> None:
    for host in ("0.0.0.0", "::", "", "example.org"):
        status, _, told = command("worker", "--port", "0", "--host", host)
        assert status == 1 and f"error: a worker on {host} would run code" in told
        assert "ssh tunnel" in told and "--insecure" in told
    status, _, told = command("worker", "--port", "0", "--host", "0.0.0.0", "--insecure")
    assert status == 0
    assert told.startswith("warning: no authentication") and "ssh" in told


@pytest.mark.usefixtures("stand_in")
def test_a_host_that_is_meant_for_a_server_opens_no_worker(
    say: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a container's environment: only the command line says it."""
    monkeypatch.setenv("EDGESPEC_HOST", "0.0.0.0")
    monkeypatch.setenv("EDGESPEC_INSECURE", "1")
    status, _, told = say("worker", "--port", "0")
    assert status == 0 and " at 127.0.0.1:" in told and "warning" not in told


def test_a_port_in_use_is_told_at_once(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, told = command("worker", "--port", port)
    assert status == 1 and f"cannot listen on 127.0.0.1 port {port}" in told and "hint:" in told


def test_a_size_without_a_unit_is_misuse(command: Command) -> None:
    status, _, told = command("worker", "--memory", "4")
    assert status == 2 and "--memory 4 is no size" in told


def test_without_rpc_workers_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "has_rpc", lambda: False)
    status, _, told = command("worker", "--port", "0")
    assert status == 1 and "built without RPC" in told and "make clean install" in told


def test_a_plan_over_a_worker(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accelerators, "has_rpc", lambda: True)
    monkeypatch.setattr("edgespec.setup.planning.this_machine", machine_by_hand)
    file = str(write_model(tmp_path / "m.gguf", "llama", Q8_0))
    with FakeWorker() as one:
        arguments = ("plan", file, "--workers", one.address, "-ngl", "2")
        _, out, _ = command(*arguments, "--json")
        _, text, _ = command(*arguments)
    document = json.loads(out)
    (device,) = document["memory"]["devices"]
    assert (device["label"], device["name"], device["layers"]) == ("worker1", one.address, 2)
    components = document["memory"]["components"]
    assert device["predicted_bytes"] == sum(
        size for name, size in components.items() if name.startswith("worker1_")
    )
    assert f"2 on {one.address}, 3 here; as asked" in document["plan"]["gpu_layers"]["reason"]
    assert "worker1 weights" in text


def test_a_worker_that_is_not_there_is_told(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(accelerators, "has_rpc", lambda: True)
    file = str(write_model(tmp_path / "m.gguf", "llama", Q8_0))
    status, out, told = command("plan", file, "--workers", "127.0.0.1:1, 127.0.0.1:2")
    assert (status, out) == (1, "") and "there is no worker at 127.0.0.1:1" in told
