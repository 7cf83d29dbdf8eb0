"""Messages that come through a pipe; those that are typed are in test_chat."""

from __future__ import annotations

import io
import sys

import pytest

from edgespec.cli.chat_input import interface_bytes, read_messages


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    assert interface_bytes() == 0  # no line editor is loaded
    return list(read_messages(None))  # type: ignore[arg-type]


def test_each_line_is_a_message_and_empty_ones_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, b"Hi\n\n  \n  /exit \nlast") == ["Hi", "/exit", "last"]
    assert piped(monkeypatch, b"") == []


def test_bytes_that_are_no_text_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, b"a\xffb\nc\n") == ["a\ufffdb", "c"]
