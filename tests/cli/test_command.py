"""Help in groups, at every width, and how commands end from outside."""

from __future__ import annotations

import json
import re

import pytest
from command_line import Command


def test_help_is_in_groups_and_every_option_is_in_one(say: Command) -> None:
    _, out, _ = say("run", "--help")
    titles = [line for line in out.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        *("Arguments:", "Model and prompt:", "Sampling:", "Form of the answer:"),
        *("Memory and device:", "Drafts:", "Output:", "Options:", "Log:"),
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

    monkeypatch.setattr("edgespec.cli.doctor.print", ends, raising=False)
    assert say("doctor", "--json") == (status, "", told)


def test_values_in_help_are_words(say: Command) -> None:
    _, out, _ = say("run", "--help")
    assert "--ctx-size N " in out and "--file FILE " in out and "--system TEXT " in out
    assert "<str>" not in out and "<int" not in out


def test_a_command_with_few_options_has_one_list(say: Command) -> None:
    _, out, _ = say("doctor", "--help")
    assert "\nOptions:\n" in out and "Output:" not in out


@pytest.mark.model
@pytest.mark.usefixtures("steady")
def test_an_option_is_a_variable_and_the_command_line_goes_before_it(
    say: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def context(*arguments: str) -> int:
        found = json.loads(say("plan", "--json", *arguments).out)["plan"]["context_size"]["value"]
        return int(found)

    monkeypatch.setenv("EDGESPEC_CTX", "768")
    assert context() == 768
    assert context("--ctx-size", "1024") == 1024
    monkeypatch.setenv("EDGESPEC_CTX", "-2")
    assert say("plan")[0] == 2
