"""Options from variables and files: which of them holds, and what a wrong line is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import Command


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """Runs the command in an empty folder below the project's."""
    here = tmp_path / "project" / "below"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("COLUMNS", "200")
    return command


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path / "project" / "edgespec.toml"


@pytest.fixture
def user(say: Command) -> Path:
    """The file of the user, which is not there yet."""
    from edgespec.cli import settings

    path = settings.user_file()
    path.parent.mkdir(parents=True)
    return path


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


def test_config_show_names_the_files(say: Command, project: Path, user: Path) -> None:
    project.write_text("ctx = 512\n")
    _, out, told = say("config", "show")
    assert ["--ctx", "512", str(project)] in [line.split() for line in out.splitlines()]
    assert told == f"read: {project}\nnot there: {user}\n"
    assert say("config", "show", "fly")[0] == 2


# -- help -----------------------------------------------------------------------------------------


def test_help_is_in_groups_and_every_option_is_in_one(say: Command) -> None:
    _, out, _ = say("run", "--help")
    titles = [line for line in out.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        *("Arguments:", "Model and prompt:", "Sampling:", "Form of the answer:"),
        *("Memory and device:", "Drafts:", "Output:", "Options:"),
    ]
    last = out.split("\nOptions:\n")[1].split("\n\n")[0]
    assert last.strip() == "-h, --help  Show this message and exit."


@pytest.mark.parametrize("asked", ["", "run", "models", "quantize type", "worker"])
def test_help_fits_a_narrow_terminal_and_cuts_no_sentence_off(
    say: Command, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = say(*asked.split(), "--help")
    below_usage = out.split("\n\n", 1)[1]
    wrapped = [line for line in below_usage.splitlines() if not line.startswith("  -")]
    assert max(map(len, wrapped)) <= 40
    assert not re.search(r"\w\.\.\.$", below_usage, re.MULTILINE)


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [(KeyboardInterrupt, 130, "interrupted\n"), (BrokenPipeError, 141, "")],
)
def test_an_end_from_outside_has_its_own_status(
    say: Command, end: type[BaseException], status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> None:
        raise end

    monkeypatch.setattr("edgespec.cli.config._row", ends)
    assert say("config", "show") == (status, "", told)


def test_values_in_help_are_words(say: Command) -> None:
    _, out, _ = say("run", "--help")
    assert "--ctx-size N " in out and "--file FILE " in out and "--stop TEXT " in out
    assert "<str>" not in out and "<int" not in out


def test_a_command_with_few_options_has_one_list(say: Command) -> None:
    _, out, _ = say("doctor", "--help")
    assert "\nOptions:\n" in out and "Output:" not in out


@pytest.mark.parametrize(
    ("alias", "option"),
    [
        ("-m", "--model"),
        ("-hf", "--hf-repo"),
        ("-p", "--prompt"),
        ("--ctx-size", "--ctx"),
        ("--n-gpu-layers", "--gpu-layers"),
        ("-md", "--draft-model"),
        ("-ctk", "--cache-type-k"),
        ("-ctv", "--cache-type-v"),
        ("--temp", "--temperature"),
        ("--n-predict", "--max-tokens"),
    ],
)
def test_words_of_llama_cpp_are_known(say: Command, alias: str, option: str) -> None:
    _, out, _ = say("run", "--help")
    names = [line.split("<")[0].replace(",", "").split() for line in out.splitlines()]
    assert any(alias in line and option in line for line in names)


@pytest.mark.model
@pytest.mark.parametrize(
    "arguments",
    [("-ctk", "q8_0"), ("-ctk", "q8_0", "-ctv", "f16"), ("-ctk", "q9", "-ctv", "q9")],
)
def test_cache_types_that_cannot_be_are_misuse(say: Command, arguments: tuple[str, ...]) -> None:
    assert say("plan", *arguments)[0] == 2


@pytest.mark.model
def test_llama_cpps_cache_types_are_ours(say: Command) -> None:
    _, out, _ = say("plan", "-ctk", "q8_0", "-ctv", "q8_0", "--json")
    assert json.loads(out)["plan"]["kv_type"]["value"] == "q8_0"


@pytest.mark.model
@pytest.mark.parametrize("word", ["none", "plain"])
def test_plain_and_none_are_one_drafter(say: Command, word: str) -> None:
    _, out, _ = say("plan", "--drafter", word, "--json")
    assert json.loads(out)["plan"]["drafter"]["value"] == "none"
