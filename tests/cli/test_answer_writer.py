"""How an answer reaches stdout: wrapped in a terminal, else unchanged; keys typed meanwhile."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli import answer_writer
from edgespec.cli.answer_writer import (
    DRAFTED,
    MODEL,
    NONE,
    Wrap,
    repeats,
    show_answer,
    tinted,
    with_progress,
)
from edgespec.cli.render import Progress, note
from edgespec.decode.generation import LARGE, SMALL, Chunk

PATIENCE_S = 30
WORDS = st.sampled_from(["a", "moon", "well-known", "ünïcode", "e\u0301", "\x1b[36mred\x1b[39m"])
GAPS = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n"])
THUMB, FLAG = "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


@pytest.fixture(scope="module")
def twenty() -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "20")
        yield 20


def wrapped(*parts: str) -> str:
    wrap = Wrap()
    return "".join([wrap.push(part) for part in parts] + [wrap.end()])


@given(st.lists(st.tuples(WORDS, GAPS)), st.lists(st.integers(0, 200)))
def test_lines_fit_and_words_stay_whole_however_the_text_comes(
    twenty: int, words: list[tuple[str, str]], cuts: list[int]
) -> None:
    text = "".join(word + gap for word, gap in words)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    marks = [one.span() for one in re.finditer(r"\x1b\[\d+m", text)]
    places = [at for at in places if not any(start < at < end for start, end in marks)]
    shown = wrapped(*(text[a:b] for a, b in itertools.pairwise(places)))
    assert shown == wrapped(text)
    assert shown.split() == text.split()
    lines = re.sub(r"\x1b\[\d+m|\u0301", "", shown).split("\n")
    assert max(map(len, lines)) <= twenty


@pytest.mark.parametrize(
    ("columns", "text", "shown"),
    [
        (10, "one two three", "one two\nthree"),
        (10, "0123456789 next", "0123456789\nnext"),
        (10, "see 0123456789abcdefghij ok xyz", "see 0123456789abcdefghij ok\nxyz"),
        (10, "漢字漢字漢字", "漢字漢字漢\n字"),  # two columns each
        (10, "a\tb c", "a\tb\nc"),
        (10, "one two \x1b[36mthree four\x1b[39m", "one two\n\x1b[36mthree four\x1b[39m"),
        (10, "```py\nx = 'a long line'\n```\none two three", None),
        (10, "  ~~~\n    y = 1 + 2 + 3\n  ~~~\n", "  ~~~\n    y = 1 + 2 + 3\n  ~~~\n"),
        (10, "```a``` is one word", "```a``` is\none word"),
        (0, "a terminal without a width " * 30 + "end", None),
        (6, f"{FAMILY}{FAMILY} {FAMILY} ab", f"{FAMILY}{FAMILY}\n{FAMILY} ab"),
        (6, "abc \u2764\ufe0f x", "abc \u2764\ufe0f\nx"),  # two columns, by its second character
        (
            4,
            "\U0001f44d\U0001f3fd\U0001f1e9\U0001f1eax",
            "\U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea\nx",
        ),
    ],
)
def test_what_is_broken_where(width: Any, columns: int, text: str, shown: str | None) -> None:
    width(columns)
    assert wrapped(text) == (shown or text.replace("one two three", "one two\nthree"))


def test_only_the_last_word_is_held_back(width: Any) -> None:
    width(20)
    wrap = Wrap()
    assert [wrap.push(part) for part in ("The mo", "on is", " ", "x" * 30, "y")] == [
        *("The", " moon", " is", " " + "x" * 30, "y")
    ]


@pytest.mark.parametrize("columns", [0, 80])
@pytest.mark.parametrize("letters", ["a", "\u00e9", "\u6f22", "\u200d"])
def test_a_text_without_blanks_costs_its_length(width: Any, columns: int, letters: str) -> None:
    """By calls: each letter of a word of 4,000 once cost as many as the word had before it."""
    width(columns)
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event.endswith("call")

    wrap, text = Wrap(), letters * 4000
    sys.setprofile(count)
    try:
        shown = "".join(wrap.push(text[place : place + 40]) for place in range(0, 4000, 40))
    finally:
        sys.setprofile(None)
    assert (shown + wrap.end()).replace("\n", "") == text
    assert calls < 30 * len(text)


def chunks(*texts: str) -> Iterator[Chunk]:
    for text in texts:
        yield Chunk(text, (1,), 1, len(text))


def test_a_file_gets_the_text_and_a_terminal_what_can_be_read(
    width: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    width(10)
    monkeypatch.delenv("NO_COLOR", raising=False)
    show_answer(chunks("one two ", "three\x07"), DRAFTED)
    assert capsys.readouterr().out == "one two three\x07\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    show_answer(chunks("one two ", "three\x07"), DRAFTED)
    assert capsys.readouterr().out == "\x1b[36mone two\n\x1b[39m\x1b[36mthree\x1b[39m\n"
    monkeypatch.setenv("TERM", "dumb")
    show_answer(chunks("one two ", "three\x07"), DRAFTED)
    assert capsys.readouterr().out == "one two\nthree\n"
    show_answer(chunks("a\u202eb"), NONE)
    assert capsys.readouterr().out == "a\\u202eb\n"


def test_an_answer_that_breaks_shows_all_that_came(
    width: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*texts: str) -> Iterator[Chunk]:
        yield from chunks(*texts)
        raise KeyboardInterrupt

    width(40)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        show_answer(broken("half a wor"), NONE)
    assert capsys.readouterr().out == "half a wor\n"
    with pytest.raises(KeyboardInterrupt):
        show_answer(broken(), NONE)
    assert capsys.readouterr().out == ""


class Slow:
    """An answer whose prompt is read in pieces, until somebody has seen that."""

    prompt_ids = (1,) * 4000

    def __init__(self, seen: Event, problem: Exception | None = None) -> None:
        self.num_read = 0, 0
        self._seen, self._problem = seen, problem

    def __iter__(self) -> Iterator[Chunk]:
        self.num_read = 3000, 1000
        assert self._seen.wait(PATIENCE_S)
        if self._problem is not None:
            raise self._problem
        yield from chunks("one ", "two")


@pytest.mark.parametrize("problem", [None, ValueError("broken")])
def test_a_terminal_sees_how_far_a_long_prompt_is_read(
    width: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: Exception | None,
) -> None:
    width(80)
    seen, over = Event(), Event()

    class Line(Progress):
        def __call__(self, what: str, fraction: float) -> None:
            seen.set()
            assert over.wait(PATIENCE_S), "it is waited for before its line is cleared"
            super().__call__(what, fraction)
            assert fraction == 0.75

        def clear(self) -> None:
            super().clear()
            over.set()

    class Shown(Thread):
        def join(self, timeout: float | None = None) -> None:
            over.set()
            super().join(timeout)

    monkeypatch.setattr(answer_writer, "Progress", Line)
    monkeypatch.setattr(answer_writer, "Thread", Shown)
    monkeypatch.setattr(answer_writer, "_SILENT_S", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with nullcontext() if problem is None else pytest.raises(ValueError, match="broken"):
        slow: Any = Slow(seen, problem)
        assert [one.text for one in with_progress(slow)] == ["one ", "two"]
    shown = capsys.readouterr().err
    assert shown.startswith("\rreading the prompt: 3,000 of 4,000 tokens, 0 s left,  75%")
    assert shown.endswith(" \r")


ANSWERING = """
import select, sys
from edgespec.cli.answer_writer import show_answer
from edgespec.decode.generation import Chunk

