"""MCP servers beside a chat: called, shown, refused; what hangs, dies or floods ends its call."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from decoding_cases import END
from serving_cases import CALL, TEMPLATE, Speaker
from waiting import until

from edgespec.cli import chat_loop, tool_servers
from edgespec.cli.chat_loop import Chat
from edgespec.cli.tool_servers import ToolServers
from edgespec.decode.engine import Engine
from edgespec.decode.generation import ToolCall
from edgespec.errors import UnsupportedError

SERVER = Path(__file__).parents[1] / "support" / "serving" / "tool_server.py"
STDIO = {"command": sys.executable, "args": [str(SERVER)]}
Start = Callable[..., ToolServers]


pytestmark = pytest.mark.slow  # a server imports its package for seconds


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers, which end with the test, however long they take to start."""
    monkeypatch.setattr(tool_servers, "_START_S", 100.0)
    monkeypatch.setattr(tool_servers, "_CALL_S", 100.0)
    with ExitStack() as opened:

        def begin(allowed: str = "*", most: int = 4000, **servers: Any) -> ToolServers:
            file = tmp_path / "mcp.json"
            file.write_text(json.dumps({"mcpServers": servers or {"tools": STDIO}}))
            found = ToolServers(file, allowed.split(), most)
            opened.callback(found.close)
            return found

        yield begin


def call(name: str, **values: object) -> ToolCall:
    return ToolCall("c1", name, json.dumps(values))


def names(servers: ToolServers) -> list[str]:
    return [one["function"]["name"] for one in servers.tools]


def test_tools_are_listed_called_and_shown(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = start(most=8)
    assert names(servers) == ["weather", "read_file", "hang", "die", "flood"]
    function = servers.tools[0]["function"]
    assert function["description"] == "The weather of a city."
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    assert servers.result(call("weather", city="Rome")) == "Rain in \n[4 characters cut off]"
    assert '[calls weather({"city": "Rome"})]' in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("hello")
    assert servers.result(call("read_file", path=str(tmp_path / "a.txt"))) == "hello"
    assert servers.result(call("read_file", path="nothing")).startswith("error: ")
    assert servers.result(call("owl")).startswith("error: there is no such tool")
    cut = ToolCall("c1", "weather", '{"city": "Ro', is_whole=False)
    assert "cut off" in servers.result(cut)


def test_what_nobody_allowed_is_not_called(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a pipe nobody can be asked; a person is asked, and may say always."""
    servers = start("read_file")
    assert servers.result(call("weather", city="Rome")) == "error: the user does not want this call"
    assert "--allow NAME" in capsys.readouterr().err
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    answers = iter(["n", "y", "", "a"])
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    told = [servers.result(call("weather", city="Rome")) for _ in range(5)]
    assert [one == "Rain in Rome" for one in told] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("hang", "no answer within 0.5 s"), ("die", ""), ("flood", "sent more than 8 MiB")],
)
def test_a_broken_server_ends_its_call(
    start: Start, name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is started again by the next one."""
    servers = start()
    monkeypatch.setattr(tool_servers, "_CALL_S", 0.5 if name == "hang" else 100.0)
    monkeypatch.setattr(tool_servers, "_MOST_BYTES", 8 << 20 if name == "flood" else 1 << 40)
    told = servers.result(call(name))
    assert told.startswith("error: ") and problem in told
    monkeypatch.setattr(tool_servers, "_CALL_S", 100.0)
    monkeypatch.setattr(tool_servers, "_MOST_BYTES", 1 << 40)
    assert servers.result(call("weather", city="Oslo")) == "Rain in Oslo"


def test_no_server_outlives_the_chat(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that was being ended for a call that hung."""
    before = set(psutil.Process().children())
    servers = start()
    (process,) = set(psutil.Process().children()) - before
    monkeypatch.setattr(tool_servers, "_CALL_S", 0.5)
    assert "no answer" in servers.result(call("hang"))
    servers.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_servers_that_do_not_start_are_left_out(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = start(
        none={"command": "no-such-program"}, off={**STDIO, "disabled": True}, tools=STDIO
    )
    assert names(servers)[0] == "weather" and len(servers.tools) == 5
    told = capsys.readouterr().err
    assert "none: no tools" in told and "off" not in told


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
        assert servers.result(call("weather", city="Rome")) == "Rain in Rome"
        servers.close()
    finally:
        running.should_exit = True
        thread.join(20)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"mcpServers": 5}', '{"mcpServers": {"a": {"args": []}}}', "{"]
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(UnsupportedError) as caught:
        ToolServers(file, (), 100)
    assert "mcpServers" in caught.value.hint


def test_a_chat_makes_calls_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results go back until there is an answer, at most so many times."""
    speaker = Speaker(CALL)
    with Engine(speaker, chat_template=TEMPLATE) as engine:
        monkeypatch.setattr(Chat, "_load", lambda *_, **__: (None, engine))
        file = tmp_path / "mcp.json"
        file.write_text(json.dumps({"mcpServers": {"tools": STDIO}}))
        with Chat(None, None) as talk:  # type: ignore[arg-type]
            talk.take_tools(file, ["weather"])
            talk.session.tools = talk.session.tools[:1]  # of this model a letter is a token
            monkeypatch.setattr(chat_loop, "_MOST_ROUNDS", 3)
            rounds = iter([[*b"It rains."], [*CALL.encode()]])
            result = talk.tools.result  # type: ignore[union-attr]

            def called(one: ToolCall) -> str:
                speaker.ids = [*next(rounds), END]
                return result(one)

            monkeypatch.setattr(talk.tools, "result", called)
            talk.say("Weather?")
            told = talk.session.messages
            assert [one["role"] for one in told] == ["user", "assistant", "tool", "assistant"]
            assert told[2]["content"] == "Rain in Rome" and told[3]["content"] == "It rains."
            assert "It rains." in capsys.readouterr().out
            monkeypatch.setattr(talk.tools, "result", result)
            speaker.ids = [*CALL.encode(), END]
            talk.say("Again?")
            made = [one for one in talk.session.messages[4:] if one["role"] == "tool"]
            assert len(made) == 3
