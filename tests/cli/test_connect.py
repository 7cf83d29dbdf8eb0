"""`--connect`: commands that ask a server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from serving_cases import TEMPLATE, Speaker
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.decode.engine import Engine
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
