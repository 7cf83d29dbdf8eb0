"""Tools, thoughts and responses through the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving_cases import TEMPLATE, Connect, Serve, Speaker

HELLO: Any = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


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


def test_responses(serve: Serve, client: Connect) -> None:
    made = client(serve(Speaker())).responses.create(
        model="edgespec", input="Hi", instructions="Be brief", max_output_tokens=5
    )
    assert made.output_text == "Hello"
    assert made.status == "incomplete"
    assert made.usage is not None and made.usage.output_tokens == 5


def test_a_stream_of_a_response(serve: Serve, client: Connect) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    stream = client(serve(Speaker(f"Look. {CALL}"))).responses.create(
        model="edgespec",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        tools=[tool],
        stream=True,
    )
    events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.done" in kinds
    final: Any = events[-1]
    assert [item.type for item in final.response.output] == ["message", "function_call"]
    assert final.response.output_text == "Look."
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))


def test_a_conversation_of_items(serve: Serve, client: Connect) -> None:
    made = client(serve(Speaker())).responses.create(
        model="edgespec",
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "Sun"},
        ],
    )
    assert made.output_text == "Hello, world!"


def test_what_needs_a_memory_of_responses_is_refused(serve: Serve) -> None:
    address = serve(Speaker())
    for field, value in (("previous_response_id", "resp_1"), ("store", True)):
        body = {"input": "Hi", field: value}
        error = httpx.post(f"{address}/v1/responses", json=body).json()["error"]
        assert error["message"].startswith(f"{field} is not supported")
    assert httpx.post(f"{address}/v1/embeddings", json={"input": "a"}).status_code == 501


def test_what_a_server_tells_of_itself(serve: Serve) -> None:
    address = serve(Speaker())
    httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
    assert httpx.get(f"{address}/props").json()["default_generation_settings"]["n_ctx"] == 2048
    assert httpx.get(f"{address}/slots").json()[0]["is_processing"] is False
    told = httpx.get(f"{address}/metrics").text
    assert "edgespec_generated_tokens_total 14\n" in told
    assert 'edgespec_requests_total{status="200"} 3\n' in told
    state = httpx.get(f"{address}/status").json()
    assert state["totals"]["generations"] == 1 and state["queue"]["waiting"] == 0
    pieces = httpx.post(f"{address}/tokenize", json={"content": "Hé", "with_pieces": True}).json()
    assert pieces["tokens"][0] == {"id": 72, "piece": "H"}
    assert pieces["tokens"][1] == {"id": 0xC3, "piece": [0xC3]}
    back = httpx.post(f"{address}/detokenize", json={"tokens": [72, 0xC3, 0xA9]}).json()
    assert back == {"content": "Hé"}
    wrong = httpx.post(f"{address}/detokenize", json={"tokens": [999]})
    assert "from 0 to 256" in wrong.json()["error"]["message"]
