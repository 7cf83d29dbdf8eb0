"""Options from variables and files: which of them holds, and what a wrong line is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import Command
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from edgespec.cli import settings
from edgespec.cli.main import app
from edgespec.errors import EdgespecError

ROOT: Any = typer.main.get_command(app)


def held(say: Command, command: str = "run") -> dict[str, tuple[Any, str]]:
    """What `config show --json` says, by option."""
    status, out, _ = say("config", "show", command, "--json")
    assert status == 0
    return {one["option"]: (one["value"], one["from"]) for one in json.loads(out)}


def test_without_anything_all_is_default(say: Command) -> None:
    assert {told for _, told in held(say).values()} == {"default"}
    assert held(say)["max-tokens"] == (512, "default")


def test_sub_commands_have_tables_of_their_own(say: Command, project: Path) -> None:
    project.write_text("[tune]\nmax-kl = 0.5\n")
    assert held(say, "tune")["max-kl"] == held(say, "quantize tune")["max-kl"]
    assert held(say, "tune")["max-kl"] == (0.5, str(project))
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
    project.write_text("ctx = -2\n")
    status, _, error = say("plan")
    assert status == 2 and "ctx" in error
    project.write_text('ctx = "many"\n')
    status, _, error = say("plan")
    assert status == 1 and f"{project} sets ctx to what is no whole number" in error


@pytest.mark.model
def test_a_model_of_a_file_gives_way_to_an_argument(say: Command, user: Path) -> None:
    user.write_text('model = "no.gguf"\n')
    assert "there is no file no.gguf" in say("plan")[2]
    assert say("plan", "embedded")[0] == 0


# -- a project's file, which a stranger wrote ------------------------------------------------------

# Options that name a file, a host, a key, a model or another program, or do more than answer. A new
# option is in neither list, and this test fails until somebody has decided.
FORBIDDEN = set(
    """
    alias allowed-host any any-model api-key api-key-file audio backend check color cors
    cpu-moe csv data device draft-model drafter exact file from grammar grammar-file hf-repo
    host html image imatrix json json-schema json-schema-file keep-alive kernels kind kv load
    log-file log-format log-prompts memory mmproj model models no-shift output override-tensor
    pairs pin pooling port prompt prompts quick raw regex remember report switch system tensor
    trace-drafts truncate types verbose work workers
    """.split()
)
ALLOWED = {
    "accept",
    *("dimensions", "image-max-tokens", "images"),
    *("bits", "budget", "cache-type-k", "cache-type-v", "ctx", "draft-max", "dry-allowed-length"),
    *("dry-base", "dry-multiplier", "dry-penalty-last-n", "dry-sequence-breaker", "dynatemp-exp"),
    *("dynatemp-range", "exit-layer", "frequency-penalty", "gpu-layers", "head-size", "kv-type"),
    *("large-share", "latency", "logit-bias", "max-kl", "max-tokens", "min-p", "minutes"),
    *(
        "mirostat",
        "mirostat-ent",
        "mirostat-lr",
        "n-cpu-moe",
        "per-task",
        "prefer",
        "presence-penalty",
    ),
    *("quality", "repeat-last-n", "repeat-penalty", "repeats", "samplers", "seed", "stop"),
    *(
        "temperature",
        "think-budget",
        "threads",
        "top-k",
        "top-n-sigma",
        "top-p",
        "typical",
        "users",
    ),
    *("xtc-probability", "xtc-threshold"),
}


def options() -> dict[str, list[Any]]:
    """Parameters of all commands by their names."""
    found: dict[str, list[Any]] = {}
    for name, command in settings.commands(ROOT):
        for parameter in command.params:
            if settings.option_name(parameter) in settings._option_names(command, name):
                found.setdefault(settings.option_name(parameter), []).append(parameter)
    return found


def test_every_option_is_decided_upon() -> None:
    decided = {
        name: {settings.is_for_projects(p) for p in all_} for name, all_ in options().items()
    }
    assert {name for name, are in decided.items() if are == {True}} == ALLOWED
    assert {name for name, are in decided.items() if are == {False}} == FORBIDDEN


def test_a_number_is_no_name_of_a_file(say: Command, user: Path) -> None:
    user.write_text("file = 0\n")
    assert say("run", "Hi")[2].startswith(f"error: {user} sets file to what is no text")


@pytest.mark.parametrize(
    "line",
    [
        *("ctx = 1.5", "ctx = true", "ctx = [1]", "ctx = 99999999999999999999", "ctx = 1979-05-27"),
        *("temperature = true", "exact = 1", "stop = [[1]]", 'budget = "a\\u0000b"', "budget = {}"),
    ],
)
def test_a_value_of_another_type_is_told(say: Command, project: Path, line: str) -> None:
    project.write_text(f"[run]\n{line}\n")
    status, _, told = say("run", "no.gguf", "Hi")
    assert status == 1
    assert f"error: {project} sets {line.split()[0]} to what is no " in told


def test_files_with_byte_order_marks_are_read_and_other_bytes_are_told(
    say: Command, project: Path
) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        project.write_text("seed = 5\r\n", encoding=encoding)
        assert held(say)["seed"] == (5, str(project))
    project.write_bytes(b"seed = 5 # caf\xe9\n")
    status, _, told = say("config", "show")
    assert status == 1 and f"{project} is not UTF-8 text: byte 14 is 0xe9" in told


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a" * (1 << 20) + "bcd = 1"])
def test_files_made_to_take_time_or_memory_are_told(say: Command, project: Path, text: str) -> None:
    project.write_text(text)
    status, _, told = say("config", "show")
    assert status == 1 and f"error: {project} " in told


NAMES = st.sampled_from(sorted(FORBIDDEN | ALLOWED)) | st.text(max_size=5)
PLAIN = (
    st.integers() | st.floats() | st.booleans() | st.text(max_size=9)
    | st.sampled_from(["auto", "1GiB", "q8_0", "1=2", "none", "\x1b[31m"])
)  # fmt: skip
VALUES = PLAIN | st.lists(PLAIN | st.lists(PLAIN, max_size=1), max_size=2)
TABLES = st.dictionaries(NAMES, VALUES, max_size=4)
COMMANDS = sorted(name for name, _ in settings.commands(ROOT))


def written(values: dict[str, Any], tables: dict[str, dict[str, Any]]) -> bytes:
    """A TOML document."""

    def line(name: str, value: Any) -> str:
        # JSON's texts are TOML's, but for halves of pairs, which these have not, and for DEL.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        text = text.replace("NaN", "nan").replace("Infinity", "inf")
        return f"{json.dumps(name, ensure_ascii=False)} = {text}\n"

    parts = [line(*item) for item in values.items()]
    for name, table in tables.items():
        parts += [f"[{json.dumps(name)}]\n", *(line(*item) for item in table.items())]
    return "".join(parts).encode("utf-8", "replace")


@pytest.mark.slow
@settings_of_hypothesis(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(written, TABLES, st.dictionaries(st.sampled_from(COMMANDS), TABLES, max_size=2))
    | st.binary(max_size=60),
    st.sampled_from(COMMANDS),
    st.booleans(),
)
def test_no_file_ends_in_a_traceback(
    say: Command, project: Path, user: Path, data: bytes, name: str, is_own: bool
) -> None:
    """A command's options are taken from any file, or refused in a sentence."""
    path = user if is_own else project
    path.write_bytes(data)
    command = dict(settings.commands(ROOT))[name]
    try:
        context = command.make_context(name, ["x"], parent=command.context_class(ROOT))
        assert context.params
    except EdgespecError as problem:
        assert str(path) in str(problem)
    except Exception as problem:  # the library's usage errors have no public name
        assert getattr(problem, "exit_code", None) == 2, problem
    finally:
        path.unlink()
