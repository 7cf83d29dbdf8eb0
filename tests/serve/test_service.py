"""Whether anything can be answered, which is what health says; how grammars wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from command_line import with_imports
from decoding_cases import END, VOCAB
from queue_cases import CHAT, HELLO
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S, until

from edgespec.backends.base import AnswerFormat, Grammar
from edgespec.decode.engine import Engine
from edgespec.errors import UnsupportedError
from edgespec.serve import service
from edgespec.serve.server import Server
from edgespec.testing import ByteTokenizer

FORKED = """
import asyncio, os, sys
import httpx
from serving_cases import HELLO, Speaker
from edgespec.decode.engine import Engine
from edgespec.serve.server import Server

app = Server(Engine(Speaker())).app()  # as gunicorn --preload does

async def ask():
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as client:
        health = await client.get("/health")
        chat = await client.post("/v1/chat/completions", json={"messages": HELLO})
        print(health.status_code, chat.status_code, health.json()["error"]["message"], flush=True)

if child := os.fork():
    os.waitpid(child, 0)
else:
    asyncio.run(ask())
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process forks there")
def test_health_tells_of_a_fork_in_which_nothing_can_be_answered() -> None:
    made = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True,
        text=True,
        env=with_imports(),
        timeout=PATIENCE_S,
    )
    assert made.stdout.startswith("503 503 the engine was loaded by another process"), made.stderr


def test_health_tells_of_an_engine_that_is_closed() -> None:
    engine = Engine(Speaker())
    with Server(engine) as server:
        address = server.start()
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        engine.close()
        found = [httpx.get(f"{address}/health"), httpx.post(address + CHAT, json=HELLO)]
        assert [one.status_code for one in found] == [503, 503]
        assert "the engine is closed" in found[0].json()["error"]["message"]


class Trying(ByteTokenizer):
    """Tries each grammar until a gate opens, and refuses it then."""

    def __init__(self) -> None:
        super().__init__(VOCAB, END)
        self.gate, self.begun = threading.Event(), 0

    def trial(self, wanted: AnswerFormat) -> Callable[[], object] | None:
        return self._try if wanted.kind == "grammar" else None

    def grammar(self, wanted: AnswerFormat) -> Grammar:
        raise UnsupportedError(f"there is no {wanted.kind}")

    def _try(self) -> None:
        self.begun += 1
        assert self.gate.wait(PATIENCE_S)
        raise UnsupportedError("it was tried")


WITH_GRAMMAR: Any = {**HELLO, "grammar": 'root ::= "a"'}


def _begin(address: str) -> HTTPConnection:
    """A request whose grammar nobody has tried yet; closed, its client has left."""
    connection = HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("POST", CHAT, json.dumps(WITH_GRAMMAR))
    return connection


def _has_places(count: int) -> bool:
    return service._TRIALS._value == count


def test_three_grammars_wait_for_each_other_and_a_fourth_comes_again_later(serve: Serve) -> None:
    backend = Speaker()
    backend.tokenizer = tokenizer = Trying()
    address = serve(backend)
    with ExitStack() as stack:
        stack.callback(tokenizer.gate.set)
        asked = [stack.enter_context(closing(_begin(address))) for _ in range(3)]
        until(lambda: _has_places(0))
        refused = httpx.post(address + CHAT, json={**WITH_GRAMMAR, "stream": True})
        assert tokenizer.begun == 1, "one at a time"
        assert httpx.post(address + CHAT, json=HELLO).status_code == 200, "others wait for none"
        tokenizer.gate.set()
        assert [one.getresponse().status for one in asked] == [400] * 3
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert _has_places(3), "all are free again"


def test_who_leaves_gives_up_the_place_of_a_grammar_that_waits(serve: Serve) -> None:
    backend = Speaker()
    backend.tokenizer = tokenizer = Trying()
    address = serve(backend)
    with ExitStack() as stack:
        stack.callback(tokenizer.gate.set)
        first = stack.enter_context(closing(_begin(address)))
        until(lambda: tokenizer.begun)
        others = [_begin(address) for _ in range(2)]
        until(lambda: _has_places(0))
        for one in others:
            one.close()
        until(lambda: _has_places(2))
        assert tokenizer.begun == 1, "nobody tries what nobody waits for"
        tokenizer.gate.set()
        assert first.getresponse().status == 400
