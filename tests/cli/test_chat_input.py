"""Messages that come through a pipe; those that are typed are in test_chat."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import typer

from edgespec.cli import chat_input
from edgespec.cli.chat_input import interface_bytes, read_messages
from edgespec.cli.chat_loop import NextLine
from edgespec.cli.read_ahead import OFF, ReadAhead
from edgespec.sampling.params import SamplingParams


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    assert interface_bytes() == 0  # no line editor is loaded
    return list(read_messages(None, None))  # type: ignore[arg-type]


def test_each_line_is_a_message_and_empty_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, b"Hi\n\n  \n  /exit \nlast") == ["Hi", "/exit", "last"]
    assert piped(monkeypatch, b"") == []


def test_a_line_that_is_no_text_is_told_and_the_others_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\nc\r\n")))
    messages = read_messages(None, None)  # type: ignore[arg-type]
    assert next(messages) == "c"
    assert "error: stdin is not UTF-8 text: byte 1 is 0xff" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        next(messages)


def test_messages_of_other_programs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, b"\xef\xbb\xbf/exit\r\n") == ["/exit"]
    assert piped(monkeypatch, "Grüße\r\nnoch eine\n".encode("utf-16")) == ["Grüße", "noch eine"]


def test_a_history_that_grew_long_is_shortened_at_its_old_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is read at each start, and it once held every paste for ever."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    file = tmp_path / "chat-history"
    lines = [f"\n# 2026-11-27 12:00:00\n+line {number} {'x' * 1000}\n" for number in range(400)]
    file.write_text("".join(lines))
    kept = list(chat_input._history().load_history_strings())
    assert 100 < len(kept) < 140 and kept[0].startswith("line 399 ")
    assert all(re.fullmatch(r"line \d+ x{1000}", one) for one in kept)
    assert file.stat().st_mode & 0o777 == 0o600


def test_bytes_that_are_no_text_are_told_where_they_are_typed_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They became question marks without a word; editors hand them on as half characters."""
    typed, offered = iter(["caf\udce9 au lait", "café au lait"]), list[str]()

    class Editor:
        default_buffer = SimpleNamespace(text="")

        def prompt(self, _prompt: str, default: str = "") -> str:
            offered.append(default)
            if (line := next(typed, None)) is None:
                raise EOFError
            return line

    monkeypatch.setattr(chat_input, "_is_typed", lambda: True)
    monkeypatch.setattr(chat_input, "is_dumb", lambda: False)
    monkeypatch.setattr(chat_input, "_prompt_session", lambda _chat, _ahead: Editor())
    session = SimpleNamespace(sampling=SamplingParams())
    chat: Any = SimpleNamespace(next_line=NextLine(), session=session)
    ahead = Mock()
    assert list(read_messages(chat, ahead)) == ["café au lait"]
    began = [one for line in offered for one in (call.begins(line), call.stop())]
    assert ahead.mock_calls == began, "nothing is read once a line is sent, or given up"
    assert offered == ["", "caf au lait", ""]
    told = capsys.readouterr().err
    assert "error: the message is not UTF-8 text: it has the byte 0xe9\n" in told
    assert "hint: set the terminal to UTF-8" in told


def test_a_terminal_without_an_editor_reads_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\nok\n")))
    monkeypatch.setattr(chat_input, "_is_typed", lambda: True)
    monkeypatch.setattr(chat_input, "is_dumb", lambda: True)
    session = SimpleNamespace(sampling=SamplingParams())
    chat: Any = SimpleNamespace(next_line=NextLine(), session=session)
    assert list(read_messages(chat, ReadAhead(chat, OFF))) == ["ok"]
    assert "it has the byte 0xff" in capsys.readouterr().err
