"""Paths as people write them, and texts as their programs write them."""

from __future__ import annotations

import codecs
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import UnsupportedError

# Longer marks first: that of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "UTF-8", "utf-8"),
    (codecs.BOM_UTF32_LE, "UTF-32", "utf-32-le"),
    (codecs.BOM_UTF32_BE, "UTF-32", "utf-32-be"),
    (codecs.BOM_UTF16_LE, "UTF-16", "utf-16-le"),
    (codecs.BOM_UTF16_BE, "UTF-16", "utf-16-be"),
)
_HINT = "save it as UTF-8"
STDIN = "stdin"


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ replaced; as it is where there is no such home folder."""
    return Path(os.path.expanduser(path))


def text_of(data: bytes, name: str, *, offset: int = 0) -> str:
    r"""The text that a file or a pipe holds: UTF-8, or what its byte order mark says.

    The mark is no part of it, and "\r\n" is "\n".

    Args:
        name: what it is read from, for errors.
        offset: bytes that came before `data`.

    Raises UnsupportedError with the place of the first byte that is no text.
    """
    marks = () if offset else _MARKS
    found = (one for one in marks if data.startswith(one[0]))
    mark, shown, encoding = next(found, (b"", "UTF-8", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as problem:
        place = offset + len(mark) + problem.start
        raise UnsupportedError(
            f"{name} is not {shown} text: byte {place} is 0x{data[len(mark) + problem.start]:02x}",
            hint=_HINT,
        ) from None
    if not mark and (zero := data.find(0)) >= 0:
        raise UnsupportedError(
            f"{name} has a zero byte at {offset + zero}, so it is no text", hint=_HINT
        )
    return text.replace("\r\n", "\n")


def read_text(path: Path, *, most_bytes: int | None = None) -> str:
    """The text of a file, as `text_of`. Raises UnsupportedError where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read() if most_bytes is None else file.read(most_bytes + 1)
    except (OSError, ValueError) as problem:  # a name with a zero byte is a ValueError
        reason = getattr(problem, "strerror", None) or problem
        raise UnsupportedError(f"cannot read {path}: {reason}", hint="name a text file") from None
    if most_bytes is not None and len(data) > most_bytes:
        raise UnsupportedError(f"{path} has more than {most_bytes} bytes")
    return text_of(data, str(path))


def read_stdin() -> str:
    """All of stdin, as `text_of`."""
    return text_of(sys.stdin.buffer.read(), STDIN)


def stdin_lines() -> Iterator[str | UnsupportedError]:
    """The lines of stdin as they come, without their ends, as `text_of`; errors in their places."""
    first = sys.stdin.buffer.readline()
    if any(first.startswith(mark) for mark, _, encoding in _MARKS if encoding != "utf-8"):
        first += sys.stdin.buffer.read()
    offset = 0
    for data in itertools.chain([first], sys.stdin.buffer):
        try:
            yield from text_of(data, STDIN, offset=offset).removesuffix("\n").split("\n")
        except UnsupportedError as problem:
            yield problem
        offset += len(data)
