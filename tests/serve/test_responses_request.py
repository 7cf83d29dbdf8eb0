"""Responses through the `openai` client."""

from __future__ import annotations

from typing import Any

import httpx
from serving_cases import CALL, WEATHER, Connect, Serve, Speaker


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
