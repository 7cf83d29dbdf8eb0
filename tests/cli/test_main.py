"""The command line: what goes to which stream, exit status, errors, JSON documents."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import pytest

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.cli.main import main
from edgespec.cli.start import cancel_on_interrupt
from edgespec.memory.device import host
from edgespec.memory.device.kernels import missing_kernels
from edgespec.models.embedded import embedded_model

ESCAPE = "\x1b"


@dataclass(frozen=True)
class Done:
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as one JSON document on one line, and nothing else."""
        assert self.out.endswith("\n") and self.out.count("\n") == 1
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Command = Callable[..., Done]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs the command line in this process, for what loads no model."""

    def call(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["edgespec", *arguments])
        # Under `python -m pytest` click would name that module as the program.
        monkeypatch.setattr(sys.modules["__main__"], "__package__", "")
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status: Any = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        return Done(status, *capsys.readouterr())

    monkeypatch.setenv("COLUMNS", "100")
    before = signal.getsignal(signal.SIGINT)
    yield call
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def measured(measured_cache: Path) -> str:
    """One cache folder for all processes, so that steps are timed once."""
    return str(measured_cache)


def start(arguments: Sequence[str], cache: str, **environment: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "edgespec.cli.main", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EDGESPEC_CACHE": cache, "COLUMNS": "100", **environment},
    )


def run(*arguments: str, cache: str, stdin: str = "", **environment: str) -> Done:
    process = start(arguments, cache, **environment)
    out, err = process.communicate(stdin.encode(), timeout=120)
    return Done(process.returncode, out.decode(), err.decode())


# ------------------------------------------------------------------------------------- errors

EMBEDDED = "EMBEDDED"  # stands for the path of the embedded model
FOLDER = "FOLDER"  # stands for the test's folder

# Arguments, and the whole of stderr: a sentence, an empty line, what to do next.
REFUSALS = {
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
        "model\n\nhint: download it again\n",
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
@pytest.mark.parametrize(("arguments", "expected"), REFUSALS.values(), ids=REFUSALS.keys())
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
    "too many arguments": (["plan", "a", "b"], "b"),
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
    "no threads": (["run", "-p", "Hi", "--threads", "0"], "--threads"),
    "no context": (["run", "-p", "Hi", "--ctx", "0"], "--ctx"),
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
        r"error: needs \d+ MiB for 8192 tokens of context \(.+ MiB\); free: 300 MiB\n\n"
        r"hint: `--ctx (\d+)` fits; `--kv-type q8_0 --ctx (\d+)` fits, at a small cost in "
        r"quality\n",
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
    for arguments, _ in REFUSALS.values():
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


# --------------------------------------------------------------------------------------- plan

CHOICES = {"backend", "early_exit", 
    "kv_type", "threads", "drafter", "draft_max", "gpu_layers", "batch_size", "context_size",
    "mapped", "device", "kernels",
}  # fmt: skip
COMPONENTS = {
    "weights", "kv_cache", "compute", "work", "logits", "drafter_tables", "runtime",
}  # fmt: skip
EXACT = {"kv_cache"}  # components that are no ceilings
if not missing_kernels():  # which pack all weights of the embedded model
    COMPONENTS.add("weights_repacked")
    EXACT |= {"weights", "weights_repacked"}


def first_column(block: str) -> list[str]:
    """What begins a line; wrapped lines are indented."""
    lines = [line for line in block.splitlines() if not line.startswith(" ")]
    return [line.split("  ")[0] for line in lines]


SPEED = re.compile(r"predicted  [\d.]+ tokens/s, plain [\d.]+ \([a-z ,]+\)")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB are free whenever it is asked, and nobody measures bandwidth: 20 GB/s."""
    monkeypatch.setattr(host, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr("edgespec.setup.planning.memory_bandwidth", lambda: 20e9)


@pytest.mark.model
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("columns", [100, 200])
def test_plan_fits_the_terminal(
    command: Command, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = command("plan", "--ctx", "1024", "--exact")
    assert (done.status, done.err) == (0, "")
    title, components, choices, speed, others = done.out.rstrip("\n").split("\n\n")
    assert title.endswith("(Q4_1)")
    *names, total = first_column(components)
    assert {name.replace(" ", "_") for name in names} == COMPONENTS
    assert total == "at most" and " of 8.00 GiB free, 7.7" in components.splitlines()[-1]
    assert {name.replace(" ", "_") for name in first_column(choices)} == CHOICES
    assert SPEED.fullmatch(speed)
    first, *rest = others.splitlines()
    assert first == "you could also have"
    assert first_column("\n".join(rest)) == ["smaller", "longer context"]
    assert [line for line in done.out.splitlines() if len(line) > columns] == []
    assert [line for line in done.out.splitlines() if line != line.rstrip()] == []
    assert ESCAPE not in done.out


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_at_40_columns(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen and what it takes; every line of it, and nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "40")
    done = command("plan", "--ctx", "1024", "--threads", "2")
    _, _components, choices, *_ = done.out.split("\n\n")
    assert {name.replace(" ", "_") for name in first_column(choices)} == CHOICES
    assert [line for line in done.out.splitlines()[1:] if len(line) > 40] == []
    assert "threads       2         as asked\n" in choices
    assert (
        "kv type       f16       half precision\n"
        "                        costs no\n"
        "                        measurable\n"
        "                        quality\n"
    ) in choices


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_of_a_budget_says_so(command: Command) -> None:
    """The same text for the same bytes, in whatever unit."""
    texts = [
        command("plan", "--budget", text).out
        for text in ("0.25GiB", "256MiB", "262144KiB", " 256 mib ", "268.435456MB")
    ]
    assert " of 256 MiB budget, " in texts[0]
    assert texts == texts[:1] * len(texts)


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_says_the_same_at_every_width(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for columns in ("40", "60", "100", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        texts.append(command("plan", "--ctx", "1024").out.split())
    assert all(sorted(text) == sorted(texts[0]) for text in texts)
    assert len(texts[0]) > 60


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_plan_json(command: Command) -> None:
    options = ("--ctx", "512", "--kv-type", "q8_0", "--threads", "3", "--budget", "1GiB")
    done = command("plan", *options, "--json")
    assert (done.status, done.err) == (0, "")
    document = done.document
    assert set(document) == {
        "model", "name", "file_type", "plan", "memory", "predicted_plain_tokens_per_s",
        "predicted_tokens_per_s", "speed_source", "alternatives",
    }  # fmt: skip
    assert Path(document["model"]) == embedded_model()
    assert document["file_type"] == "Q4_1" and "135M" in document["name"]
    assert set(document["plan"]) == CHOICES
    for choice in document["plan"].values():
        assert set(choice) == {"value", "reason"} and choice["reason"]
    values = {name: choice["value"] for name, choice in document["plan"].items()}
    assert (values["context_size"], values["kv_type"], values["threads"]) == (512, "q8_0", 3)
    memory = document["memory"]
    assert set(memory) == {
        "predicted_peak_bytes", "predicted_gpu_bytes", "available_bytes", "limit_bytes",
        "components", "ceilings", "devices",
    }  # fmt: skip
    assert memory["predicted_peak_bytes"] == sum(memory["components"].values())
    assert set(memory["components"]) == COMPONENTS
    # 30 layers x 3 heads x (64 + 64) numbers of 34/32 bytes for 512 tokens.
    assert memory["components"]["kv_cache"] == 30 * 3 * 128 * 34 // 32 * 512
    assert (memory["available_bytes"], memory["limit_bytes"]) == (8 << 30, 1 << 30)
    assert memory["predicted_gpu_bytes"] == 0
    assert set(memory["ceilings"]) == COMPONENTS - EXACT
    assert document["predicted_tokens_per_s"] >= document["predicted_plain_tokens_per_s"] > 0
    assert "not measured" in document["speed_source"]
    for other in document["alternatives"]:
        assert set(other) == {"name", "options", "peak_bytes", "context_size", "tokens_per_s"}
    assert [other["name"] for other in document["alternatives"]] == ["smaller", "longer context"]


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


# ------------------------------------------------------------------------------------- models


@pytest.mark.model
def test_models_show_json(command: Command) -> None:
    document = command("models", "show", "--json").document
    expected = {
        "path": str(embedded_model()),
        "arch": "llama",
        "file_type": "Q4_1",
        "file_bytes": embedded_model().stat().st_size,
        "num_layers": 30,
        "vocab_size": 49152,
        "context_length": 8192,
        "embedding_size": 576,
        "tied_embeddings": True,
    }
    assert {name: document[name] for name in expected} == expected
    assert len(document["layer_bytes"]) == 30
    assert document["fingerprint"] and document["chat_template"].startswith("{%")


@pytest.mark.model
def test_models_show(command: Command) -> None:
    done = command("models", "show")
    assert (done.status, done.err) == (0, "")
    assert first_column(done.out) == [
        "name", "architecture", "file", "context", "vocabulary", "KV cache", "chat template",
        "fingerprint",
    ]  # fmt: skip
    assert "llama, 30 layers, 9 heads, 3 for keys and values" in done.out
    assert "22.5 KiB per token in f16" in done.out


@pytest.mark.model
def test_models_path(command: Command) -> None:
    assert command("models", "path").out == f"{embedded_model()}\n"


def write_named(path: Path, name: str) -> Path:
    """Just enough of a model file to be planned."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    for key, value in {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 1,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


# ---------------------------------------------------------------------------------------- run

QUESTION = "Why is the sky blue? Explain it at length."
# One thread: a second one waits in a busy loop, which is slow wherever something else runs.
SHORT = ("--max-tokens", "8", "--ctx", "256", "--threads", "1")
SUMMARY = re.compile(
    r"(\d+) tokens, [\d.]+ tokens/s, acceptance length \d\.\d\d \(plain is 1\.00\), first token "
    r"after \d+\.\d\d s, peak memory \d+ MiB(; cut off by --max-tokens)?"
)


@pytest.fixture(scope="module")
def report(measured: str) -> dict[str, Any]:
    done = run("run", str(embedded_model()), QUESTION, *SHORT, "--json", cache=measured)
    assert (done.status, done.err) == (0, ""), done.err
    return done.document


@pytest.mark.model
def test_run_json_has_every_promised_key(report: dict[str, Any]) -> None:
    assert set(report) >= {
        "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "rounds",
        "drafted_tokens", "accepted_tokens", "acceptance_length", "time_to_first_token_s",
        "decode_s", "tokens_per_s", "plan", "memory",
    }  # fmt: skip
    assert set(report["memory"]) == {
        "predicted_peak_bytes", "predicted_gpu_bytes", "available_bytes", "limit_bytes",
        "components", "ceilings", "devices", "measured_peak_bytes", "allocated_bytes",
    }  # fmt: skip
    allocated = {name.removeprefix("draft_") for name in report["memory"]["allocated_bytes"]}
    assert allocated == {"compute", "logits"} | EXACT | ({"weights"} & COMPONENTS)
    assert set(report["plan"]) - {"draft_model"} == CHOICES
    for name, choice in report["plan"].items():
        assert choice["reason"], name


@pytest.mark.model
def test_numbers_of_a_run_agree(report: dict[str, Any]) -> None:
    assert report["generated_tokens"] == len(report["token_ids"]) == 8
    assert report["finish_reason"] == "length"
    assert report["generated_tokens"] == 1 + report["rounds"] + report["accepted_tokens"]
    assert 0 <= report["accepted_tokens"] <= report["drafted_tokens"]
    expected = (report["accepted_tokens"] + report["rounds"]) / report["rounds"]
    assert report["acceptance_length"] == pytest.approx(expected)
    assert report["tokens_per_s"] == pytest.approx(7 / report["decode_s"])
    assert 0 < report["time_to_first_token_s"] < 60
    assert 20 < report["prompt_tokens"] < 80
    assert report["plan"]["context_size"]["value"] == 256
    assert len(report["text"].split()) > 2


@pytest.mark.model
def test_a_run_stays_inside_what_was_predicted(report: dict[str, Any]) -> None:
    memory = report["memory"]
    assert memory["predicted_peak_bytes"] == sum(memory["components"].values())
    assert 50 << 20 < memory["measured_peak_bytes"] <= memory["predicted_peak_bytes"]


@pytest.mark.model
def test_text_goes_to_stdout_and_the_rest_to_stderr(report: dict[str, Any], measured: str) -> None:
    done = run("run", str(embedded_model()), QUESTION, *SHORT, cache=measured)
    assert done.status == 0
    assert done.out == report["text"] + "\n"
    headline, summary = done.err.splitlines()
    assert headline.startswith("Smollm2 135M") and "256 tokens of context" in headline
    match = SUMMARY.fullmatch(summary)
    assert match is not None and (match[1], match[2]) == ("8", "; cut off by --max-tokens")


@pytest.mark.model
@pytest.mark.parametrize("source", ["one argument", "file", "stdin", "stdin and a model"])
def test_a_prompt_from_anywhere_is_the_same_prompt(
    report: dict[str, Any], measured: str, tmp_path: Path, source: str
) -> None:
    arguments, stdin = [], ""
    if source == "one argument":
        arguments = [QUESTION]
    elif source == "file":
        (tmp_path / "prompt.txt").write_text(QUESTION, encoding="utf-8")
        arguments = ["--file", str(tmp_path / "prompt.txt")]
    else:
        stdin = QUESTION
        arguments = [str(embedded_model())] if source == "stdin and a model" else []
    done = run("run", *arguments, *SHORT, "--json", cache=measured, stdin=stdin)
    assert (done.status, done.err) == (0, "")
    assert done.document["token_ids"] == report["token_ids"]
    assert done.document["prompt_tokens"] == report["prompt_tokens"]


@pytest.mark.model
def test_options_reach_the_engine(report: dict[str, Any], measured: str) -> None:
    """A stop string, a bias that forbids a token, a system message, a seed, no drafter."""
    first = report["token_ids"][0]
    options = ["--drafter", "none", "--system", "Answer in French.", "--temperature", "0.7"]
    options += ["--seed", "5", "--logit-bias", f"{first}=-1000", "--stop", "is"]
    done = run("run", QUESTION, *SHORT, *options, "--json", cache=measured)
    assert done.status == 0, done.err
    document = done.document
    assert first not in document["token_ids"]
    assert document["prompt_tokens"] != report["prompt_tokens"]
    assert document["seed"] == 5
    assert (document["drafted_tokens"], document["plan"]["drafter"]["value"]) == (0, "none")
    assert "is" not in document["text"]


@pytest.mark.model
def test_verbose_shows_what_the_library_says(measured: str) -> None:
    done = run("run", QUESTION, *SHORT, "-v", cache=measured)
    assert done.status == 0 and "llama_model_loader: " in done.err
    assert "llama_model_loader" not in run("run", QUESTION, *SHORT, cache=measured).err


@pytest.mark.model
def test_check_compares_with_plain_decoding(measured: str) -> None:
    prompt = "Count from 1 to 40, one number a line."
    arguments = ("run", prompt, *SHORT, "--max-tokens", "40", "--check")
    done = run(*arguments, cache=measured)
    assert done.status == 0
    check, speed = done.err.splitlines()[-2:]
    assert re.fullmatch(r"check: identical to plain decoding \(\d+ tokens\)", check)
    assert re.fullmatch(r"\d+\.\dx of plain decoding: \d+ of \d+ tokens were drafted", speed)
    document = run(*arguments, "--json", cache=measured).document
    assert document["check"]["identical"] is True
    assert document["check"]["compared_tokens"] == document["generated_tokens"] > 8
    assert document["text"] + "\n" == done.out


@pytest.mark.model
def test_a_full_context_says_which_option_cut_it_off(measured: str) -> None:
    options = (*SHORT, "--ctx", "64", "--max-tokens", "99")
    done = run("run", "Count to one thousand.", *options, cache=measured)
    assert done.status == 0
    assert done.err.splitlines()[-1].endswith("; cut off by --ctx")


@pytest.mark.model
def test_a_prompt_longer_than_the_context(measured: str) -> None:
    done = run("run", str(embedded_model()), "word " * 300, "--ctx", "256", cache=measured)
    assert (done.status, done.out) == (1, "")
    *_, problem, blank, hint = done.err.splitlines()
    assert re.fullmatch(r"error: the prompt has \d+ tokens and the context 256", problem)
    assert (blank, hint) == ("", "hint: raise --ctx, or shorten the prompt")


@pytest.mark.model
@pytest.mark.parametrize("word", ["mistral", "/a/b?", "*.txt?", "~nobody", "é" * 300])
def test_a_single_word_names_a_model(command: Command, word: str) -> None:
    """Even if there is none: an answer of another model than was meant is no answer."""
    done = command("run", word)
    assert (done.status, done.out) == (1, "")
    assert re.match(rf"error: there is no (model or )?file {re.escape(word[:200])}", done.err)
    assert f"a prompt of one word is --prompt {word[:40]}; " in done.err


@pytest.mark.model
@pytest.mark.parametrize(
    "arguments",
    [
        ("--prompt", "Hello"),
        ("-m", "embedded", "Hello"),
        ("embedded", "Hello"),
        ("embedded", "-p", "Hello"),
        ("-p", "Hello", "-m", "embedded"),
    ],
)
def test_models_and_prompts_are_arguments_or_options(
    command: Command, arguments: tuple[str, ...]
) -> None:
    done = command("run", *arguments, "--ctx", "100000")
    assert done.err.startswith("error: --ctx 100000 exceeds the 8192 tokens"), done.err


@pytest.mark.model
@pytest.mark.parametrize(
    "prompt",
    ["Say one word. " * 30, "~nobody was here", "/a/b or c?", "*.txt or so", "é " * 200],
    ids=["longer than a file name", "a tilde", "slashes", "a pattern", "long in bytes"],
)
def test_a_single_argument_of_several_words_is_a_prompt(command: Command, prompt: str) -> None:
    """The context is refused after the arguments were understood, and before anything loads."""
    done = command("run", prompt, "--ctx", "100000")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: --ctx 100000 exceeds the 8192 tokens")


# ------------------------------------------------------------------------------ interruptions

# The tokens that would end the answer are forbidden.
ENDLESS = ["run", QUESTION, "--max-tokens", "3000", "--ctx", "4096", "--threads", "1"]
ENDLESS += ["--logit-bias", "0=-1000", "--logit-bias", "2=-1000"]


def stream_of(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


@pytest.mark.model
def test_ctrl_c_keeps_the_text_so_far(measured: str) -> None:
    process = start(ENDLESS, measured)
    begun = stream_of(process.stdout).read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert len((begun + out).decode().strip()) > 0 and out.endswith(b"\n")
    assert "Traceback" not in err.decode()
    match = SUMMARY.fullmatch(err.decode().splitlines()[-1])
    assert match is not None and int(match[1]) < 3000


class AfterAWhile(threading.Event):
    """As if Ctrl-C came in the middle of the answer."""

    asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > 10


@pytest.mark.model
def test_ctrl_c_keeps_the_document(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run_module = import_module("edgespec.cli.run")
    monkeypatch.setattr(run_module, "cancel_on_interrupt", AfterAWhile)
    done = command(*ENDLESS, "--json", "--drafter", "none")
    assert (done.status, done.err) == (130, "")
    assert done.document["finish_reason"] == "cancelled"
    assert 0 < done.document["generated_tokens"] == len(done.document["token_ids"]) <= 10
    assert done.document["text"]


@pytest.mark.model
def test_ctrl_c_is_ignored_where_it_was_before() -> None:
    """As in `edgespec run ... &` of a script, whose Ctrl-C is meant for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cancel = cancel_on_interrupt()
        signal.raise_signal(signal.SIGINT)
        assert not cancel.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_model_loads(measured: str) -> None:
    process = start(ENDLESS, measured)
    stream_of(process.stderr).readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert "Traceback" not in err.decode()


@pytest.mark.model
def test_a_reader_that_has_gone_ends_the_run_quietly(measured: str) -> None:
    """As in `edgespec run ... | head -c1`."""
    process = start(ENDLESS, measured)
    assert len(stream_of(process.stdout).read(1)) == 1
    stream_of(process.stdout).close()
    err = stream_of(process.stderr).read().decode()
    assert process.wait(timeout=60) not in (0, 2, 130)
    stream_of(process.stdin).close()
    stream_of(process.stderr).close()
    assert "Traceback" not in err and "Exception ignored" not in err and "Error" not in err


# ---------------------------------------------------------------------------- a full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("version",), ("plan", "--json"), ("doctor",)])
@pytest.mark.model
def test_an_output_that_is_full_is_a_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "edgespec.cli.main", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-3:] == [
        "error: cannot write: No space left on device", "", "hint: make room there"
    ]  # fmt: skip
    assert "Traceback" not in done.stderr


RARE_SCRIPT = "\u1780\u17d2\u1798\u17c2\u179a " * 330  # its tokens are nearly as many as its bytes


@pytest.mark.model
def test_a_long_prompt_in_a_rare_script_is_planned_for(measured: str, tmp_path: Path) -> None:
    """Planned by halves of its bytes it did not fit."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(RARE_SCRIPT, encoding="utf-8")
    options = ("--max-tokens", "4", "--json")
    done = run("plan", "--file", str(prompt), *options, cache=measured)
    assert (done.status, done.err) == (0, "")
    with open_tokenizer(embedded_model()) as tokenizer:
        num_tokens = len(tokenizer.encode(RARE_SCRIPT))
    assert 4096 < num_tokens + 4 <= done.document["plan"]["context_size"]["value"]


@pytest.mark.model
@pytest.mark.slow
def test_a_long_prompt_in_a_rare_script_has_room(measured: str, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(RARE_SCRIPT, encoding="utf-8")
    options = ("--raw", "--max-tokens", "4", "--json")
    done = run("run", "--file", str(prompt), *options, cache=measured)
    assert done.status == 0, done.err
    context = done.document["plan"]["context_size"]["value"]
    assert 4096 < done.document["prompt_tokens"] + 4 <= context