def chunks():
    yield Chunk("one two ", ())
    select.select([sys.stdin], [], [])
    yield Chunk("three", ())

show_answer(chunks(), "none")
print("read", repr(sys.stdin.readline()))
"""


def test_keys_typed_during_an_answer_are_the_next_reader_s() -> None:
    pexpect = pytest.importorskip("pexpect")
    variables = {**os.environ, "TERM": "xterm"}
    child = pexpect.spawn(
        sys.executable, ["-c", ANSWERING], env=variables, timeout=PATIENCE_S, encoding="utf-8"
    )
    child.expect_exact("one")
    child.send("typed")
    child.expect_exact("three\r\n")
    assert "typed" not in child.before
    child.send(" on\r")
    child.expect_exact("read 'typed on\\n'")
    child.expect(pexpect.EOF)


INTERRUPTED = """
import signal, sys
from threading import Event
from edgespec.cli.answer_writer import show_answer
from edgespec.decode.generation import Chunk

stopped = Event()
signal.signal(signal.SIGINT, lambda *_: stopped.set())

def chunks():
    yield Chunk("one ", ())
    while not stopped.wait(0.05):
        pass
    yield Chunk("two", ())

show_answer(chunks(), "none")
print("read", repr(sys.stdin.readline()))
"""


def test_ctrl_c_takes_away_nothing_that_was_typed() -> None:
    """The terminal emptied its queue with it."""
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        sys.executable,
        ["-c", INTERRUPTED],
        env={**os.environ, "TERM": "xterm"},
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    child.expect_exact("one")
    child.send("typed")
    child.send("\x03")
    child.expect_exact("two\r\n")
    child.send(" on\r")
    child.expect_exact("read 'typed on\\n'")
    child.expect(pexpect.EOF)


def test_lines_for_the_person_break_between_words_too(
    width: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    width(20)
    text = "name    a short table\nthis line is longer than the terminal /home/me/a-very-long/path"
    note(text)
    assert capsys.readouterr().err == text + "\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    note(text)
    assert capsys.readouterr().err.splitlines() == [
        *("name    a short", "table", "this line is longer", "than the terminal"),
        "/home/me/a-very-long/path",
    ]


@pytest.mark.parametrize(
    ("text", "is_loop"),
    [
        ("Take:\n" + "- 1 cup milk\n" * 5 + "- 1 c", True),
        ("ha" * 40, True),
        ("A list:\n- one\n- two\n- three\n- four\n" * 2, False),
        ("It took very, very, very, very long.", False),
        ("And so on" + "." * 40, False),
        ("".join(f"{n}. fact {n}\n" for n in range(90)), False),
        ("", False),
    ],
)
def test_an_answer_that_repeats_itself_is_told(text: str, is_loop: bool) -> None:
    assert repeats(text) is is_loop


CYAN, PLAIN = "\x1b[36m", "\x1b[39m"


@pytest.mark.parametrize(
    ("color", "model", "shown"),
    [
        (MODEL, LARGE, f"{CYAN}two words{PLAIN}"),
        (MODEL, SMALL, "two words"),
        (MODEL, "", "two words"),
        (DRAFTED, LARGE, f"{CYAN}two{PLAIN} words"),
        (NONE, LARGE, "two words"),
    ],
)
def test_what_is_tinted(
    color: str, model: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    chunk = Chunk("two \x07words", (1, 2), 1, 3, model=model)
    assert tinted(chunk, color) == shown
    monkeypatch.setenv("NO_COLOR", "1")
    underlined = shown.replace(CYAN, "\x1b[4m").replace(PLAIN, "\x1b[24m")
    assert tinted(chunk, color) == underlined
    monkeypatch.setenv("TERM", "dumb")
    assert tinted(chunk, color) == "two words"
