"""Prompts that are read before they are asked: nothing is written, and nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from serving_cases import TEMPLATE, Speaker

from edgespec.backends.base import Logits
from edgespec.decode.engine import Engine
from edgespec.decode.session import Session
from edgespec.models.chat import ChatMessage


class Watched(Speaker):
    """Keeps how much is read at once."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.read: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.read.append(len(tokens))
        return super().prefill(tokens)


def test_what_was_prepared_is_not_read_again() -> None:
    backend = Watched("Yes.")
    with Engine(backend, chat_template=TEMPLATE) as engine:
        messages: list[ChatMessage] = [{"role": "user", "content": "words " * 30}]
        size = len(engine.encode(messages))
        assert engine.prepare(messages) == size
        assert max(backend.read) <= 64  # who asks meanwhile waits for one such piece
        assert engine.prepare(messages) == 1  # whose logits are wanted
        result = engine.generate(messages, reuse=True)
        assert result.text == "Yes." and result.counters.reused_tokens == size - 1
        assert engine.generate(messages).text == "Yes."


def test_a_session_prepares_what_is_typed_and_does_not_change() -> None:
    backend = Watched("Yes.")
    with Engine(backend, chat_template=TEMPLATE) as engine:
        session = Session(engine, system="Be brief.")
        session.send("One")
        before = session.messages
        assert session.prepare() == len("<user><assistant>")  # behind the answer
        assert session.prepare("Two and") > 0
        assert session.messages == before
        result = session.send("Two and three")
        assert result.text == "Yes."
        unread = result.counters.prompt_tokens - result.counters.reused_tokens
        assert unread == len(" three<assistant>")


def test_preparing_is_stopped_and_keeps_what_was_read() -> None:
    backend, cancel = Watched("Yes."), threading.Event()
    with Engine(backend, chat_template=TEMPLATE) as engine:
        session = Session(engine)
        cancel.set()
        assert session.prepare("words " * 100, cancel=cancel) == 0
        assert engine.prepare("words " * 100, cancel=cancel) == 0
        assert backend.read == []


def test_a_cache_that_cannot_go_back_is_not_filled_with_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Watched("Yes.")
    with Engine(backend, chat_template=TEMPLATE) as engine:
        monkeypatch.setattr(Engine, "goes_back", False)
        assert engine.prepare("Hi") == Session(engine).prepare("Hi") == 0
        assert backend.read == []
