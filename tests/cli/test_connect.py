"""`--connect`: commands that ask a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from canned_server import HEAD, event, sending
from command_line import ESCAPE, Command
from serving_cases import TEMPLATE, Speaker
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.decode.engine import Engine
from edgespec.errors import BackendError
from edgespec.serve.client import Client, Event
from edgespec.serve.server import Server


@pytest.fixture
def address() -> Iterator[str]:
    with Engine(Speaker(), chat_template=TEMPLATE) as engine, Server(engine) as server:
        yield server.start()


def test_run_answers_with_a_server(address: str) -> None:
    done = CliRunner().invoke(app, ["run", "Hi", "--connect", address])
    assert done.exit_code == 0
    assert done.stdout == "Hello, world!\n"
    assert done.stderr.startswith("14 tokens, ")
    raw = CliRunner().invoke(
        app, ["run", "edgespec", "Hi", "--raw", "-n", "5", "--connect", address]
    )
    assert raw.stdout == "Hello\n"
    as_json = CliRunner().invoke(app, ["run", "Hi", "--json", "--connect", f"{address}/v1"])
    assert json.loads(as_json.stdout)["usage"]["completion_tokens"] == 14


def test_chat_talks_with_a_server(address: str) -> None:
    lines = "Hi\n/system Be brief\nMore\n/model x\n"
    done = CliRunner().invoke(app, ["chat", "--connect", address], input=lines)
    assert done.stdout == "Hello, world!\nHello, world!\n"
    assert "system: Be brief" in done.stderr
    assert "there is no command /model with a server" in done.stderr
    assert done.exit_code == 1


def test_what_a_server_chooses_itself_is_misuse(address: str) -> None:
    for option, value in (("--threads", "2"), ("--ctx", "99"), ("--budget", "1GiB")):
        done = CliRunner().invoke(app, ["run", "Hi", option, value, "--connect", address])
        assert done.exit_code == 2
        assert f"{option} is the server's to choose" in done.stderr


# -- a server that breaks off, or sends what steers a terminal -------------------------------------

BROKEN = [HEAD, event("Hel"), event("lo\x1b[2J"), b"data: {oops\n\n"]


def test_what_came_before_a_failure_is_kept(command: Command) -> None:
    with sending(BROKEN) as address:
        status, out, err = command("run", "Hi", "--connect", address)
    assert (status, out) == (1, "Hello\x1b[2J\n")  # to a pipe as it is
    assert err.startswith("error: the server broke off: it sent what is no answer of OpenAI's")
    with sending(BROKEN) as address:
        done = command("run", "Hi", "--json", "--connect", address)
    assert done.status == 1 and done.err.startswith("error: the server broke off")
    assert (done.document["text"], done.document["finish_reason"]) == ("Hello\x1b[2J", "error")


def test_a_chat_goes_on_after_a_failure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []

    def stream(_client: Client, _path: str, body: dict[str, Any]) -> Iterator[Event]:
        bodies.append(body)
        yield Event("Hel", "", {}, {})
        if len(bodies) == 1:
            raise BackendError("the server broke off")
        yield Event("lo", "stop", {"completion_tokens": 2}, {"predicted_per_second": 3})

    monkeypatch.setattr(Client, "stream", stream)
    status, out, err = command("chat", "--connect", "http://a", stdin="Hi\nGo on\n")
    assert (status, out) == (1, "Hel\nHello\n")
    assert "error: the server broke off" in err
    said = [(one["role"], one["content"]) for one in bodies[1]["messages"]]
    assert said == [("user", "Hi"), ("assistant", "Hel"), ("user", "Go on")]


def test_words_of_a_server_do_not_steer_a_terminal(command: Command) -> None:
    error = b'HTTP/1.1 400 No\r\n\r\n{"error": {"message": "no\\u001b[2J\\nhint: do"}}'
    with sending([error]) as address:
        status, _, err = command("run", "Hi", "--connect", address)
    assert status == 1 and err == "error: the server refuses: no[2J hint: do\n"
    assert ESCAPE not in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_prompt_is_the_same_by_file_and_by_pipe(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str
) -> None:
    asked: list[str] = []

    def stream(_client: Client, _path: str, body: dict[str, Any]) -> Iterator[Event]:
        asked.append(body["messages"][0]["content"])
        yield Event("Hi", "stop", {}, {})

    monkeypatch.setattr(Client, "stream", stream)
    data = "één\r\ntwee\r\n".encode(encoding)
    (tmp_path / "prompt").write_bytes(data)
    command("run", "--connect", "http://a", "--file", str(tmp_path / "prompt"))
    command("run", "--connect", "http://a", stdin=data)
    assert asked == ["één\ntwee\n"] * 2


def test_other_bytes_are_no_prompt(command: Command, tmp_path: Path) -> None:
    """They were replacement characters, without a word."""
    (tmp_path / "prompt").write_bytes(b"caf\xe9")
    for arguments, name in (
        (("--file", str(tmp_path / "prompt")), str(tmp_path / "prompt")),
        ((), "stdin"),
        (("caf\udce9",), "the argument for model"),
        (("-p", "caf\udce9"), "the argument for asked"),
    ):
        status, _, err = command("run", *arguments, "--connect", "http://a", stdin=b"caf\xe9")
        assert status == 1
        assert err.startswith(f"error: {name} is not UTF-8 text: byte 3 is 0xe9\n\nhint: save it")
