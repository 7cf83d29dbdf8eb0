"""Responses, and the events of their streams."""

from __future__ import annotations

from typing import Any

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
