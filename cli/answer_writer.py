"""Writing an answer to stdout: the text itself, or what a person can read in a terminal.

A file or a pipe gets the text unchanged. A terminal gets it tinted, with lines broken between
words, and without the characters that would steer it. What is typed meanwhile stays in the
terminal's queue, unseen, and is read by whoever reads next.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from edgespec.cli.options import OUTPUT
from edgespec.cli.render import Progress, printable, write_answer
from edgespec.option_fields import option

if TYPE_CHECKING:
    from edgespec.decode.generation import Chunk, Stream
    from edgespec.decode.session import Turn


_MARK = re.compile(r"\x1b\[\d+m")
_FENCE = re.compile(r"(?:```+|~~~+)([^`]*)")
_SILENT_S, _SHOWN_EVERY_S = 1.0, 0.2  # before and between lines about a long prompt
_TAB = 8  # columns between two stops of a tab
_MOST_JOINED = 16  # characters of one emoji, such as a family


_LOOP = re.compile(r"(.{1,250}?)\1{3,}\Z", re.DOTALL)
_LOOP_CHARS = 60  # of repetitions that nobody wants; a rule of dashes has fewer


def repeats(text: str) -> bool:
    """Whether an answer ends with one piece again and again, as greedy small models do."""
    found = _LOOP.search(text[-1000:])
    return found is not None and len(found[0]) >= _LOOP_CHARS


def show_answer(chunks: Iterable[Chunk], color: str) -> None:
    """Write an answer as it comes, and end its line.

    Args:
        color: which text is tinted in a terminal; see `tinted`.
    """
    wrap, has_line = Wrap(), False
    with keys_held():
        try:
            for chunk in chunks:
                if chunk.text:
                    has_line = True
                    write_answer(chunk.text, wrap.push(tinted(chunk, color)))
            has_line = True
        finally:
            if has_line:  # what failed before its first word has none
                write_answer("\n", wrap.end() + "\n")


def with_progress(answer: Stream | Turn) -> Iterator[Chunk]:
    """Its chunks. A terminal sees how far the prompt is read, where that takes over a second."""
    begun, progress = Event(), Progress()
    began_s, total = monotonic(), len(answer.prompt_ids)

    def show() -> None:
        every_s = _SILENT_S
        while not begun.wait(every_s):
            read, reused = answer.num_read
            left_s = (total - read) * (monotonic() - began_s) / max(1, read - reused)
            if read > reused:
                text = f"reading the prompt: {read:,} of {total:,} tokens, {left_s:.0f} s left,"
                progress(text, read / total)
            every_s = _SHOWN_EVERY_S

    shown = Thread(target=show, name="prompt-progress", daemon=True)
    shown.start()
    chunks = iter(answer)
    try:
        first = next(chunks, None)
    finally:
        begun.set()
        shown.join()
        progress.clear()
    if first is not None:
        yield first
        yield from chunks


class Wrap:
    """Breaks lines between words at the terminal's edge, while the text is still coming.

    A word is held back until its end is known. Words longer than a line, and lines of code
    (between fences), are left to the terminal, so that they can be copied as they are. Where the
    terminal does not tell its width, nothing is held back. Each character costs the same.
    """

    def __init__(self) -> None:
        self._columns = 0  # of the terminal; 0 is not known
        self._column = 0  # where the cursor is; the width itself after a full line
        self._gap = ""  # white space before the word
        self._word = ""  # held back; with the marks of a tint
        self._cells = 0  # columns that the word takes
        self._before = ""  # the last characters, by which the next one may be joined to them
        self._is_wide = False  # a line may end behind the word, and before it: 漢, or an emoji
        self._is_long = False  # the word has begun on the screen
        self._in_code = False

    def push(self, text: str) -> str:
        """What can be written now that `text` came."""
        self._columns = shutil.get_terminal_size((0, 0)).columns
        if not self._columns:
            return self.end() + text
        return "".join(map(self._add, re.findall(r"\x1b\[\d+m|(?s:.)", text)))

    def end(self) -> str:
        return self._put()

    def _add(self, char: str) -> str:
        if char == "\n":
            written = self._put() + char
            self._gap, self._column = "", 0
            return written
        if char in " \t":
            is_word = self._is_long or _MARK.sub("", self._word)
            written = self._put() if is_word else ""  # a mark alone is the next word's
            self._gap += char
            return written
        written, cells = "", 0
        if not _MARK.fullmatch(char):
            cells = self._cells_of(char)
            if cells == 2 or (cells and self._is_wide):
                written, self._is_wide = self._put(), cells == 2
        self._word += char
        self._cells += cells
        if not self._is_long and self._cells <= self._columns:
            return written
        self._is_long = True
        return written + self._put(whole=False)

    def _cells_of(self, char: str) -> int:
        """The columns that a character adds: none where it is joined to those before it."""
        if char.isascii():
            self._before = char
            return int(char.isprintable())
        from wcwidth import wcswidth  # takes 40 ms

        before = self._before
        self._before = (before + char)[-_MOST_JOINED:]
        return max(0, max(0, wcswidth(before + char)) - max(0, wcswidth(before)))

    def _put(self, *, whole: bool = True) -> str:
        """The word and the space before it, on the next line if there is no room on this one."""
        gap, word, cells = self._gap, self._word, self._cells
        is_long, self._is_long = self._is_long, self._is_long and not whole
        if not word:
            return ""
        fence = None if self._column or is_long else _FENCE.fullmatch(_MARK.sub("", word))
        if fence and not (self._in_code and fence[1]):
            self._in_code = not self._in_code
        self._gap, self._word, self._cells, self._is_wide = "", "", 0, False
        end = self._behind(gap) + cells
        if end > self._columns and not (is_long or self._in_code):
            gap, end = "\n", cells
        self._column = end if end <= self._columns else (end - 1) % self._columns + 1
        return gap + word

    def _behind(self, gap: str) -> int:
        """The cursor's column after white space."""
        column = self._column
        for char in gap:
            is_tab = char == "\t"
            column = min((column // _TAB + 1) * _TAB, self._columns - 1) if is_tab else column + 1
        return column


@contextmanager
def keys_held() -> Iterator[None]:
    """Keys typed in here are not shown and not lost: they are the next reader's.

    Ctrl-C and Ctrl-Z act at once. Nothing happens without a terminal, with a dumb one (it shows
    no line that it did not echo), in the background, or on a system without termios.
    """
    try:
        import termios
    except ImportError:
        yield
        return
    before = _own_terminal()
    if before is None:
        yield
        return
    held = [*before]
    held[0] &= ~termios.ICRNL  # Enter is to be told from Ctrl-J
    held[3] &= ~(termios.ECHO | termios.ICANON)
    held[3] |= termios.NOFLSH  # Ctrl-C takes nothing away that was typed

    def hold(*_: Any) -> None:
        if _own_terminal() is not None:  # else the system would stop this process
            termios.tcsetattr(sys.stdin, termios.TCSANOW, held)

    resumed = signal.getsignal(signal.SIGCONT)
    hold()
    signal.signal(signal.SIGCONT, hold)  # the shell has shown keys meanwhile
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, resumed)
        if _own_terminal() is not None:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _own_terminal() -> list[Any] | None:
    """The settings of a terminal that this process may change, and that an editor reads from."""
    import termios

    try:
        if is_dumb() or not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            return None
        return termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):  # closed, or another session's
        return None


