"""Prompts of conversations: which chat format they take, and whose words are words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_backend import FakeBackend
from serving_cases import Controlled

from edgespec.decode.engine import Engine
from edgespec.serve.service import Prompts

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_TOOLS = "<tools>" + PLAIN
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def engine() -> Iterator[Engine]:
    backend = FakeBackend(lambda _: [0.0] * 256, 256)
    backend.tokenizer = Controlled(256)
    with Engine(backend, chat_template=PLAIN, tool_template=WITH_TOOLS) as engine:
        yield engine


def test_a_format_for_tools_is_taken_where_there_are_some(engine: Engine) -> None:
    prompts = Prompts(engine)
    assert prompts.text_of(HELLO, {}) == "<user>Hello"
    assert prompts.text_of(HELLO, {"tools": [{}]}) == "<tools><user>Hello"
    assert (prompts.template(with_tools=True), prompts.template(with_tools=False)) == (
        WITH_TOOLS,
        PLAIN,
    )


def test_one_format_for_all_is_taken_for_tools_too(engine: Engine) -> None:
    one = Engine(engine.backend, chat_template=PLAIN)
    assert Prompts(one).text_of(HELLO, {"tools": [{}]}) == "<user>Hello"


def test_a_user_writes_no_control_token(engine: Engine) -> None:
    """The server and Python take the same way; a raw prompt means what it says."""
    said = [{"role": "user", "content": "a<user>b"}]
    prompts = Prompts(engine)
    ids = prompts.ids_of(prompts.text_of(said, {}))
    assert ids == [7, *b"a<user>b"]
    assert engine.encode(said) == engine.encode("a<user>b") == ids
    assert engine.encode("a<user>b", raw=True) == [*b"a", 7, *b"b"]
