"""Tools and thoughts through the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving_cases import CALL, HELLO, TEMPLATE, WEATHER, Connect, Serve, Speaker


def test_a_tool_is_called_and_its_result_told(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker(CALL))).chat.completions
    answer = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    said: Any = [
        *HELLO,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sun"},
    ]
    again = talk.create(model="edgespec", messages=said, tools=[WEATHER])
    told = len("<assistant>\n<tool_response>\nSun\n</tool_response>")
    assert again.usage is not None and answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens + told


def test_a_stream_of_calls(serve: Serve, client: Connect) -> None:
    stream = client(serve(Speaker(f"Look. {CALL}"))).chat.completions.create(
        model="edgespec", messages=HELLO, tools=[WEATHER], stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(one.delta.content or "" for one in chunks) == "Look."
    calls = [call for one in chunks for call in one.delta.tool_calls or []]
    assert [(call.index, call.function and call.function.name) for call in calls] == [
        (0, "weather")
    ]
    assert chunks[-1].finish_reason == "tool_calls"


def test_tools_that_are_not_to_be_called_are_not_told(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker())).chat.completions
    plain = talk.create(model="edgespec", messages=HELLO).usage
    none = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER], tool_choice="none").usage
    told = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER]).usage
    assert plain and none and told
    assert none.prompt_tokens == plain.prompt_tokens < told.prompt_tokens


def test_a_template_that_knows_tools_gets_them_as_they_are(serve: Serve, client: Connect) -> None:
    template = TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    talk = client(serve(Speaker(), chat_template=template)).chat.completions
    plain = talk.create(model="edgespec", messages=HELLO).usage
    told = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER]).usage
    assert plain and told and told.prompt_tokens == plain.prompt_tokens + len("weather")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "requires a tool"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "is none of the tools",
    ),
    ({"tools": [WEATHER], "tool_choice": 7}, "tool_choice must be"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "beside tools"),
]


@pytest.mark.parametrize(("more", "message"), BAD)
def test_bad_tools_are_told(serve: Serve, more: dict[str, Any], message: str) -> None:
    body = {"messages": HELLO, **more}
    response = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_thoughts_are_apart_from_the_answer(serve: Serve) -> None:
    template = TEMPLATE + "{# </think> #}"
    address = serve(Speaker("<think>Hm.</think>\n\nYes."), chat_template=template)
    message = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).json()
    assert message["choices"][0]["message"]["content"] == "Yes."
    assert message["choices"][0]["message"]["reasoning_content"] == "Hm."
