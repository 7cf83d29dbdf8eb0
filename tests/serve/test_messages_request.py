"""What the `anthropic` client may ask for, and what it may not."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from serving_cases import HELLO, ConnectAnthropic, Serve, Speaker

TOOL: Any = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called_and_answered(
    serve: Serve, anthropic_client: ConnectAnthropic, streams: bool
) -> None:
    backend = Speaker(f"Let me look.\n{CALL}")
    talk = anthropic_client(serve(backend)).messages
    asked: Any = {
        "model": "edgespec",
        "max_tokens": 200,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
    }
    if streams:
        with talk.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = talk.create(**asked)
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert text.type == "text" and text.text == "Let me look."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Paris"})
    said: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    backend.ids = [*b"Take a coat."]
    last = talk.create(**{**asked, "messages": said, "max_tokens": 12})
    assert last.content[0].to_dict() == {"type": "text", "text": "Take a coat."}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "must have at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, '"image" is not supp'),
        ({"tool_choice": {"type": "any"}}, "requires a tool that is not there"),
        ({"thinking": {"type": "often"}}, "thinking.type must be enabled, adaptive or disabled"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
        ({"container": "x"}, "container is not supported"),
    ],
)
def test_what_is_not_supported_is_an_error_of_the_interface(
    serve: Serve, changes: dict[str, Any], problem: str
) -> None:
    body = {"model": "edgespec", "max_tokens": 5, "messages": HELLO, **changes}
    response = httpx.post(f"{serve(Speaker())}/v1/messages", json=body)
    assert response.status_code == 400
    document = response.json()
    assert document["type"] == "error" and document["error"]["type"] == "invalid_request_error"
    assert problem in document["error"]["message"]


def test_the_client_knows_its_errors(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    address = serve(Speaker(), keys=("secret",))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client(address).messages.create(model="edgespec", max_tokens=5, messages=HELLO)
    known = anthropic_client(address, "secret").messages
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        known.create(model="claude", max_tokens=5, messages=HELLO)
    answer = known.create(model="edgespec", max_tokens=5, messages=HELLO)
    assert answer.stop_reason == "max_tokens"


def test_an_answer_may_have_to_fit_a_schema(serve: Serve) -> None:
    """Of a model that has no grammars: refused, not ignored."""
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    body = {
        "model": "edgespec",
        "max_tokens": 5,
        "messages": HELLO,
        "output_config": {"format": format_},
    }
    response = httpx.post(f"{serve(Speaker())}/v1/messages", json=body)
    assert response.status_code == 400
    assert "a grammar needs" in response.json()["error"]["message"]
