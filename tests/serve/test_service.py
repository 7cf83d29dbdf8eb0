"""Whether anything can be answered, which is what health says."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest
from command_line import with_imports
from queue_cases import CHAT, HELLO
from serving_cases import Speaker
from waiting import PATIENCE_S

from edgespec.decode.engine import Engine
from edgespec.serve.server import Server

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
