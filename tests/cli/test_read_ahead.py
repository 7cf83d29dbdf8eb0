"""Messages of a chat are read while they are typed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving_cases import TEMPLATE, Speaker
from waiting import until

from edgespec.backends.base import Logits
from edgespec.cli import read_ahead
from edgespec.cli.chat_loop import Chat, NextLine, Totals
from edgespec.cli.read_ahead import AUTO, OFF, ON, ReadAhead
from edgespec.decode.engine import Engine
from edgespec.decode.session import Session
from edgespec.memory.device import energy


class Slow(Speaker):
    """Waits within each piece, if it shall; knows what it read."""

    goes_on = threading.Event()
    read = 0

    def prefill(self, tokens: Sequence[int]) -> Logits:
        assert self.goes_on.wait(10)
        self.read += len(tokens)
        return super().prefill(tokens)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(read_ahead, "_QUIET_S", 0.01)
    backend = Slow("Yes.")
    backend.goes_on = threading.Event()
    backend.goes_on.set()
    with Engine(backend, chat_template=TEMPLATE) as engine:
        made: Any = SimpleNamespace(engine=engine, session=Session(engine), next_line=NextLine())
        made.images, made.totals, made._ahead = [], Totals(), 0
        made.read_ahead = lambda *arguments: Chat.read_ahead(made, *arguments)
        yield made


def unread(chat: Any, text: str) -> int:
    counters = chat.session.send(text).counters
    return int(counters.prompt_tokens - counters.reused_tokens)


def test_what_is_typed_is_read_and_the_rest_when_it_is_sent(chat: Any) -> None:
    ahead = ReadAhead(chat, ON)
    ahead.begins("")
    until(lambda: chat.totals.read_ahead == len("<user><assistant>"))
    ahead.typed("Tell me of the thr")
    until(lambda: chat.totals.read_ahead > 20)
    ahead.stop()
    assert unread(chat, "Tell me of the three") == len("ee<assistant>")
    ahead.begins("")  # behind the answer
    before = chat.totals.read_ahead
    until(lambda: chat.totals.read_ahead > before)
    ahead.stop()
    assert unread(chat, "More") == len("More<assistant>")


def test_nothing_is_left_to_read_where_no_more_is_typed(chat: Any) -> None:
    """Line breaks around a pasted text are not sent: they are not read either."""
    ahead = ReadAhead(chat, ON)
    ahead.typed("\nTell me\nof the three\n")
    until(lambda: chat.totals.read_ahead >= len("<user>Tell me\nof the three<assistant>"))
    ahead.stop()
    assert unread(chat, "Tell me\nof the three") == 1  # whose logits this backend does not keep


def test_what_reading_takes_is_counted_where_there_is_a_counter(
    chat: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(text: str) -> float | None:
        Chat.read_ahead(chat, text, threading.Event())
        told: float | None = chat.totals.read_ahead_j
        return told

    zone = tmp_path / "class/powercap/intel-rapl:0"
    monkeypatch.setattr(energy, "SYS", tmp_path)
    assert read("Tell me") is None
    zone.mkdir(parents=True)
    for name, text in {"name": "package-0", "energy_uj": "1", "max_energy_range_uj": "0"}.items():
        (zone / name).write_text(text)
    monkeypatch.setattr(energy.EnergyMeter, "joules", partial(next, itertools.count(0.0, 2.5)))
    assert (read("Tell me of"), read("Tell me of the")) == (2.5, 5.0)


def test_commands_are_not_read(chat: Any) -> None:
    ahead = ReadAhead(chat, ON)
    ahead.typed("/file the words of a command")
    threading.Event().wait(0.1)
    ahead.stop()
    assert not chat.totals.read_ahead


def test_a_message_that_begins_with_a_slash_is_read_as_it_is_sent(chat: Any) -> None:
    ahead = ReadAhead(chat, ON)
    ahead.typed("//etc/hosts is a file")
    until(lambda: chat.totals.read_ahead)
    ahead.stop()
    assert unread(chat, "/etc/hosts is a file") == 1


def test_the_next_key_and_enter_stop_it_at_once(chat: Any) -> None:
    """It ends behind the piece of 64 tokens that is under way."""
    backend = chat.engine.backend
    backend.goes_on.clear()
    ahead = ReadAhead(chat, ON)
    ahead.typed("words " * 300)
    until(lambda: not chat.engine.scheduler.is_idle)
    ahead.typed("others")
    threading.Timer(0.1, backend.goes_on.set).start()
    ahead.stop()
    assert 0 < backend.read <= 128
    assert chat.session.messages == []


def test_nothing_is_read_on_battery_unless_asked(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.memory.device.energy.is_on_battery", lambda: True)
    for choice in (AUTO, OFF):
        ReadAhead(chat, choice).begins("")
    threading.Event().wait(0.1)
    assert not chat.totals.read_ahead
    ReadAhead(chat, ON).begins("")
    until(lambda: chat.totals.read_ahead)


def test_what_takes_the_place_of_a_message_or_has_an_image_waits(chat: Any) -> None:
    ahead = ReadAhead(chat, ON)
    chat.images.append("an image")
    ahead.begins("")
    ahead.stop()
    chat.images.clear()
    chat.next_line.replaces = True
    ahead.begins("")
    threading.Event().wait(0.1)
    ahead.stop()
    assert not chat.totals.read_ahead
