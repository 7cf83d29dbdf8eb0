"""Colour in answers: what came from drafts, or which of two models wrote it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from edgespec.cli.options import OUTPUT
from edgespec.cli.render import printable
from edgespec.decode.stats import LARGE
from edgespec.option_fields import option

if TYPE_CHECKING:
    from edgespec.decode.generation import Chunk

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


class Tint:
    """Text for a terminal, with marks around a part of it; underlined under NO_COLOR."""

    def __init__(self, color: str) -> None:
        self._color = NONE if is_dumb() else color
        marks = (_UNDERLINE, _NO_UNDERLINE) if os.environ.get("NO_COLOR") else (_CYAN, _NO_COLOR)
        self._start, self._end = marks

    def text(self, chunk: Chunk) -> str:
        """A chunk with what is to be seen of it tinted, and nothing that steers the terminal."""
        count = 0
        if self._color == DRAFTED:
            count = chunk.drafted_chars
        elif self._color == MODEL and chunk.model == LARGE:
            count = len(chunk.text)
        tinted, rest = printable(chunk.text[:count]), printable(chunk.text[count:])
        return f"{self._start}{tinted}{self._end}{rest}" if tinted else rest
