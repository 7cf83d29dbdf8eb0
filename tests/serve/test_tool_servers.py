"""MCP servers: their tools are called; what hangs, dies or floods ends its call and no more."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from serving_cases import HELLO, Serve, Speaker
from waiting import in_thread, join, until

from edgespec.decode.engine import Engine
from edgespec.decode.generation import ToolCall
from edgespec.errors import UnsupportedError
from edgespec.serve.server import Server
from edgespec.serve.tool_servers import ToolServers

PROGRAM = Path(__file__).parents[1] / "support" / "serving" / "tool_server.py"
STDIO = {"command": sys.executable, "args": [str(PROGRAM)]}
Start = Callable[..., ToolServers]
pytestmark = pytest.mark.slow  # a server imports its package for seconds


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, which end with the test."""
    with ExitStack() as opened:

        def begin(*allowed: str, tell: Any = print, **servers: Any) -> ToolServers:
            file = tmp_path / "mcp.json"
            file.write_text(json.dumps({"mcpServers": servers or {"tools": STDIO}}))
            found = ToolServers(file, allowed, tell)
            opened.callback(found.close)
            return found

        yield begin


def names(servers: ToolServers) -> list[str]:
    return [one["function"]["name"] for one in servers.tools]


def call(servers: ToolServers, name: str = "weather", size: int = 100, **values: str) -> str:
    asked = json.dumps(values or {"city": "Rome"})
    return servers.result(ToolCall("", name, asked), size)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_tools_are_listed_and_called(start: Start, tmp_path: Path) -> None:
    servers = start("read_file")
    assert names(servers) == ["weather", "read_file", "hang", "die", "flood"]
    function = servers.tools[0]["function"]
    assert function["description"] == "The weather of a city."
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    assert call(servers, size=8) == "Rain in \n[4 characters cut off]"
    (tmp_path / "a.txt").write_text("hello")
    assert call(servers, "read_file", path=str(tmp_path / "a.txt")) == "hello"
    assert call(servers, "read_file", path="nothing").startswith("error: ")
    assert call(servers, "owl") == "error: there is no such tool"
    for wrong in ("{", "[]"):
        told = servers.result(ToolCall("", "weather", wrong), 100)
        assert told == "error: the arguments are no object, or cut off"
    assert [servers.may_call(one) for one in ("weather", "read_file")] == [False, True]
    assert start("*").may_call("weather")


def test_a_broken_server_ends_its_call(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is started again by the next one; the server itself has no limit of memory."""
    servers = start()
    if sys.platform == "linux":
        import resource

        (process,) = servers._servers[0]._started
        assert process.rlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    guest = servers._servers[0]._guest
    hasty = guest._limits._replace(patience_s=0.5)
    for name, problem in (("die", ""), ("flood", "more than 24 MiB"), ("hang", "more than 0.5 s")):
        with monkeypatch.context() as changed:  # not while a server starts
            changed.setattr(guest, "_limits", hasty if name == "hang" else guest._limits)
            told = call(servers, name)
        assert told.startswith("error: ") and problem in told
        assert call(servers) == "Rain in Rome"


def test_no_server_outlives_its_client(start: Start) -> None:
    """Nor one whose call hangs, in another thread, which is ended."""
    servers = start()
    (process,) = servers._servers[0]._started
    thread, told = in_thread(lambda: call(servers, "hang"))
    until(lambda: servers._servers[0]._guest._lock.acquire(blocking=False) is False)
    servers.close()
    join(thread)
    assert told[0].startswith("error: ") and has_ended(process)
    servers.close()
    servers = start()
    (process,) = servers._servers[0]._started
    with Engine(Speaker()) as engine, Server(engine, tools=servers):
        pass
    assert has_ended(process)


def test_servers_that_do_not_start_are_left_out(start: Start) -> None:
    told = list[str]()
    named = {"none": {"command": "no-such-program"}, "off": {**STDIO, "disabled": True}}
    servers = start(tell=told.append, **named, tools=STDIO, more=STDIO)
    assert names(servers)[0] == "weather" and names(servers)[5] == "more_weather"
    assert len(told) == 1 and told[0].startswith("none: no tools: ")
    assert call(servers, "more_weather", city="Oslo") == "Rain in Oslo"


def test_servers_may_be_reached_over_http(start: Start) -> None:
    from tool_server import server as tools

    config = uvicorn.Config(tools.streamable_http_app(), port=0, log_level="critical")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        servers = start(web={"url": f"http://127.0.0.1:{port}/mcp"})
        assert call(servers) == "Rain in Rome"
        servers.close()
    finally:
        running.should_exit = True
        thread.join(20)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is no file of MCP") for text in ("", "[]", "{}", '{"mcpServers": 5}', "{")),
        ('{"mcpServers": {"a": {"args": []}}}', "a has neither command nor url"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(UnsupportedError, match=problem) as caught:
        ToolServers(tmp_path / "mcp.json", (), print)
    assert "mcpServers" in caught.value.hint


def test_a_server_lists_tools_and_calls_one(start: Start, serve: Serve) -> None:
    """As the page asks for it. Requests of others have no tools that they did not send."""
    servers = start("weather")
    address, key = serve(Speaker(), tools=servers, keys=["secret"]), {"x-api-key": "secret"}
    with httpx.Client(base_url=address, headers=key, timeout=100) as client:
        listed = {"tools": servers.tools, "allowed": ["weather"]}
        assert client.get("/tools").json() == listed
        for body, told in (
            ({"name": "weather", "arguments": '{"city": "Rome"}'}, '{"content":"Rain in Rome"}'),
            ({"name": "die"}, '{"content":"error: '),
            ({"arguments": "{}"}, '{"error":'),
        ):
            assert client.post("/tools", json=body).text.startswith(told)
        answer = client.post("/v1/chat/completions", json={"messages": HELLO}).json()
        assert answer["choices"][0]["message"]["content"] == "Hello, world!"
    assert httpx.post(f"{address}/tools", json={"name": "weather"}).status_code == 401


def test_no_page_of_the_internet_calls_tools(start: Start, serve: Serve) -> None:
    """One that may come in without a key is refused from the start."""
    servers = start()
    asked: Any = {"--cors": {"origins": ["*"]}, "--allowed-host": {"hosts": ["*"]}}
    for option, how in asked.items():
        with pytest.raises(UnsupportedError, match=option) as caught:
            serve(Speaker(), tools=servers, **how)
        assert "--api-key" in caught.value.hint
        serve(Speaker(), tools=servers, keys=["secret"], **how)
