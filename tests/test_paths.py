"""Texts as the programs of users write them: byte order marks, line ends, and what is no text."""

from __future__ import annotations

import codecs
import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import UnsupportedError
from edgespec.paths import read_stdin, read_text, stdin_lines, text_of

TEXT = "één\r\nzwei\r\n日本 😀\n"
PLAIN = "één\nzwei\n日本 😀\n"
WRITTEN = {
    "UTF-8": TEXT.encode(),
    "UTF-8 with a mark": codecs.BOM_UTF8 + TEXT.encode(),
    "UTF-16, little": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "UTF-16, big": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "UTF-32": codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
}


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("data", WRITTEN.values(), ids=WRITTEN)
def test_a_file_and_a_pipe_give_the_same_text(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_bytes(data)
    assert read_text(tmp_path / "text") == PLAIN
    piped(monkeypatch, data)
    assert read_stdin() == PLAIN
    piped(monkeypatch, data)
    assert list(stdin_lines()) == PLAIN.splitlines()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"caf\xe9", "f is not UTF-8 text: byte 3 is 0xe9"),
        (codecs.BOM_UTF8 + b"a\xff", "f is not UTF-8 text: byte 4 is 0xff"),
        ("hi".encode("utf-16-le"), "f has a zero byte at 1, so it is no text"),
        (codecs.BOM_UTF16_LE + b"a\0b", "f is not UTF-16 text: byte 4 is 0x62"),
    ],
)
def test_other_bytes_are_refused_with_their_place(data: bytes, told: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        text_of(data, "f")
    assert (str(caught.value), caught.value.hint) == (told, "save it as UTF-8")


def test_a_line_that_is_no_text_is_told_and_the_next_ones_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped(monkeypatch, b"one\r\nt\xffwo\nthree\n\xff\xfea\0")
    first, second, third, fourth = stdin_lines()
    assert (first, third) == ("one", "three")
    assert str(second) == "stdin is not UTF-8 text: byte 6 is 0xff"
    assert str(fourth) == "stdin is not UTF-8 text: byte 16 is 0xff"  # a mark is at the beginning


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot read .*: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(UnsupportedError, match=r"cannot read a.b: embedded null byte"):
        read_text(Path("a\0b"))
    (tmp_path / "large").write_bytes(b"a" * 11)
    with pytest.raises(UnsupportedError, match="has more than 10 bytes"):
        read_text(tmp_path / "large", most_bytes=10)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_text_or_an_error_of_ours(data: bytes) -> None:
    try:
        text_of(data, "f").encode()
    except UnsupportedError as problem:
        assert "\n" not in str(problem)
