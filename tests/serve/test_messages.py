"""Messages of a request, as chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.serve.fields import Fields
from edgespec.serve.limits import Limits
from edgespec.serve.messages import take_messages
from edgespec.serve.refusal import Refusal


def taken(*messages: Any) -> list[dict[str, Any]]:
    return take_messages(Fields({"messages": list(messages)}), Limits())


def test_parts_are_lines_and_developers_write_the_system_message() -> None:
    parts = [{"type": "text", "text": "Good"}, {"type": "text", "text": "day"}]
    assert taken({"role": "developer", "content": parts}, {"role": "user", "content": "Hi"}) == [
        {"role": "system", "content": "Good\nday"},
        {"role": "user", "content": "Hi"},
    ]


def test_a_call_that_is_sent_back_is_an_object_for_templates() -> None:
    """Clients send arguments as a text; an answer of calls alone has no content."""
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "call_1", "type": "function", "index": 0, "function": function}
    (found,) = taken({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    assert found["content"] == ""
    assert found["tool_calls"] == [
        {
            "type": "function",
            "id": "call_1",
            "function": {"name": "weather", "arguments": {"city": "Rome"}},
        }
    ]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Sun"}
    assert taken(result) == [result]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[0].content must be a text or a list of text parts, not null"),
        ({"role": "judge", "content": "a"}, "messages[0].role must be one of"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            'messages[0].content[0].type "image_url" is not supported',
        ),
        (
            {"role": "user", "content": "a", "audio": {"id": "a"}},
            "messages[0].audio is not supported",
        ),
    ],
)
def test_a_refusal_names_the_place(message: Any, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        taken(message)
    assert str(caught.value).startswith(words)
    assert caught.value.param == words.split()[0]


def test_a_conversation_has_a_message() -> None:
    with pytest.raises(Refusal, match=r"^messages must have at least one message$"):
        taken()
