"""Servers of models that are functions, so that tests know every token beforehand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from browsing import CHROME, CHROMIUM
from fake_backend import FakeBackend
from pool_cases import SIZE, Made, PoolServer, Start
from serving_cases import TEMPLATE, Connect, ConnectAnthropic, Serve, Speaker

from edgespec.decode.engine import Engine
from edgespec.serve.parsing import Limits
from edgespec.serve.pool import Member, Pool, Shared
from edgespec.serve.server import Server
from edgespec.setup.planning import Capacity


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn looks 200 times a second whether it is to end, not 10 times: a test a server."""

    def sleep(seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds / 20)

    hasty = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr("uvicorn.server.asyncio", hasty)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, which end with the test; returns an address."""
    opened: list[tuple[Server, Engine, FakeBackend]] = []

    def start(backend: FakeBackend, *, limits: Limits | None = None, **options: object) -> str:
        template = options.pop("chat_template", TEMPLATE)
        drafts = {name: options.pop(name, None) for name in ("drafter", "curve")}
        engine = Engine(backend, chat_template=template, **drafts)  # type: ignore[arg-type]
        server = Server(engine, limits=limits, **options)  # type: ignore[arg-type]
        opened.append((server, engine, backend))
        return server.start()

    yield start
    for server, engine, backend in opened:
        if isinstance(backend, Speaker):
            backend.gate.set()
        server.close()
        engine.close()
    alive = {thread.name.partition("_")[0] for thread in threading.enumerate()}
    assert not alive & {"edgespec-engine", "edgespec-server", "edgespec-pool"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, or these tests are skipped."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(**CHROME)
        yield opened
        opened.close()


@pytest.fixture
def client() -> Iterator[Connect]:
    """OpenAI's client of the server at an address, closed with the test.

    It is a reference cycle: left to the garbage collector, its sockets may go before it closes
    them, in whatever test runs then.
    """
    from openai import OpenAI

    with ExitStack() as opened:
        yield lambda address: opened.enter_context(
            OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        )


@pytest.fixture
def anthropic_client() -> Iterator[ConnectAnthropic]:
    """Anthropic's client of the server at an address, closed with the test."""
    from anthropic import Anthropic

    with ExitStack() as opened:
        yield lambda address, api_key="none": opened.enter_context(
            Anthropic(base_url=address, api_key=api_key, max_retries=0)
        )


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers of models a, b and c, of which two fit.

    Unless such a server `collects`, nobody looks for cycles of models that leave: for a third of a
    second each, in a process with thousands of tests.
    """
    with ExitStack() as opened:

        def begin(
            *members: Member,
            room: int = 2 * SIZE,
            limits: Limits | None = None,
            clock: Callable[[], float] = monotonic,
            collects: bool = False,
        ) -> PoolServer:
            if not collects:
                monkeypatch.setattr("edgespec.serve.pool._collect", lambda: None)
            made = members or tuple(Member(Made(name)) for name in "abc")
            capacity, shared = Capacity({"host": room}, room), Shared(limits or Limits())
            server = PoolServer(Pool(made, capacity, shared=shared, clock=clock))
            server.models = {one.name: one.model for one in made}
            opened.callback(server.close)
            for one in server.models.values():
                opened.callback(one.gate.set)
            server.address = server.start()
            return server

        yield begin
    alive = {thread.name.partition("_")[0] for thread in threading.enumerate()}
    assert not alive & {"edgespec-engine", "edgespec-server", "edgespec-pool"}
