"""A server in a program, where its packages are missing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from waiting import PATIENCE_S

from edgespec.backends.base import AnswerFormat
from edgespec.decode.engine import Engine
from edgespec.errors import UnsupportedError
from edgespec.serve import server
from edgespec.serve.server import Server, bind
from edgespec.serve.service import Service
from edgespec.testing import ByteTokenizer

# As where the extra was not installed: nothing of it is found, and importing it would fail.
PROGRAM = """
import importlib.util, sys

hidden = ("anyio", "starlette", "uvicorn")
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in hidden else found(name, *more)
sys.modules.update(dict.fromkeys(hidden))

import edgespec
from edgespec.testing import scripted_engine

try:
    edgespec.Server(scripted_engine())
except edgespec.MissingDependencyError as problem:
    print(problem, "|", problem.hint)
"""


def test_missing_packages_are_a_sentence() -> None:
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    wanted = "a server needs the package starlette | pip install 'edgespec[serve]'\n"
    assert (made.stdout, made.stderr) == (wanted, "")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(FakeBackend(lambda context: [0.0], 1)) as made:
        yield made


def test_a_server_that_others_reach_needs_a_key_however_it_is_started(engine: Engine) -> None:
    with Server(engine) as server:
        for host in ("0.0.0.0", "", "::"):
            with pytest.raises(UnsupportedError, match="others could use a server on"):
                server.start(host)
        with socket.socket() as everywhere:  # of somebody who did not ask `bind`
            everywhere.bind(("0.0.0.0", 0))
            with pytest.raises(UnsupportedError, match=r"others could use a server on 0\.0\.0\.0"):
                server.run(everywhere)
    with Server(engine, keys=["key"]) as server:
        port = server.start("0.0.0.0").rpartition(":")[2]
        address, key = f"http://127.0.0.1:{port}", {"authorization": "Bearer key"}
        hosts = ("box.example", f"127.0.0.1:{port}")
        asked = [httpx.get(f"{address}/v1/models", headers={**key, "host": one}) for one in hosts]
        assert [one.status_code for one in asked] == [200, 200]
        assert httpx.get(f"{address}/v1/models").status_code == 401


@pytest.mark.parametrize("keys", [[], [""], ["  "], ["right", "\n"], ["a\nb"], ["\ud800"]])
def test_keys_that_are_none_are_refused(engine: Engine, keys: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"API key") as caught:
        Server(engine, keys=keys)
    assert caught.value.hint


def test_what_all_schemas_share_is_built_while_nobody_is_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the interpreter, and with it everybody's answers, for half a second."""
    busy, built, asked = threading.Event(), threading.Event(), list[str]()

    def grammar(_: ByteTokenizer, wanted: AnswerFormat) -> None:
        assert not busy.is_set()
        asked.append(wanted.kind)
        built.set()

    monkeypatch.setattr(ByteTokenizer, "grammar", grammar, raising=False)
    monkeypatch.setattr(ByteTokenizer, "trial", lambda *_: None, raising=False)
    monkeypatch.setattr(Service, "is_busy", property(lambda _: busy.is_set()))
    monkeypatch.setattr(server, "_QUIET_S", 0.01)
    busy.set()
    with Server(engine) as running:
        running.start()
        assert not built.wait(0.1)
        busy.clear()
        assert built.wait(PATIENCE_S) and asked == ["json_schema"]
        running.app()  # of a server of somebody else, which may answer at once
        assert asked == ["json_schema", "json_schema"]


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    """Neither has to listen by itself: the first one has the port as soon as it is bound."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnsupportedError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            bind("127.0.0.1", port)
        assert "--port" in caught.value.hint
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
            pass  # a client that comes early waits
    with pytest.raises(UnsupportedError, match="cannot listen"):
        bind("127.0.0.1", 70000)


def test_answers_are_sent_at_once() -> None:
    """A kernel that waits for more to send would hold each of them back for 40 ms."""

    async def without_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened = writer.get_extra_info("socket")
            found.set_result(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listener):
            with socket.create_connection(listener.getsockname(), timeout=PATIENCE_S):
                return await asyncio.wait_for(found, PATIENCE_S)

    assert asyncio.run(without_delay())


def test_windows_does_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """There SO_REUSEADDR means that two servers may have one."""
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with bind("127.0.0.1", 0) as listener:
        assert not listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
