"""Responses through the `openai` client: requests and events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from serving_cases import (
    CALL,
    CALLS,
    HELLO,
    WEATHER,
    Connect,
    Failing,
    Serve,
    Speaker,
    calling_reader,
    events_of,
)

from edgespec.serve.responses import ResponsesSerializer


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


def test_a_conversation_is_sent_as_a_whole(serve: Serve, client: Connect) -> None:
    backend = Speaker()
    talk = client(serve(backend)).responses
    first = talk.create(model="edgespec", input="Hi", store=True)
    assert not first.store  # type: ignore[attr-defined]
    more: Any = [{"role": "user", "content": "Hi"}, *first.output]
    talk.create(model="edgespec", input=[*more, {"role": "user", "content": "More"}])
    assert backend.prompt_length == len("<user>Hi<assistant>Hello, world!<user>More<assistant>")


def test_what_would_be_kept_elsewhere_is_refused(serve: Serve, client: Connect) -> None:
    """With what to do instead; an answer without the turns before it would mislead."""
    talk = client(serve(Speaker())).responses
    reference: Any = [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "Hi"}]
    for fields in ({"previous_response_id": "resp_1", "input": "Hi"}, {"input": reference}):
        with pytest.raises(BadRequestError, match="send the whole conversation as input"):
            talk.create(model="edgespec", **fields)
    with pytest.raises(BadRequestError, match="background is not supported"):
        talk.create(model="edgespec", input="Hi", background=True)
    with pytest.raises(NotFoundError, match="GET /v1/responses/resp_1 is not supported"):
        talk.retrieve("resp_1")


def test_embeddings_say_the_way_out(serve: Serve) -> None:
    told = httpx.post(f"{serve(Speaker())}/v1/embeddings", json={"input": "a"})
    assert told.status_code == 404
    assert "ask a model that was made for them" in told.json()["error"]["message"]


def test_responses(serve: Serve, client: Connect) -> None:
    made = client(serve(Speaker())).responses.create(
        model="edgespec", input="Hi", instructions="Be brief", max_output_tokens=5
    )
    assert made.output_text == "Hello"
    assert made.status == made.output[0].status == "incomplete"  # type: ignore[union-attr]
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


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Types of events, those of texts once for any number."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [one for place, one in enumerate(kinds) if kinds[place - 1 : place] != [one]]


@pytest.mark.parametrize("summarises", [False, True])
def test_every_part_of_an_answer_has_its_events(summarises: bool) -> None:
    """A thought is told as a text of its item, or as its summary where that is asked for."""
    serializer = ResponsesSerializer("m", {}, summarises=summarises)
    events = events_of(serializer, calling_reader(), CALLS)
    text = ["reasoning_text.delta", "reasoning_text.done"]
    thought = ["content_part.added", *text, "content_part.done"]
    if summarises:
        text = ["reasoning_summary_text.delta", "reasoning_summary_text.done"]
        thought = ["reasoning_summary_part.added", *text, "reasoning_summary_part.done"]
    part = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = [f"function_call_arguments.{one}" for one in ("delta", "done")]
    items = [
        ["output_item.added", *inner, "output_item.done"] for inner in (thought, part, call, call)
    ]
    middle = [kind for item in items for kind in item]
    assert kinds_of(events) == ["created", "in_progress", *middle, "completed"]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert output[0]["summary" if summarises else "content"][0]["text"] == "Hm."
    assert output[1]["content"][0]["text"] == "I look."
    assert [one["arguments"] for one in output[2:]] == ['{"city": "Rome"}', "{}"]
    for number in (2, 3):
        told = [one for one in events if one.get("output_index") == number and "delta" in one]
        assert "".join(one["delta"] for one in told) == output[number]["arguments"]
        assert {one["item_id"] for one in told} == {output[number]["id"]}
    assert sum("arguments.delta" in one["type"] for one in events) > 10


def test_what_a_template_refuses_is_a_field_of_the_chat(serve: Serve) -> None:
    address = serve(Speaker(), chat_template="{{ raise_exception('roles must alternate') }}")
    for path in ("responses", "chat/completions"):
        body = {"input": "Hi", "messages": HELLO}
        told = httpx.post(f"{address}/v1/{path}", json=body)
        assert told.status_code == 400 and told.json()["error"]["param"] == "messages"
        assert "roles must alternate" in told.json()["error"]["message"]


def test_tokens_of_a_response_are_counted(serve: Serve, client: Connect) -> None:
    responses = client(serve(Speaker())).responses
    made = responses.create(model="edgespec", input="Hi")
    counted = responses.input_tokens.count(model="edgespec", input="Hi").input_tokens
    assert made.usage is not None and counted == made.usage.input_tokens


def test_events_of_a_text_have_what_the_interface_requires() -> None:
    events = events_of(ResponsesSerializer("m", {}), calling_reader(), CALLS)
    texts = [one for one in events if one["type"].startswith("response.output_text.")]
    assert texts and all(one["logprobs"] == [] for one in texts)


def test_tokens_of_a_thought_are_counted(serve: Serve) -> None:
    """Up to its end; a model that is cut off within it wrote nothing else."""
    address = serve(Speaker("<think>Hm.</think>Yes."))
    told = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}).json()["usage"]
    assert told["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think")
    chat = {"messages": HELLO, "max_tokens": 9}
    told = httpx.post(f"{address}/v1/chat/completions", json=chat).json()["usage"]
    assert told["completion_tokens_details"]["reasoning_tokens"] == 9


def test_a_summary_of_thoughts_is_asked_for(serve: Serve) -> None:
    address = serve(Speaker("<think>Hm.</think>Yes."))
    body = {"input": "Hi", "stream": True, "reasoning": {"summary": "auto"}}
    told = httpx.post(f"{address}/v1/responses", json=body).text
    assert "event: response.reasoning_summary_text.delta" in told
    del body["reasoning"]
    assert "summary_text" not in httpx.post(f"{address}/v1/responses", json=body).text


def test_an_answer_that_fails_ends_with_its_event(serve: Serve) -> None:
    """With what was written, and what failed; nothing comes after it."""
    body = {"input": "Hi", "stream": True}
    told = httpx.post(f"{serve(Failing())}/v1/responses", json=body).text
    *_, last = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "the server failed: RuntimeError" in last["response"]["error"]["message"]


def test_logprobs_are_those_of_the_text(serve: Serve) -> None:
    """With an answer, its part and its events; a thought has none, nor what asks for none."""
    address = serve(Speaker("<think>Hm.</think>Yes."))
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}

    def told(part: dict[str, Any]) -> list[str]:
        assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
        return [one["token"] for one in part["logprobs"]]

    whole = httpx.post(f"{address}/v1/responses", json=body).json()
    thought, message = whole["output"]
    assert "logprobs" not in thought["content"][0]
    assert told(message["content"][0]) == list("Yes.")
    streamed = httpx.post(f"{address}/v1/responses", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    by_kind: dict[str, list[str]] = {}
    for one in events:
        if one["type"].startswith("response.output_text."):
            by_kind.setdefault(one["type"].rpartition(".")[2], []).extend(told(one))
    assert by_kind == {"delta": list("Yes."), "done": list("Yes.")}
    part = events[-1]["response"]["output"][1]["content"][0]
    assert told(part) == list("Yes.")
    plain = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}).json()
    assert plain["output"][1]["content"][0]["logprobs"] == []
    refused = httpx.post(f"{address}/v1/responses", json={"input": "Hi", "top_logprobs": 2})
    assert refused.status_code == 400 and "top_logprobs needs" in refused.json()["error"]["message"]
