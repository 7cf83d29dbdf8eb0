"""Options from variables and files: which of them holds, and what a wrong line is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command


def held(say: Command, command: str = "run") -> dict[str, tuple[Any, str]]:
    """What `config show --json` says, by option."""
    status, out, _ = say("config", "show", command, "--json")
    assert status == 0
    return {one["option"]: (one["value"], one["from"]) for one in json.loads(out)}


def test_without_anything_all_is_default(say: Command) -> None:
    assert {told for _, told in held(say).values()} == {"default"}
    assert held(say)["max-tokens"] == (512, "default")


def test_sub_commands_have_tables_of_their_own(say: Command, project: Path) -> None:
    project.write_text("[tune]\nexact = true\n")
    assert held(say, "tune")["exact"] == held(say, "quantize tune")["exact"]
    assert held(say, "tune")["exact"] == (True, str(project))
    status, _, err = say("config", "show", "quantize")
    assert status == 2 and "there is no command quantize" in err


def test_variables_go_before_the_project_and_that_before_the_user(
    say: Command, project: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.write_text("ctx = 1024\nthreads = 1\nseed = 1\n")
    project.write_text("threads = 2\nseed = 2\n")
    monkeypatch.setenv("EDGESPEC_SEED", "3")
    found = held(say)
    assert found["ctx"] == (1024, str(user))
    assert found["threads"] == (2, str(project))
    assert found["seed"] == ("3", "EDGESPEC_SEED")


@pytest.mark.model
def test_the_command_line_goes_before_all(
    say: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def context(*arguments: str) -> Any:
        return json.loads(say("plan", "--json", *arguments)[1])["plan"]["context_size"]["value"]

    project.write_text("ctx = 512\n")
    assert context() == 512
    monkeypatch.setenv("EDGESPEC_CTX", "768")
    assert context() == 768
    assert context("--ctx-size", "1024") == 1024


def test_a_table_is_for_one_command(say: Command, project: Path) -> None:
    project.write_text('temperature = 0.5\n[chat]\ntemperature = 0.7\nstop = "END"\n')
    assert held(say)["temperature"] == (0.5, str(project))
    found = held(say, "chat")
    assert found["temperature"] == (0.7, str(project))
    assert found["stop"] == (["END"], str(project)), "one value of an option that takes several"


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("ctz = 1\n", "sets ctz, and no command has such an option", "near it: ctx"),
        ("[run]\nhtml = 'x'\n", "sets [run] html, and no", "`edgespec COMMAND --help`"),
        ("[fly]\nctx = 1\n", "has [fly], and there is no such command", ""),
        ("ctx 1\n", "cannot be read:", "ctx = 8192"),
        ("yes = true\n", "sets yes, and no command", ""),
    ],
)
def test_a_line_that_means_nothing_is_told(
    say: Command, project: Path, text: str, told: str, hint: str
) -> None:
    project.write_text(text)
    status, out, error = say("plan")
    assert (status, out) == (1, "")
    assert f"error: {project} {told}" in error
    assert hint in error


@pytest.mark.model
def test_values_of_files_are_checked_as_any(say: Command, project: Path) -> None:
    project.write_text("ctx = 0\n")
    status, _, error = say("plan")
    assert status == 2 and "ctx" in error
    project.write_text('ctx = "many"\n')
    assert say("plan")[0] == 2


@pytest.mark.model
def test_a_model_of_a_file_gives_way_to_an_argument(say: Command, project: Path) -> None:
    project.write_text('model = "no.gguf"\n')
    assert "there is no file no.gguf" in say("plan")[2]
    assert say("plan", "embedded")[0] == 0


# -- help -----------------------------------------------------------------------------------------
