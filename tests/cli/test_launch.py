"""`edgespec launch`: an agent gets a server's address, key and model, and its own arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Command, start
from pool_cases import Made

from edgespec.serve.pool import Member, Pool
from edgespec.serve.server import Server

KEY = ("--api-key", "secret")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server of two models, for who has its key; its page, which tells none, needs none."""
    pool = Pool([Member(Made(name)) for name in ("small", "a model")])
    with Server(pool, keys=["secret"]) as server:
        yield server.start()


@pytest.mark.skipif(os.name != "posix", reason="the program is a script of a shell")
def test_a_program_runs_in_this_ones_place_with_its_own_arguments(url: str, tmp_path: Path) -> None:
    program = tmp_path / "aider"
    program.write_text('#!/bin/sh\necho "$$ $OPENAI_API_BASE $OPENAI_API_KEY $*"\nexit 7\n')
    program.chmod(0o755)
    given = ("--url", f"{url}/v1/", *KEY, "--model", "a model", "--", "--yes", "x y")
    process = start(("launch", "aider", *given), str(tmp_path), PATH=str(tmp_path))
    told = f"{process.pid} {url}/v1 secret --model openai/a model --yes x y\n"
    assert (*process.communicate(), process.returncode) == (told.encode(), b"", 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["aider", *KEY, "--print"], ["OPENAI_API_BASE=URL/v1 ", "aider --model openai/small"]),
        (["claude", *KEY, "--print"], ["=URL ANTHROPIC_AUTH_TOKEN=secret ", "MODEL=small claude"]),
        (["codex", *KEY, "--print"], ["=secret codex ", "URL/v1", 'wire_api="responses"']),
        ([], ["no program was named", "hint: name one of aider, claude, codex"]),
        (["vim"], ["no way to launch 'vim'", "hint: name one of aider"]),
        (["aider", "--url", "http://127.0.0.1:9"], ["no server of models", "edgespec serve"]),
        (["aider", "--url", "no address"], ["no server of models", "--url"]),
        (["aider"], ["answered 401", "hint: --api-key"]),
        (["aider", "--url", "URL/other", *KEY], ["answered 404", "hint: --url"]),
        (["aider", "--url", "URL/?"], ["no server of models", "--url"]),
        (["aider", *KEY, "--model", "x"], ["no model 'x'", "hint: it has small, a model"]),
        (["codex", *KEY], ["codex is not on the PATH", "--print"]),
    ],
)
def test_what_would_run_is_printed_or_why_it_cannot(
    url: str, monkeypatch: pytest.MonkeyPatch, command: Command, arguments: list[str],
    words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")
    at = [] if "--url" in arguments else ["--url", url]
    done = command("launch", *(one.replace("URL", url) for one in arguments), *at)
    assert done.status == int("--print" not in arguments)
    told = done.err if done.status else done.out
    assert all(word.replace("URL", url) in told for word in words)
