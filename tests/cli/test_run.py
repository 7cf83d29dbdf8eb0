"""`edgespec run`: what goes to which stream, prompts from anywhere, interruptions."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest
from command_line import CHOICES, COMPONENTS, EXACT, Command, run, start, without_stdin

from edgespec.models.embedded import embedded_model

QUESTION = "Why is the sky blue? Explain it at length."
# One thread: a second one waits in a busy loop, which is slow wherever something else runs.
SHORT = ("--max-tokens", "8", "--ctx", "256", "--threads", "1")
SUMMARY = re.compile(
    r"(\d+) tokens, [\d.]+ tokens/s, acceptance length \d\.\d\d \(plain is 1\.00\)"
    r"(?:, drafts accepted: [a-z\d, ]+)?, first token after \d+\.\d\d s, "
    r"peak memory [\d.]+ [MG]iB(; cut off by --max-tokens)?"  # of this process, with other tests
)


@pytest.fixture(scope="module")
def report(measured: str) -> dict[str, Any]:
    done = run("run", str(embedded_model()), QUESTION, *SHORT, "--json", cache=measured)
    assert (done.status, done.err) == (0, ""), done.err
    return done.document


@pytest.mark.model
def test_a_narrow_terminal_gets_whole_words(report: dict[str, Any], measured: str) -> None:
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        sys.executable,
        ["-m", "edgespec.cli.main", "run", str(embedded_model()), QUESTION, *SHORT],
        env={**os.environ, "EDGESPEC_CACHE": measured, "TERM": "xterm", "COLUMNS": "20"},
        dimensions=(24, 20),
        timeout=60,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    lines = textwrap.wrap(report["text"], 20, break_on_hyphens=False)
    assert len(lines) > 1
    assert "\r\n".join(lines) in child.before


@pytest.mark.model
def test_run_json_has_every_promised_key(report: dict[str, Any]) -> None:
    assert set(report) >= {
        "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "rounds",
        "drafted_tokens", "accepted_tokens", "acceptance_length", "time_to_first_token_s",
        "decode_s", "tokens_per_s", "plan", "memory",
    }  # fmt: skip
    assert set(report["memory"]) == {
        "predicted_peak_bytes", "predicted_gpu_bytes", "available_bytes", "limit_bytes",
        "components", "ceilings", "mapped", "devices", "measured_peak_bytes", "allocated_bytes",
    }  # fmt: skip
    allocated = report["memory"]["allocated_bytes"]  # and what a head has, where one pays here
    assert {one for one in allocated if not one.startswith(("draft_", "head_"))} == (
        {"compute", "logits"} | EXACT | ({"weights"} & COMPONENTS)
    )
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
    parts = {name: memory[name] for name in ("components", "allocated_bytes")}
    assert 50 << 20 < memory["measured_peak_bytes"] <= memory["predicted_peak_bytes"], f"{parts}"


@pytest.mark.model
def test_text_goes_to_stdout_and_the_rest_to_stderr(report: dict[str, Any], here: Command) -> None:
    done = here("run", str(embedded_model()), QUESTION, *SHORT)
    assert done.status == 0
    assert done.out == report["text"] + "\n"
    headline, summary = done.err.splitlines()
    assert headline.startswith("Smollm2 135M") and "256 tokens of context" in headline
    match = SUMMARY.fullmatch(summary)
    assert match is not None and (match[1], match[2]) == ("8", "; cut off by --max-tokens")


@pytest.mark.model
def test_a_prompt_from_anywhere_is_the_same_prompt(
    command: Command, tiny: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(QUESTION, encoding="utf-8")
    found = []
    for arguments, stdin in [
        ((tiny, QUESTION), ""),
        (("-m", tiny, QUESTION), ""),
        (("-m", tiny, "--file", str(file)), ""),
        (("-m", tiny), QUESTION),
        ((tiny,), QUESTION),
    ]:
        done = command("run", *arguments, *SHORT, "--drafter", "none", "--json", stdin=stdin)
        assert (done.status, done.err) == (0, "")
        found.append((done.document["prompt_tokens"], done.document["token_ids"]))
    assert found == [found[0]] * 5 and found[0][0] == len(QUESTION)


@pytest.mark.model
def test_options_reach_the_engine(report: dict[str, Any], here: Command) -> None:
    """A stop string, a bias that forbids a token, a system message, a seed, no drafter."""
    first = report["token_ids"][0]
    options = ["--drafter", "none", "--system", "Answer in French.", "--temperature", "0.7"]
    options += ["--seed", "5", "--logit-bias", f"{first}=-1000", "--stop", "is"]
    done = here("run", QUESTION, *SHORT, *options, "--json")
    assert done.status == 0, done.err
    document = done.document
    assert first not in document["token_ids"]
    assert document["prompt_tokens"] != report["prompt_tokens"]
    assert document["seed"] == 5
    assert (document["drafted_tokens"], document["plan"]["drafter"]["value"]) == (0, "none")
    assert "is" not in document["text"]


@pytest.mark.model
def test_verbose_shows_what_the_library_says_and_explains_drafts(here: Command, tiny: str) -> None:
    done = here("run", tiny, QUESTION, *SHORT, "-v", "--drafter", "suffix")
    assert done.status == 0 and "llama_model_loader: " in done.err
    assert re.search(r"drafts: suffix: [\w ]+ \(\d+ rounds\)", done.err), done.err


@pytest.mark.model
def test_check_compares_with_plain_decoding(here: Command) -> None:
    prompt = "Count from 1 to 40, one number a line."
    arguments = ("run", prompt, *SHORT, "--max-tokens", "40", "--check")
    done = here(*arguments)
    assert done.status == 0
    check, speed = done.err.splitlines()[-2:]
    assert re.fullmatch(r"check: identical to plain decoding \(\d+ tokens\)", check)
    assert re.fullmatch(r"\d+\.\dx of plain decoding: \d+ of \d+ tokens were drafted", speed)


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "error: --check compares token by token, and drafts that a model or a head draws"),
        (("--exact",), "check: identical to plain decoding (8 tokens)"),
        (("--grammar", 'root ::= "abcdefghijk"'), "check: identical to plain decoding"),
        (("--repeat-penalty", "1.1"), "check: identical to plain decoding (8 tokens)"),
    ],
)
def test_sampled_answers_are_checked_where_no_draft_is_drawn(
    command: Command, tiny: str, options: tuple[str, ...], sentence: str
) -> None:
    asked = ("--drafter", "window", "--temperature", "1", "--logit-bias", "257=-1000", "--check")
    done = command("run", tiny, QUESTION, *SHORT, *asked, *options)
    assert done.status == (0 if options else 1) and sentence in done.err, done.err


@pytest.mark.model
def test_a_full_context_says_which_option_cut_it_off(command: Command, tiny: str) -> None:
    forbidden = ("--logit-bias", "257=-1000")  # which would end the answer
    options = ("--ctx", "64", "--max-tokens", "99", "--drafter", "none", *forbidden)
    done = command("run", tiny, "Count to one thousand.", *options)
    assert done.status == 0
    assert done.err.splitlines()[-1].endswith("; cut off by --ctx")


@pytest.mark.model
def test_an_answer_that_repeats_itself_is_not_shown_as_speed_alone(here: Command) -> None:
    text = "Milk, milk, milk, milk, " * 12
    done = here("run", "--raw", text, "-n", "60", "--ctx", "256")
    assert "it repeats itself: --dry-multiplier" in done.err


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
@pytest.mark.parametrize("place", ["positional", "an option"])
def test_a_dash_is_stdin(command: Command, tiny: str, place: str) -> None:
    """And a prompt that is longer than the context is refused."""
    model = ["-m", tiny] if place == "an option" else [tiny]
    done = command("run", *model, "-", "--ctx", "256", stdin="Say one word. " * 100)
    *_, problem, blank, hint = done.err.splitlines()
    assert (done.status, done.out) == (1, "")
    assert problem == "error: the prompt has 1400 tokens and the context 256"
    assert (blank, hint) == ("", "hint: raise context_size (--ctx), or shorten the prompt")


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
SMALL = ["--drafter", "none", "--logit-bias", "257=-1000", "--model"]


def stream_of(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


@pytest.mark.model
def test_ctrl_c_keeps_the_text_so_far(measured: str, tiny: str) -> None:
    process = without_stdin(start([*ENDLESS, *SMALL, tiny], measured))
    begun = stream_of(process.stdout).read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert len((begun + out).decode(errors="replace").strip()) > 0 and out.endswith(b"\n")
    assert "Traceback" not in err.decode()
    match = SUMMARY.fullmatch(err.decode().splitlines()[-1])
    assert match is not None and int(match[1]) < 3000


class AfterAWhile(threading.Event):
    """As if Ctrl-C came in the middle of the answer, behind the load."""

    asked, is_answering = 0, False

    def is_set(self) -> bool:
        self.asked += self.is_answering
        return self.asked > 10


@pytest.mark.model
def test_ctrl_c_keeps_the_document(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run_module = import_module("edgespec.cli.run")
    event, load = AfterAWhile(), run_module.load_engine

    def loaded(*arguments: Any, **options: Any) -> Any:
        found = load(*arguments, **options)
        event.is_answering = True
        return found

    monkeypatch.setattr(run_module, "cancel_on_interrupt", lambda: event)
    monkeypatch.setattr(run_module, "load_engine", loaded)
    done = command(*ENDLESS, "--json", "--drafter", "none")
    assert (done.status, done.err) == (130, "")
    assert done.document["finish_reason"] == "cancelled"
    assert 0 < done.document["generated_tokens"] == len(done.document["token_ids"]) <= 10
    assert done.document["text"]


def test_ctrl_c_while_the_model_loads(measured: str) -> None:
    process = without_stdin(start(ENDLESS, measured))
    stream_of(process.stderr).readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert "Traceback" not in err.decode()


@pytest.mark.model
def test_a_reader_that_has_gone_ends_the_run_quietly(measured: str, tiny: str) -> None:
    """As in `edgespec run ... | head -c1`."""
    process = without_stdin(start([*ENDLESS, *SMALL, tiny], measured))
    assert len(stream_of(process.stdout).read(1)) == 1
    stream_of(process.stdout).close()
    err = stream_of(process.stderr).read().decode()
    assert process.wait(timeout=60) not in (0, 2, 130)
    stream_of(process.stderr).close()
    assert "Traceback" not in err and "Exception ignored" not in err and "Error" not in err


# -- what is piped in beside a prompt ----------------------------------------------------------

RUN = f'"{sys.executable}" -m edgespec.cli.main run -p "Say it." -n 1 --json --drafter none'
PLAIN_TOKENS = len("Say it.")
PIPES = {
    "nothing": (f"{RUN} </dev/null", 1, False),
    "an empty pipe": (f"printf '' | {RUN}", 1, False),
    "closed": (f"{RUN} <&-", 1, False),
    "a pipe": (f"echo one two three | {RUN}", 2, False),
    "a file": (f"echo one two three >words; {RUN} <words", 2, False),
    "a loop over a pipe": (f"printf 'a\\nb\\n' | while read l; do {RUN}; done", 1, True),
    "a loop over a file": (f"printf 'a\\nb\\n' >f; while read l; do {RUN}; done <f", 1, True),
    "a list of commands": (f"echo one two three >words; (true; {RUN}; true) <words", 2, False),
    "a wrapper": (f"echo one two three | (true; {RUN}; true)", 1, True),
    "a wrapper, and asked for": (f"echo one two three | (true; {RUN} -; true)", 2, False),
}
OFTEN = ("closed", "a pipe", "a loop over a file")


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="tells whose stdin it is")
@pytest.mark.parametrize(
    ("line", "is_read", "is_said"),
    [
        pytest.param(*case, id=name, marks=() if name in OFTEN else pytest.mark.long)
        for name, case in PIPES.items()
    ],
)
def test_what_is_piped_in_is_read_unless_it_is_another_s(
    tmp_path: Path, measured: str, tiny: str, line: str, is_read: int, is_said: bool
) -> None:
    """A loop loses none of its lines, and what is not read is said not to be."""
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "EDGESPEC_CACHE": measured, "EDGESPEC_MODEL": tiny},
    )
    answers = [json.loads(one)["prompt_tokens"] for one in done.stdout.splitlines()]
    assert len(answers) == 1 + ("loop" in line or "while" in line)
    assert len(set(answers)) == 1 and (answers[0] > PLAIN_TOKENS) == (is_read == 2)
    assert ("stdin is not read" in done.stderr) == is_said
