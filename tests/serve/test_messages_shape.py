"""What the `anthropic` client gets: messages and their events."""

from __future__ import annotations

import json
from typing import Any

import httpx
from serving_cases import HELLO, ConnectAnthropic, Serve, Speaker


def test_an_answer_is_a_message_with_its_usage(
    serve: Serve, anthropic_client: ConnectAnthropic
) -> None:
    backend = Speaker()
    talk = anthropic_client(serve(backend, names=["tiny"])).messages
    answer = talk.create(model="tiny", max_tokens=50, messages=HELLO, system="Be brief")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.to_dict() for block in answer.content] == [
        {"type": "text", "text": "Hello, world!"}
    ]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = len("<system>Be brief<user>Hi<assistant>")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt, 14)
    assert answer.usage.cache_read_input_tokens == 0
    again = talk.create(model="tiny", max_tokens=50, messages=HELLO, system="Be brief")
    assert again.usage.cache_read_input_tokens == prompt - 1
    assert again.usage.input_tokens == 1
    count = talk.count_tokens(model="tiny", messages=HELLO, system="Be brief")
    assert count.input_tokens == prompt


def test_the_ends_of_answers(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    talk = anthropic_client(serve(Speaker())).messages
    short = talk.create(model="edgespec", max_tokens=5, messages=HELLO)
    assert short.stop_reason == "max_tokens"
    stopped = talk.create(
        model="edgespec", max_tokens=50, messages=HELLO, stop_sequences=["x", "wor"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wor")


def test_a_stream_has_the_events_of_the_interface(
    serve: Serve, anthropic_client: ConnectAnthropic
) -> None:
    address = serve(Speaker())
    body = {"model": "edgespec", "max_tokens": 50, "messages": HELLO, "stream": True}
    response = httpx.post(f"{address}/v1/messages", json=body)
    events = [part.split("\n", 1) for part in response.text.split("\n\n") if part]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [o["type"] for o in documents]
    kinds = [one["type"] for one in documents]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with anthropic_client(address).messages.stream(
        model="edgespec", max_tokens=50, messages=HELLO
    ) as stream:
        assert "".join(stream.text_stream) == "Hello, world!"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 14


def test_thoughts_are_blocks_of_their_own(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
    )
    backend = Speaker("hm</think>Yes")
    talk = anthropic_client(serve(backend, chat_template=template)).messages
    asked: Any = {"model": "edgespec", "max_tokens": 50, "messages": HELLO}
    answer = talk.create(**asked, thinking={"type": "adaptive"})
    assert [(block.type, block.to_dict()) for block in answer.content] == [
        ("thinking", {"type": "thinking", "thinking": "hm", "signature": ""}),
        ("text", {"type": "text", "text": "Yes"}),
    ]
    with talk.stream(**asked, thinking={"type": "adaptive"}) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [b.to_dict() for b in answer.content]
