"""The command line: errors, wrong usage, help, and terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ESCAPE, Command, run
from random_gguf import Q8_0, write_model

from edgespec.cli.options import takes_options
from edgespec.memory.device import host
from edgespec.models.embedded import embedded_model

EMBEDDED = "EMBEDDED"  # stands for the path of the embedded model
FOLDER = "FOLDER"  # stands for the test's folder

# Arguments, and the whole of stderr: a sentence, an empty line, what to do next.
ERRORS = {
    "missing file": (
        ["run", "FOLDER/no.gguf", "Hi"],
        "error: there is no file FOLDER/no.gguf\n",
    ),
    "missing file, the only argument": (
        ["run", "FOLDER/no.gguf"],
        "error: there is no file FOLDER/no.gguf\n",
    ),
    "plan of a missing file": (
        ["plan", "FOLDER/no.gguf", "--json"],
        "error: there is no file FOLDER/no.gguf\n",
    ),
    "folder": (
        ["run", "FOLDER", "Hi"],
        "error: FOLDER is a folder\n\nhint: name the .gguf file in it\n",
    ),
    "garbage": (
        ["run", "FOLDER/garbage.gguf", "Hi", "--json"],
        "error: FOLDER/garbage.gguf is a file that begins with the bytes 00 01 02 03, not a GGUF "
        "model\n\nhint: name a GGUF file, or download this one again\n",
    ),
    "web page": (
        ["models", "show", "FOLDER/page.gguf"],
        "error: FOLDER/page.gguf is a web page, not a GGUF model\n\n"
        "hint: the link led to a login or an error; download the file itself\n",
    ),
    "missing prompt file": (
        ["run", "--file", "FOLDER/no.txt"],
        "error: cannot read FOLDER/no.txt: No such file or directory\n",
    ),
    "folder as prompt file": (
        ["run", "--file", "FOLDER"],
        "error: cannot read FOLDER: Is a directory\n",
    ),
    "context beyond what was trained": (
        ["plan", "--ctx", "100000"],
        "error: --ctx 100000 exceeds the 8192 tokens the model is made for\n\n"
        "hint: use --ctx 8192 or less\n",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "garbage.gguf").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "page.gguf").write_bytes(b"<!doctype html><title>404</title>")
    return tmp_path


@pytest.mark.model
@pytest.mark.parametrize(("arguments", "expected"), ERRORS.values(), ids=ERRORS.keys())
def test_what_cannot_be_met_is_one_sentence_and_a_hint(
    command: Command, folder: Path, arguments: list[str], expected: str
) -> None:
    done = command(*(text.replace(FOLDER, str(folder)) for text in arguments), stdin="Hi")
    told = done.err.replace(str(folder), FOLDER)
    assert (done.status, done.out) == (1, "")
    assert told.startswith(expected)
    assert re.fullmatch(r"error: [^\n]+\n\nhint: [^\n]+\n", told)


MISUSES = {
    "no such command": (["fly"], "fly"),
    "no such option": (["run", "--fly", "Hi"], "--fly"),
    "too many arguments": (["doctor", "b"], "b"),
    "empty prompt": (["run", EMBEDDED, ""], "the prompt is empty"),
    "blank prompt": (["run", EMBEDDED, " \n\t"], "the prompt is empty"),
    "nothing on stdin": (["run"], "the prompt is empty"),
    "two prompts": (["run", EMBEDDED, "Hi", "--file", "FOLDER/p.txt"], "not both"),
    "a prompt twice": (["run", EMBEDDED, "Hi", "--prompt", "Hi"], "not both"),
    "logit bias without a value": (
        ["run", "-p", "Hi", "--logit-bias", "junk"],
        "--logit-bias junk",
    ),
    "logit bias of a word": (["run", "-p", "Hi", "--logit-bias", "the=2"], "--logit-bias the=2"),
    "no tokens": (["run", "-p", "Hi", "--max-tokens", "0"], "--max-tokens"),
    "tokens in words": (["run", "-p", "Hi", "--max-tokens", "ten"], "--max-tokens"),
    "threads in words": (["run", "-p", "Hi", "--threads", "all"], "--threads"),
    "layers in words": (["run", "-p", "Hi", "--gpu-layers", "x"], "--gpu-layers"),
    "layers with two signs": (["run", "-p", "Hi", "--gpu-layers=--5"], "--gpu-layers"),
    "a temperature below zero": (["run", "-p", "Hi", "--temperature=-1"], "temperature"),
    "no threads": (["run", "-p", "Hi", "--threads", "-2"], "--threads"),
    "no context": (["run", "-p", "Hi", "--ctx", "-2"], "--ctx"),
    "unheard-of cache type": (["run", "-p", "Hi", "--kv-type", "q9_9"], "q9_9"),
    "unheard-of drafter": (["run", "-p", "Hi", "--drafter", "psychic"], "psychic"),
    "unheard-of backend": (["run", "-p", "Hi", "--backend", "abacus"], "abacus"),
    "unheard-of preference": (["plan", "--prefer", "beauty"], "beauty"),
    "a budget without a unit": (["plan", "--budget", "512"], "--budget 512"),
    "a budget in words": (["run", "-p", "Hi", "--budget", "much"], "--budget much"),
    "a budget of bits": (["plan", "--budget", "4Gib/s"], "--budget 4Gib/s"),
    "a budget below zero": (["plan", "--budget=-1GiB"], "--budget -1GiB"),
    "no budget at all": (["plan", "--budget", "0MiB"], "--budget 0MiB"),
    "a budget beyond all machines": (["plan", "--budget", "9999999999TiB"], "out of range"),
    "two dots in a budget": (["plan", "--budget", "1.5.2GiB"], "--budget 1.5.2GiB"),
}


@pytest.mark.model
@pytest.mark.parametrize(("arguments", "named"), MISUSES.values(), ids=MISUSES.keys())
def test_wrong_usage_names_the_option_or_value(
    command: Command, folder: Path, arguments: list[str], named: str
) -> None:
    """What no model on no machine could honour is wrong usage: status 2, not 1."""
    words = {EMBEDDED: str(embedded_model()), FOLDER: str(folder)}
    done = command(*(words.get(text, text) for text in arguments))
    assert done.out == ""
    assert named in done.err
    assert "Traceback" not in done.err and ESCAPE not in done.err
    assert done.status == 2


@pytest.mark.model
def test_what_does_not_fit_names_the_largest_that_does(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 300 << 20)
    done = command("plan", "--ctx", "8192")
    assert (done.status, done.out) == (1, "")
    match = re.fullmatch(
        r"error: needs \d+ MiB for 8192 tokens of context \(.+ MiB\); free: 296 MiB\n\n"
        r"hint: `--ctx (\d+)` fits; `--kv-type q8_0 --ctx (\d+)` fits: what it loses is "
        r"measured by the first load\n",
        done.err,
    )
    assert match is not None
    for options, tokens in (((), int(match[1])), (("--kv-type", "q8_0"), int(match[2]))):
        assert command("plan", *options, "--ctx", str(tokens)).status == 0, "the hint is true"
        larger = command("plan", *options, "--ctx", str(tokens + 256))
        assert larger.status == 1, "and the largest"


@pytest.mark.model
def test_a_budget_that_is_too_small_names_one_that_is_not(command: Command) -> None:
    done = command("plan", "--budget", "20MiB")
    assert (done.status, done.out) == (1, "")
    match = re.fullmatch(
        r"error: needs \d+ MiB for 768 tokens of context \(.+ MiB\); budget: 20 MiB\n\n"
        r"hint: `(--budget) (\d+MiB)` is enough\n",
        done.err,
    )
    assert match is not None
    assert command("plan", *match.groups()).status == 0
    answered = command("run", "Say something.", *match.groups(), "--stop", " ")
    assert answered.status == 0, "and a run with a short prompt does what the plan says"


@pytest.mark.model
def test_hints_name_commands_and_options_that_exist(command: Command, folder: Path) -> None:
    known = command("run", "--help").out + command("plan", "--help").out
    for arguments, _ in ERRORS.values():
        told = command(*(text.replace(FOLDER, str(folder)) for text in arguments)).err
        for option in re.findall(r"(?<!\w)--[a-z-]+", told):
            assert option in known, told
        for named in re.findall(r"`edgespec ([a-z ]+)`", told):
            assert command(*named.split(), "--help").status == 0, told


@pytest.mark.model
def test_errors_in_a_process_of_their_own_leave_no_traceback(measured: str, folder: Path) -> None:
    done = run("run", str(folder / "garbage.gguf"), "Hi", "--json", cache=measured)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: ") and "Traceback" not in done.err


# --------------------------------------------------------------------------------------- help


def test_help_is_plain_text(command: Command) -> None:
    done = command("--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("Usage: edgespec [OPTIONS] COMMAND [ARGS]...\n")
    for name in ("run", "plan", "models"):
        assert re.search(rf"^  {name} +[A-Z]", done.out, re.MULTILINE), name
    assert ESCAPE not in done.out


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version(command: Command, asked: str) -> None:
    done = command(asked)
    assert re.fullmatch(r"edgespec \d+\.\d+\.\d+\S*\n", done.out)


@pytest.mark.model
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": "1"}, {"TERM": ""}]
)
def test_colour_settings_change_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    calls = [("plan",), ("models", "show"), ("--help",), ("run", "--max-tokens", "0", "Hi")]
    expected = [command(*arguments) for arguments in calls]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert [command(*arguments) for arguments in calls] == expected
    assert not any(ESCAPE in done.out + done.err for done in expected)


@pytest.mark.parametrize(
    ("asked", "unread"),
    [
        ("--help", ("psutil", "edgespec.drafting", "edgespec.memory.plan.planner", "http.client")),
        ("-h", ("importlib.metadata", "edgespec.memory.device.llama_binary")),
        ("version", ("psutil", "edgespec.cli.run", "edgespec.cli.draft")),
    ],
)
def test_what_says_little_reads_little(asked: str, unread: tuple[str, ...]) -> None:
    """All drafters were imported for a tuple of their names, and every command for a version."""
    program = (
        "import sys; sys.argv[1:] = [sys.argv[1]]\n"
        "from edgespec.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, asked], capture_output=True, text=True)
    read = done.stdout.splitlines()[-1].split()
    assert "edgespec.cli.main" in read and not {*unread} & {*read}


def test_the_help_on_all_commands_makes_no_options_of_theirs(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says the same as that of the whole command line, which is told without arguments."""
    whole, made = command().err, []
    take = takes_options

    def counted(function: Any) -> Any:
        made.append(function.__name__)
        return take(function)

    monkeypatch.setattr("edgespec.cli.command.takes_options", counted)
    assert [command(one).out for one in ("--help", "-h")] == [whole, whole]
    assert made == ["version"] * 2 and "Answer one prompt." in whole