NONE, DRAFTED, MODEL = "none", "drafted", "model"
COLORS = (NONE, DRAFTED, MODEL)
_CYAN, _NO_COLOR = "\x1b[36m", "\x1b[39m"
_UNDERLINE, _NO_UNDERLINE = "\x1b[4m", "\x1b[24m"


def color_option() -> Any:
    """What is tinted, as an option."""
    text = "Tint tokens: drafted, or model (of the large one of --switch)."
    return option(NONE, text, choices=COLORS, panel=OUTPUT)


def is_dumb() -> bool:
    """Whether the terminal says that it knows no escape sequences."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def tinted(chunk: Chunk, color: str) -> str:
    """A chunk for a terminal, with nothing that steers it, and a part of it tinted.

    Under NO_COLOR that part is underlined.
    """
    from edgespec.decode.generation import LARGE

    count = 0
    if color == DRAFTED and not is_dumb():
        count = chunk.drafted_chars
    elif color == MODEL and not is_dumb() and chunk.model == LARGE:
        count = len(chunk.text)
    begun, rest = printable(chunk.text[:count]), printable(chunk.text[count:])
    start, end = (_UNDERLINE, _NO_UNDERLINE) if os.environ.get("NO_COLOR") else (_CYAN, _NO_COLOR)
    return f"{start}{begun}{end}{rest}" if begun else rest
