"""Messages that come through a pipe; those that are typed are in test_chat."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from edgespec.cli.chat_input import interface_bytes, read_messages


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    assert interface_bytes() == 0  # no line editor is loaded
    return list(read_messages(None))  # type: ignore[arg-type]


def test_each_line_is_a_message_and_empty_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, b"Hi\n\n  \n  /exit \nlast") == ["Hi", "/exit", "last"]
    assert piped(monkeypatch, b"") == []


def test_a_line_that_is_no_text_is_told_and_the_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\nc\r\n")))
    messages = read_messages(None)  # type: ignore[arg-type]
    assert next(messages) == "c"
    assert "error: stdin is not UTF-8 text: byte 1 is 0xff" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        next(messages)


def test_messages_of_other_programs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, b"\xef\xbb\xbf/exit\r\n") == ["/exit"]
    assert piped(monkeypatch, "Grüße\r\nnoch eine\n".encode("utf-16")) == ["Grüße", "noch eine"]
