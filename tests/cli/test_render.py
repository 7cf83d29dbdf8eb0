"""What is printed of answers, and warnings."""

from __future__ import annotations

import ast
import io
import logging
import sys
import warnings
from pathlib import Path

import pytest
from command_line import ESCAPE, Command

from edgespec import DraftModelWarning
from edgespec.cli.answer_writer import DRAFTED, show_answer
from edgespec.cli.render import (
    Progress,
    error,
    models_text,
    paragraph,
    printable_streams,
    show_warnings,
    table,
    write_answer,
)
from edgespec.decode.generation import LARGE, SMALL, Chunk, Counters, Result, Span
from edgespec.errors import EdgespecError


def test_counts_of_both_models_in_one_line() -> None:
    spans = (Span(SMALL, 0, 6), Span(LARGE, 6, 8))
    result = Result("text", tuple(range(8)), "stop", Counters(switches=1), spans)
    assert models_text(result) == (
        "2 tokens by the large model (25%), 6 by the small one, 1 switch"
    )


def test_a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(str(message)))
    show_warnings()
    warnings.showwarning(DraftModelWarning("it failed"), DraftModelWarning, "model.py", 1)
    warnings.showwarning(UserWarning("another"), UserWarning, "other.py", 1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err, others) == ("", "warning: it failed\n", ["another"])


# -- what strangers wrote --------------------------------------------------------------------------

STEERS = "a\x1b]0;title\x07\x1b[2Jb\x9b31mc\rd\x7f\x08e\tf\u202eg\u2066h\n"
SHOWN = "a]0;title[2Jb31mcde\tf\\u202eg\\u2066h\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_that_is_printed_steers_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whomever it is printed: this program, libraries, the interpreter."""
    with printable_streams():
        print(STEERS, end="")
        print(STEERS, end="", file=sys.stderr)
        sys.stdout.writelines([STEERS])
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": STEERS}))
        sys.excepthook(ValueError, ValueError(STEERS), None)
        error(EdgespecError(STEERS, hint=STEERS))
    out, err = capsys.readouterr()
    assert out == SHOWN * 2
    assert err.count("]0;title[2Jb31mcde\tf\\u202eg\\u2066h") == 5
    assert not {*out, *err} & {"\x1b", "\x07", "\x9b", "\r", "\x7f", "\x08"}
    assert not hasattr(sys.stdout, "unfiltered")


def test_answers_are_as_they_are_in_pipes_and_harmless_on_terminals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    pipe, screen = io.StringIO(), Screen()
    for stream in (pipe, screen):
        monkeypatch.setattr(sys, "stdout", stream)
        with printable_streams():
            show_answer([Chunk(STEERS, (), 1, drafted_chars=1)], DRAFTED)
            write_answer("raw", "shown")
    assert pipe.getvalue() == STEERS + "\nraw"
    assert screen.getvalue() == f"{ESCAPE}[36ma{ESCAPE}[39m{SHOWN[1:]}\nshown"


def test_progress_is_drawn_and_names_in_it_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with printable_streams():
        progress = Progress()
        progress("reading \x1b[2Jname", 0.5)
        progress.clear()
    assert screen.getvalue().startswith("\rreading [2Jname  50%\r")
    assert ESCAPE not in screen.getvalue()


def test_progress_in_a_narrow_terminal_still_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the line was cut off, which is how much is done."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    Progress()("measuring what a q8_0 cache loses, about 40 s left", 0.43)
    shown = screen.getvalue().removeprefix("\r")
    assert len(shown) == 39 and shown.startswith("measuring what a q8_0") and shown.endswith(" 43%")


def test_an_error_of_several_lines_gives_no_hint_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error(EdgespecError("it refuses\n\nhint: run this", hint="do that"))
    assert capsys.readouterr().err == "error: it refuses\n  \n  hint: run this\n\nhint: do that\n"


@pytest.mark.parametrize(
    "arguments", [("run", "a\x1b[2J.gguf"), ("run", "--a\x1b[2J"), ("\x1b[2J",)]
)
def test_errors_of_the_command_line_are_printable(
    command: Command, arguments: tuple[str, ...]
) -> None:
    """Also those that a library prints."""
    status, out, err = command(*arguments, stdin="Hi")
    assert status in (1, 2) and out == ""
    assert "[2J" in err and ESCAPE not in err


def test_no_other_module_has_a_way_around() -> None:
    """Only `render` knows the streams below; nobody takes the interpreter's own."""
    around = {"unfiltered", "__stdout__", "__stderr__"}
    folder = Path(__file__).parents[2] / "cli"
    for file in folder.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & around or file.name == "render.py", file


def test_progress_without_a_terminal_is_a_line_for_each_tenth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Progress()("reading", 0.5)
    monkeypatch.setattr("edgespec.cli.render._LINE_S", 0.0)
    lines = Progress(has_lines=True)
    for percent in range(45, 62):
        lines("reading", percent / 100)
    lines.clear()
    assert capsys.readouterr().err == "reading  45%\nreading  50%\nreading  60%\n"


def test_the_last_column_stands_below_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        ("name", "x" * 24, "what it is"),
        ("model", "y", "a model of many words, and more"),
        ("z", "", ""),
    ]
    monkeypatch.setenv("COLUMNS", "60")
    assert table(rows).splitlines() == [
        f"name   {'x' * 24}  what it is",
        f"model  {'y':24}  a model of many words, and",
        f"{'':33}more",
        "z",
    ]
    monkeypatch.setenv("COLUMNS", "40")
    assert table(rows).splitlines() == [
        f"name   {'x' * 24}",
        "    what it is",
        "model  y",
        "    a model of many words, and more",
        "z",
    ]


def test_a_table_that_is_a_little_too_wide_has_one_blank_between_its_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last letter of a heading stood in a line of its own."""
    monkeypatch.setenv("COLUMNS", "40")
    rows = [
        ("model", "type", "size", "takes", "tokens/s", "what it is"),
        ("embedded", "Q4_1", "94 MiB", "277 MiB", "122", "a small model that comes along"),
    ]
    head, *_, last = table(rows).splitlines()
    assert head == "model    type size   takes   tokens/s" and last.strip() == rows[1][-1]


def test_columns_without_room_are_a_table_below_beside_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The terminal broke lines in the middle of numbers."""
    rows = [
        ("KV cache", "KL", "agreement", "perplexity", "t(1)", "t(8)"),
        ("q8_0/q4_0", "0.0100", "95.0%", "1.020x", "10.00 ms", "120.00 ms"),
    ]
    monkeypatch.setenv("COLUMNS", "40")
    assert table(rows).splitlines() == [
        "KV cache   KL      agreement  perplexity",
        "q8_0/q4_0  0.0100  95.0%      1.020x",
        "",
        "KV cache   t(1)      t(8)",
        "q8_0/q4_0  10.00 ms  120.00 ms",
    ]
    for columns in range(21, 70):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, table(rows).splitlines())) <= columns


def test_a_paragraph_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "tokens per second: predicted and measured"
    assert paragraph(text) == "tokens per second: predicted and\nmeasured"
