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
from serving_cases import Serve, Speaker
from waiting import until

from edgespec.decode.generation import ToolCall
from edgespec.errors import UnsupportedError
from edgespec.serve.tool_servers import ToolServers

STDIO = {
    "command": sys.executable,
    "args": [str(Path(__file__).parents[1] / "support" / "serving" / "tool_server.py")],
}
Start = Callable[..., ToolServers]
pytestmark = pytest.mark.slow  # a server imports its package for seconds


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, which end with the test."""
    with ExitStack() as opened:

        def begin(
            *allowed: str, tell: Callable[[str], None] = print, **servers: Any
        ) -> ToolServers:
            file = tmp_path / "mcp.json"
            file.write_text(json.dumps({"mcpServers": servers or {"tools": STDIO}}))
            found = ToolServers(file, allowed, tell)
            opened.callback(found.close)
            return found

        yield begin


def names(servers: ToolServers) -> list[str]:
    return [one["function"]["name"] for one in servers.tools]


def call(servers: ToolServers, name: str, size: int = 100, **values: str) -> str:
    return servers.result(ToolCall("", name, json.dumps(values)), size)


def weather(servers: ToolServers, size: int = 100) -> str:
    return call(servers, "weather", size, city="Rome")


def test_tools_are_listed_and_called(start: Start, tmp_path: Path) -> None:
    servers = start("read_file")
    assert names(servers) == ["weather", "read_file", "hang", "die", "flood"]
    function = servers.tools[0]["function"]
    assert function["description"] == "The weather of a city."
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    assert weather(servers, 8) == "Rain in \n[4 characters cut off]"
    (tmp_path / "a.txt").write_text("hello")
    assert call(servers, "read_file", path=str(tmp_path / "a.txt")) == "hello"
    assert call(servers, "read_file", path="nothing").startswith("error: ")
    assert [servers.may_call(one) for one in ("weather", "read_file")] == [False, True]
    assert start("*").may_call("weather")
    assert call(servers, "owl") == "error: there is no such tool"
    for wrong in ("{", "[]"):
        told = servers.result(ToolCall("", "weather", wrong), 100)
        assert told == "error: the arguments are no object, or cut off"


def test_a_broken_server_ends_its_call(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is started again by the next one; the server itself has no limit of memory."""
    servers = start()
    if sys.platform == "linux":
        import resource

        (process,) = servers._servers[0]._started
        assert process.rlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    for name, problem in (("die", ""), ("flood", "more than 24 MiB")):
        told = call(servers, name)
        assert told.startswith("error: ") and problem in told
        assert weather(servers) == "Rain in Rome"
    guest = servers._servers[0]._guest
    with monkeypatch.context() as hasty:  # not while a server starts
        hasty.setattr(guest, "_limits", guest._limits._replace(patience_s=0.5))
        assert call(servers, "hang") == "error: it takes more than 0.5 s"
    assert weather(servers) == "Rain in Rome"


def test_no_server_outlives_its_client(start: Start) -> None:
    """Nor one whose call hangs, in another thread, which is ended."""
    servers, told = start(), list[str]()
    (process,) = servers._servers[0]._started
    calls = threading.Thread(target=lambda: told.append(call(servers, "hang")))
    calls.start()
    until(lambda: servers._servers[0]._guest._lock.acquire(blocking=False) is False)
    servers.close()
    calls.join(20)
    assert told and told[0].startswith("error: ")
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    servers.close()


def test_servers_that_do_not_start_are_left_out(start: Start) -> None:
    told = list[str]()
    servers = start(
        tell=told.append,
        none={"command": "no-such-program"},
        off={**STDIO, "disabled": True},
        tools=STDIO,
        more=STDIO,
    )
    assert names(servers)[0] == "weather" and names(servers)[5] == "more_weather"
    assert len(told) == 1 and told[0].startswith("none: no tools: ")
    assert call(servers, "more_weather", city="Oslo") == "Rain in Oslo"


def test_servers_may_be_reached_over_http(start: Start) -> None:
    import uvicorn
    from tool_server import server

    config = uvicorn.Config(server.streamable_http_app(), port=0, log_level="critical")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        servers = start(web={"url": f"http://127.0.0.1:{port}/mcp"})
        assert weather(servers) == "Rain in Rome"
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
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(UnsupportedError, match=problem) as caught:
        ToolServers(file, (), print)
    assert "mcpServers" in caught.value.hint


# -- through a server ------------------------------------------------------------------------------


def test_a_server_lists_tools_and_calls_one(start: Start, serve: Serve) -> None:
    """As the page asks for it. Requests of others have no tools that they did not send."""
    servers = start("weather")
    address = serve(Speaker(), tools=servers, keys=["secret"])
    with httpx.Client(base_url=address, headers={"authorization": "Bearer secret"}) as client:
        listed = client.get("/tools").json()
        assert listed == {"tools": servers.tools, "allowed": ["weather"]}

        def called(**body: Any) -> httpx.Response:
            return client.post("/tools", json=body, timeout=100)

        one = called(name="weather", arguments='{"city": "Rome"}')
        assert one.json() == {"content": "Rain in Rome"}
        assert called(name="die").json()["content"].startswith("error: ")
        assert called(arguments="{}").status_code == 400
        talk = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = client.post("/v1/chat/completions", json=talk).json()
        assert answer["choices"][0]["message"]["content"] == "Hello, world!"
        assert httpx.post(f"{address}/tools", json={"name": "weather"}).status_code == 401


def test_tools_end_with_their_server(start: Start) -> None:
    from edgespec.decode.engine import Engine
    from edgespec.serve.server import Server

    servers = start()
    (process,) = servers._servers[0]._started
    with Engine(Speaker()) as engine, Server(engine, tools=servers):
        pass
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("how", "option"), [({"origins": ["*"]}, "--cors"), ({"hosts": ["*"]}, "--allowed-host")]
)
def test_no_page_of_the_internet_calls_tools(
    start: Start, serve: Serve, how: dict[str, Any], option: str
) -> None:
    """One that may come in without a key is refused from the start."""
    servers = start()
    with pytest.raises(UnsupportedError) as caught:
        serve(Speaker(), tools=servers, **how)
    assert option in str(caught.value) and "--api-key" in caught.value.hint
    serve(Speaker(), tools=servers, keys=["secret"], **how)
