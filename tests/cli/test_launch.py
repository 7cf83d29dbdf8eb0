"""`edgespec launch`: an agent gets a server's address, key and model, and its own arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgespec.cli.launch import PROGRAMS

MODELS = {"data": [{"id": "small"}, {"id": "a model"}]}


class _Server(BaseHTTPRequestHandler):
    """Tells its models to who has the key; at /other it is no server of models."""

    def do_GET(self) -> None:
        has_key = self.headers.get("Authorization") == "Bearer secret"
        self.send_response(200 if has_key else 401)
        self.end_headers()
        self.wfile.write(b"<html>" if "other" in self.path else json.dumps(MODELS).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def launch(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = os.environ["PATH"] if path is None else str(path)
    return subprocess.run(
        [sys.executable, "-m", "edgespec", "launch", *arguments],
        env={**os.environ, "PATH": places},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(os.name != "posix", reason="the program is a script of a shell")
def test_a_program_runs_with_its_own_arguments_and_ends_as_it_ends(
    url: str, tmp_path: Path
) -> None:
    program = tmp_path / "aider"
    program.write_text('#!/bin/sh\necho "$OPENAI_API_BASE $OPENAI_API_KEY $*"\nexit 7\n')
    program.chmod(0o755)
    key = ("--url", f"{url}/v1/", "--api-key", "secret")
    done = launch("aider", *key, "--model", "a model", "--", "--yes", "x y", path=tmp_path)
    assert done.stdout == f"{url}/v1 secret --model openai/a model --yes x y\n"
    assert done.returncode == 7 and not done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_would_run_is_printed_for_a_shell(url: str, program: str) -> None:
    done = launch(program, "--url", url, "--api-key", "secret", "--print")
    assert done.returncode == 0
    assert url in done.stdout and "small" in done.stdout and f" {program}" in done.stdout
    assert "secret" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        ([], "no program was named", "aider, claude, codex"),
        (["vim"], "no way to launch 'vim'", "aider, claude, codex"),
        (["aider", "--url", "http://127.0.0.1:9"], "no server of models", "edgespec serve"),
        (["aider", "--url", "no address"], "no server of models", "--url"),
        (["aider", "--url", "URL"], "answered 401", "--api-key"),
        (["aider", "--url", "URL/other", "--api-key", "secret"], "no server of models", "--url"),
        (["aider", "--url", "URL", "--api-key", "secret", "--model", "x"], "no model 'x'", "small"),
    ],
)
def test_what_cannot_be_launched_is_told(
    url: str, arguments: list[str], problem: str, hint: str
) -> None:
    done = launch(*(one.replace("URL", url) for one in arguments))
    first, _, rest = done.stderr.partition("\n\n")
    assert done.returncode == 1 and first.startswith("error: ") and problem in first
    assert rest.startswith("hint: ") and hint in rest


def test_a_program_that_is_not_there_is_told(url: str, tmp_path: Path) -> None:
    done = launch("codex", "--url", url, "--api-key", "secret", path=tmp_path)
    assert done.returncode == 1 and "codex is not on the PATH" in done.stderr
