"""`edgespec launch`: an agent gets a server's address, key and model, and its own arguments."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from command_line import Command, run

from edgespec.cli.launch import PROGRAMS

KEY = ("--api-key", "secret")


class _Server(BaseHTTPRequestHandler):
    """Tells its models to who has the key; at /other it is no server of models."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers.get("Authorization") == "Bearer secret" else 401)
        self.end_headers()
        models = {"data": [{"id": "small"}, {"id": "a model"}]}
        self.wfile.write(b"<html>" if "other" in self.path else json.dumps(models).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(os.name != "posix", reason="the program is a script of a shell")
def test_a_program_runs_with_its_own_arguments_and_ends_as_it_ends(
    url: str, tmp_path: Path
) -> None:
    program = tmp_path / "aider"
    program.write_text('#!/bin/sh\necho "$OPENAI_API_BASE $OPENAI_API_KEY $*"\nexit 7\n')
    program.chmod(0o755)
    given = ("--url", f"{url}/v1/", *KEY, "--model", "a model", "--", "--yes", "x y")
    done = run("launch", "aider", *given, cache=str(tmp_path), PATH=str(tmp_path))
    assert done == (7, f"{url}/v1 secret --model openai/a model --yes x y\n", "")


SAID = ("OPENAI_API_BASE=", "ANTHROPIC_MODEL=small", 'edgespec.wire_api="responses"')


@pytest.mark.parametrize(("program", "says"), [*zip(PROGRAMS, SAID, strict=True)])
def test_what_would_run_is_printed_for_a_shell(
    url: str, command: Command, program: str, says: str
) -> None:
    done = command("launch", program, "--url", url, *KEY, "--print")
    assert done.status == 0
    assert all(one in done.out for one in (url, "small", "secret", says, f" {program}"))


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        ([], "no program was named", "aider, claude, codex"),
        (["vim"], "no way to launch 'vim'", "aider, claude, codex"),
        (["aider", "--url", "http://127.0.0.1:9"], "no server of models", "edgespec serve"),
        (["aider", "--url", "no address"], "no server of models", "--url"),
        (["aider", "--url", "URL"], "answered 401", "--api-key"),
        (["aider", "--url", "URL/other", *KEY], "no server of models", "--url"),
        (["aider", "--url", "URL", *KEY, "--model", "x"], "no model 'x'", "small"),
        (["codex", "--url", "URL", *KEY], "codex is not on the PATH", "--print"),
    ],
)
def test_what_cannot_be_launched_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch, command: Command, arguments: list[str], problem: str,
    hint: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")
    done = command("launch", *(one.replace("URL", url) for one in arguments))
    first, _, rest = done.err.partition("\n\n")
    assert done.status == 1 and first.startswith("error: ") and problem in first
    assert rest.startswith("hint: ") and hint in rest
