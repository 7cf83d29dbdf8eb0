"""MCP servers: their tools are called; what hangs, dies or floods ends its call and no more."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from serving_cases import HELLO, Serve, Speaker, Tools
from waiting import PATIENCE_S, in_thread, join, until

from edgespec.cli.start import start_tools
from edgespec.decode.engine import Engine
from edgespec.decode.generation import ToolCall
from edgespec.errors import UnsupportedError
from edgespec.serve.server import Server
from edgespec.serve.tool_servers import ToolServers

PROGRAM = Path(__file__).parents[1] / "support" / "serving" / "tool_server.py"
STDIO = {"command": sys.executable, "args": [str(PROGRAM), "by-hand"]}
slow = pytest.mark.slow  # a client imports its package for a second, and so do some servers


@pytest.fixture(autouse=True)
def short_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has ended is waited for where init is slow to see it, and who does not is killed soon."""
    monkeypatch.setattr("edgespec.serve.tool_servers._END_S", 0.3)


def started(folder: Path, *allowed: str, **servers: Any) -> closing[ToolServers]:
    """Servers, which end with the block."""
    file = folder / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers or {"tools": STDIO}}))
    return closing(start_tools(file, allowed))


def call(servers: ToolServers, name: str = "weather", size: int = 100, **values: str) -> str:
    if name == "weather" and not values:
        values = {"city": "Rome"}
    return servers.result(ToolCall("", name, json.dumps(values)), size)


@slow
def test_tools_are_listed_and_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all servers that start; what two of them have gets another name."""
    none, off = {"command": "no-such-program"}, {**STDIO, "disabled": True}
    names = ["weather", "read_file", "hang", "die", "flood"]
    names += [f"more_{name}" for name in names]
    (tmp_path / "a.txt").write_text("hello")
    packaged = {**STDIO, "args": [str(PROGRAM)]}
    both = {"tools": packaged, "more": STDIO}
    with started(tmp_path, "read_file", none=none, off=off, **both) as servers:
        assert [one["function"]["name"] for one in servers.tools] == names
        told = capsys.readouterr().err
        assert told.startswith("none: no tools: ") and "off" not in told
        assert told.endswith(f"[tools: {', '.join(names)}]\n")
        function = servers.tools[0]["function"]
        assert function["description"] == "The weather of a city."
        assert function["parameters"]["properties"]["city"]["type"] == "string"
        assert call(servers, size=8) == "Rain in \n[4 characters cut off]"
        assert call(servers, "more_weather", city="Oslo") == "Rain in Oslo"
        assert call(servers, "read_file", path=str(tmp_path / "a.txt")) == "hello"
        assert call(servers, "read_file", path="nothing").startswith("error: ")
        assert call(servers, "owl") == "error: there is no such tool"
        wrong = [servers.result(ToolCall("", "weather", one), 100) for one in ("{", "[]")]
        assert wrong == 2 * ["error: the arguments are no object, or cut off"]
        assert [servers.may_call(one) for one in ("weather", "read_file")] == [False, True]
        servers.allowed = {"*"}
        assert servers.may_call("weather")


@slow
def test_a_broken_server_ends_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is started again by the next one; the server itself has no limit of memory."""
    with started(tmp_path) as servers:
        if sys.platform == "linux":
            import resource

            (process,) = servers._servers[0]._started
            assert process.rlimit(resource.RLIMIT_DATA)[0] > 1 << 40
        guest = servers._servers[0]._guest
        hasty = guest._limits._replace(patience_s=0.5)
        for name, problem in (("die", ""), ("flood", "than 24 MiB"), ("hang", "than 0.5 s")):
            with monkeypatch.context() as changed:  # not while a server starts
                changed.setattr(guest, "_limits", hasty if name == "hang" else guest._limits)
                told = call(servers, name)
            assert told.startswith("error: ") and problem in told
            assert call(servers) == "Rain in Rome"


@slow
def test_no_server_outlives_its_client(tmp_path: Path) -> None:
    """Nor one whose call hangs, in another thread, which is ended; nor that of a server."""
    with started(tmp_path) as servers, started(tmp_path) as others, Engine(Speaker()) as engine:
        processes = [one._servers[0]._started[0] for one in (servers, others)]
        guests = [one._servers[0]._guest.pid for one in (servers, others)]
        lock = servers._servers[0]._guest._lock

        def is_asked() -> bool:
            if is_free := lock.acquire(blocking=False):
                lock.release()
            return not is_free

        thread, told = in_thread(lambda: call(servers, "hang"))
        until(is_asked)
        servers.close()
        join(thread)
        assert told[0].startswith("error: ")
        Server(engine, tools=others).close()
        for one in processes:
            assert not one.is_running() or one.status() == psutil.STATUS_ZOMBIE
        assert not {*guests} & {None, *psutil.pids()}


@slow
def test_a_server_calls_tools_that_are_reached_over_http(tmp_path: Path, serve: Serve) -> None:
    """As the page asks for it. Requests of others have no tools that they did not send."""
    from tool_server import server as tools

    config = uvicorn.Config(tools().streamable_http_app(), port=0, log_level="critical")
    running = uvicorn.Server(config)
    thread, _ = in_thread(running.run)
    until(lambda: running.started)
    url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/mcp"
    key = {"x-api-key": "secret"}
    with started(tmp_path, "weather", web={"url": url}) as servers:
        address = serve(Speaker(), tools=servers, keys=["secret"])
        assert httpx.post(f"{address}/tools", json={"name": "weather"}).status_code == 401
        with httpx.Client(base_url=address, headers=key, timeout=PATIENCE_S) as client:
            listed = {"tools": servers.tools, "allowed": ["weather"]}
            assert client.get("/tools").json() == listed
            for body, told in (
                ({"name": "weather", "arguments": '{"city": "Rome"}'}, '{"content":"Rain in Ro'),
                ({"name": "read_file"}, '{"content":"error: '),
                ({"arguments": "{}"}, '{"error":'),
            ):
                assert client.post("/tools", json=body).text.startswith(told)
            answer = client.post("/v1/chat/completions", json={"messages": HELLO}).json()
            assert answer["choices"][0]["message"]["content"] == "Hello, world!"
    running.should_exit = True
    join(thread)


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


def test_no_page_of_the_internet_calls_tools(serve: Serve) -> None:
    """One that may come in without a key is refused from the start."""
    for option, how in ("--cors", "origins"), ("--allowed-host", "hosts"):
        with pytest.raises(UnsupportedError, match=option):
            serve(Speaker(), tools=Tools(), **{how: ["*"]})
        serve(Speaker(), tools=Tools(), keys=["secret"], **{how: ["*"]})
