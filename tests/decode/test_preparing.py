"""Prompts that are read before they are asked: nothing is written, and nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest
from serving_cases import TEMPLATE, Speaker

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.session import Session
from edgespec.errors import UnsupportedError
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


class Remembering(Watched):
    """Keeps the logits of what it read last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kept: Logits | None = None

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.kept = super().prefill(tokens)
        return self.kept

    def verify(self, tree: DraftTree) -> Logits:
        self.kept = None
        return super().verify(tree)

    def truncate(self, length: int) -> int:
        self.kept = self.kept if length == self.length else None
        return super().truncate(length)

    def last_logits(self) -> Logits | None:
        return self.kept


@pytest.mark.parametrize("most", [1, 8])
def test_an_answer_begins_with_the_logits_that_were_read_ahead(most: int) -> None:
    backend = Remembering("Yes.")
    with Engine(backend, chat_template=TEMPLATE) as engine:
        messages: list[ChatMessage] = [{"role": "user", "content": "Is it?"}]
        size = engine.prepare(messages)
        read = [*backend.read]
        assert engine.prepare(messages) == 0
        stream = engine.stream(messages, reuse=True, max_tokens=most)
        assert next(stream).text == "Y"
        assert backend.steps_made == 0  # the first token waited for no step
        for _ in stream:
            pass
        counters = stream.result.counters
        assert stream.result.text == "Yes."[:most] and backend.read == read
        assert counters.reused_tokens == counters.prompt_tokens == size
        assert (counters.rounds, counters.generated_tokens) == ((0, 1) if most == 1 else (4, 5))
        # Behind the answer they are those of another token.
        assert engine.generate(messages, reuse=True).text == "Yes."
        assert backend.read != read or most == 1


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


@pytest.mark.model
def test_no_pick_changes_the_logits_that_are_kept(exact_engine: Engine) -> None:
    """They are the context's own: whoever asks the same next picks from them again."""
    ask = partial(exact_engine.generate, "A river in Africa is the", max_tokens=1, reuse=True)
    (first,) = ask(temperature=0.0).token_ids
    for asked in ({"logit_bias": {first: -100.0}}, {"json_schema": {"type": "object"}}):
        assert ask(temperature=0.0, **asked).token_ids != (first,)
        again = ask(temperature=0.0)
        assert again.token_ids == (first,)
        assert again.counters.reused_tokens == again.counters.prompt_tokens


@pytest.mark.model
def test_what_was_read_ahead_is_answered_as_if_it_were_not(exact_engine: Engine) -> None:
    """Whatever was typed before, to the token; from the logits that were read, or read again."""
    text = "Write three sentences about rain in spring, and one about snow."

    def answer() -> tuple[tuple[int, ...], int]:
        result = Session(exact_engine).send(text, max_tokens=24)
        counters = result.counters
        return result.token_ids, counters.prompt_tokens - counters.reused_tokens

    exact_engine.backend.truncate(0)
    expected, unread = answer()
    assert unread > 16
    exact_engine.backend.truncate(0)
    session = Session(exact_engine)
    for typed in ("Write thr", "Write three sentences about the", text[:-1], text):
        assert session.prepare(typed) > 0
    assert answer() == (expected, 0)
    assert answer() == (expected, 1)  # others were made meanwhile


def test_a_template_that_writes_nothing_is_told_as_it_was() -> None:
    with Engine(Watched("Yes."), chat_template="{{ messages[0].content }}") as engine:
        for ask in (Session(engine).prepare, Session(engine).send, engine.prepare):
            with pytest.raises(UnsupportedError, match="the prompt is empty"):
                ask("")


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
