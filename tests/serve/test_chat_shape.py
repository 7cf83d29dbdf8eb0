"""Chats as answers and as streams."""

from __future__ import annotations

import json

import httpx
from serving_cases import HELLO, Connect, Serve, Speaker


def test_an_answer_is_what_the_model_says_with_its_usage(serve: Serve, client: Connect) -> None:
    answer = client(serve(Speaker())).chat.completions.create(model="edgespec", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = len("<user>Hi<assistant>")
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len("Hello, world!") + 1
    assert answer.usage.total_tokens == prompt + len("Hello, world!") + 1
    timings = answer.model_extra["timings"] if answer.model_extra else {}
    assert timings["predicted_n"] == len("Hello, world!") + 1
    assert timings["draft_n"] == 0


def test_a_stream_has_role_deltas_reason_usage_and_an_end(serve: Serve) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(texts) == "Hello, world!"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len("Hello, world!") + 1
    assert all(event["usage"] is None for event in events[:-1])
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