def write_named(path: Path, name: str) -> Path:
    return write_model(path, "llama", Q8_0, name=name)


@pytest.mark.parametrize("arguments", [["plan"], ["models", "show"]])
def test_a_file_cannot_steer_the_terminal(
    command: Command, tmp_path: Path, arguments: list[str]
) -> None:
    path = write_named(tmp_path / "model.gguf", "red\x1b[31m\x07\nfake: line\x9b1m")
    done = command(*arguments, str(path))
    assert done.status == 0
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", done.out) is None
    assert not any(line.startswith("fake:") for line in done.out.splitlines())


def test_a_name_the_terminal_cannot_show_is_no_traceback(tmp_path: Path, measured: str) -> None:
    """As on a Windows console, or under `PYTHONIOENCODING=ascii`."""
    path = write_named(tmp_path / "model.gguf", "naïve 日本")
    done = run("plan", str(path), cache=measured, PYTHONIOENCODING="ascii")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("na")


# ---------------------------------------------------------------------------- a full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("version",), ("plan", "--json"), ("doctor",)])
@pytest.mark.model
def test_an_output_that_is_full_is_a_sentence(
    arguments: tuple[str, ...], measured: str, tiny: str
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "edgespec.cli.main", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "EDGESPEC_CACHE": measured, "EDGESPEC_MODEL": tiny},
        )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-3:] == [
        "error: cannot write: No space left on device", "", "hint: make room there"
    ]  # fmt: skip
    assert "Traceback" not in done.stderr


def test_the_next_file_gets_no_streams_number() -> None:
    code = """if True:
        import os
        from edgespec.cli import main
        os.close(0)
        main._open_streams()
        assert os.read(0, 1) == b""  # of the null device, which has its number"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="a shell that closes streams")
@pytest.mark.parametrize(
    ("line", "status", "out", "told"),
    [
        ("run <&-", 2, "", "the prompt is empty"),
        ("run -p Hi -n 2 --color drafted >&-", 1, "", "error: stdout is closed"),
        ("chat --temp 0 2>&-", 0, r"\S.*\n", ""),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("run >&-", 2, "", "the prompt is empty"),
                ("run -p Hi -n 2 --json >&-", 1, "", "error: stdout is closed"),
                ("plan >&-", 1, "", "error: stdout is closed"),
                ("run -p Hi -n 2 2>&-", 0, r"\S.*\n", ""),
                ("run -p Hi -n 2 <&- >&- 2>&-", 1, "", ""),
                ("plan nothing.gguf 2>&-", 1, "", ""),
            )
        ),
    ],
)
def test_streams_that_are_closed_from_the_start_are_no_traceback(
    measured: str, tiny: str, line: str, status: int, out: str, told: str
) -> None:
    line = f'"{sys.executable}" -m edgespec.cli.main {line}'
    done = subprocess.run(
        line,
        shell=True,
        input="Hi\n" if "chat" in line else "",
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "EDGESPEC_CACHE": measured,
            "EDGESPEC_MODEL": tiny,
            "EDGESPEC_DRAFTER": "none",
        },
    )
    assert done.returncode == status
    assert re.fullmatch(out, done.stdout, re.DOTALL)
    assert told in done.stderr and "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(told)


@pytest.mark.parametrize(
    ("arguments", "variable", "told"),
    [
        (["list"], {}, "No such command 'list'. Did you mean 'models list'?"),
        (["pull", "qwen3:4b"], {}, "No such command 'pull'. Did you mean 'models pull'?"),
        (["ps"], {}, "No such command 'ps'. Did you mean GET /api/ps of a server?"),
        (["rm", "tiny"], {}, "No such command 'rm'. Did you mean 'models remove'?"),
        (["run", "-p", "hi", "--temp", "hot"], {}, "'hot' is not a number"),
        (["run", "-p", "hi", "-c", "5.5"], {}, "'-c': '5.5' is not a whole number"),
        (["run"], {"CTX": "banana"}, "for the variable EDGESPEC_CTX: 'banana' is not a whole num"),
        (["run", "--ctx=x"], {"CTX": "5"}, "for '--ctx' / '--ctx-size' / '-c': 'x' is not a whole"),
    ],
)
def test_misuse_is_told_in_words_of_who_typed_it(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variable: dict[str, str],
    told: str,
) -> None:
    """Names of Ollama's commands, of variables, and of no type of a library."""
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in variable.items():
        monkeypatch.setenv(f"EDGESPEC_{name}", value)
    done = command(*arguments)
    assert done.status == 2 and told in done.err
