"""Responses through the `openai` client: requests, events, and those that are kept."""

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

from edgespec.serve.api_error import ApiError
from edgespec.serve.responses import KeptResponses, ResponsesShape


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


def test_a_response_goes_on_from_one_that_is_kept(serve: Serve, client: Connect) -> None:
    backend = Speaker()
    talk = client(serve(backend)).responses
    first = talk.create(model="edgespec", input="Hi", instructions="Be brief")
    assert first.store  # type: ignore[attr-defined]
    talk.create(model="edgespec", input="More", previous_response_id=first.id)
    assert backend.prompt_length == len("<user>Hi<assistant>Hello, world!<user>More<assistant>")
    item: Any = {"type": "item_reference", "id": first.output[0].id}
    talk.create(model="edgespec", input=[item, {"role": "user", "content": "So"}])
    assert backend.prompt_length == len("<assistant>Hello, world!<user>So<assistant>")
    assert talk.retrieve(first.id).output_text == "Hello, world!"
    talk.delete(first.id)
    with pytest.raises(NotFoundError, match="there is no such response here"):
        talk.retrieve(first.id)


def test_responses_are_of_the_key_that_asked_for_them(serve: Serve) -> None:
    address = serve(Speaker(), keys=["one-key-of-many", "another-key-of-it"])
    mine, other = (
        {"authorization": f"Bearer {key}"} for key in ("one-key-of-many", "another-key-of-it")
    )
    made = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}, headers=mine).json()
    path = f"{address}/v1/responses/{made['id']}"
    assert httpx.get(path, headers=mine).json()["id"] == made["id"]
    assert httpx.get(path, headers=other).status_code == 404
    body = {"input": "Hi", "previous_response_id": made["id"]}
    assert httpx.post(f"{address}/v1/responses", json=body, headers=other).status_code == 404


def test_what_is_not_kept_is_not_there(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker())).responses
    made = talk.create(model="edgespec", input="Hi", store=False)
    with pytest.raises(NotFoundError):
        talk.create(model="edgespec", input="Hi", previous_response_id=made.id)
    with pytest.raises(BadRequestError, match="background is not supported"):
        talk.create(model="edgespec", input="Hi", background=True)


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


def document(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def is_there(kept: KeptResponses, number: int, owner: str = "me") -> bool:
    try:
        return bool(kept.document(owner, f"resp_{number}"))
    except ApiError as error:
        assert (error.status, error.code) == (404, "response_not_found")
        return False


def test_the_least_recently_used_goes_first() -> None:
    kept = KeptResponses(1 << 20, 2)
    kept.add("me", document(1), [])
    kept.add("me", document(2), [])
    assert is_there(kept, 1)
    kept.add("me", document(3), [])
    assert [is_there(kept, number) for number in (1, 2, 3)] == [True, False, True]
    assert kept.item("me", "msg_2") is None and kept.item("me", "msg_3") is not None


def test_bytes_are_bounded_whatever_is_kept() -> None:
    kept = KeptResponses(20_000, 1000)
    for number in range(300):
        kept.add("me", document(number, "é" * (number * 37 % 6000)), [{"n": number}])
        assert kept.nbytes <= 20_000
    kept.add("me", document(999, "a" * 30_000), [])
    assert not is_there(kept, 999)
    for number in range(300):
        if is_there(kept, number):
            kept.remove("me", f"resp_{number}")
    assert kept.nbytes == 0


@pytest.mark.parametrize("limits", [(10_000, 1000), (1 << 20, 12)])
def test_a_key_pushes_out_its_own(limits: tuple[int, int]) -> None:
    """However much one keeps, another one that has less than its share loses nothing."""
    kept = KeptResponses(*limits)
    for number in range(4):
        kept.add("you", document(number), [])
    for number in range(100):
        kept.add("me", document(number, "a" * (number % 900)), [])
        assert kept.nbytes <= limits[0]
    assert all(is_there(kept, number, "you") for number in range(4))
    assert is_there(kept, 99) and not is_there(kept, 50)


def test_a_key_has_its_own() -> None:
    kept = KeptResponses(1 << 20, 10)
    kept.add("me", document(1), [{"role": "user"}])
    assert kept.items("me", "resp_1") == [{"role": "user"}]
    assert not is_there(kept, 1, "you") and kept.item("you", "msg_1") is None
    with pytest.raises(ApiError):
        kept.remove("you", "resp_1")
    assert is_there(kept, 1)


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Types of events, those of texts once for any number."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [one for place, one in enumerate(kinds) if kinds[place - 1 : place] != [one]]


@pytest.mark.parametrize("summarises", [False, True])
def test_every_part_of_an_answer_has_its_events(summarises: bool) -> None:
    """A thought is told as a text of its item, or as its summary where that is asked for."""
    shape = ResponsesShape("m", {}, summarises=summarises)
    events = events_of(shape, calling_reader(), CALLS)
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


def test_what_a_template_refuses_is_a_field_of_the_request(serve: Serve) -> None:
    address = serve(Speaker(), chat_template="{{ raise_exception('roles must alternate') }}")
    for path, field in (("responses", "input"), ("chat/completions", "messages")):
        body = {"input": "Hi", "messages": HELLO}
        told = httpx.post(f"{address}/v1/{path}", json=body)
        assert told.status_code == 400 and told.json()["error"]["param"] == field
        assert "roles must alternate" in told.json()["error"]["message"]


def test_items_and_tokens_are_asked_for(serve: Serve, client: Connect) -> None:
    responses = client(serve(Speaker())).responses
    made = responses.create(model="edgespec", input="Hi")
    (item,) = responses.input_items.list(made.id).data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]
    counted = responses.input_tokens.count(model="edgespec", input="Hi").input_tokens
    assert made.usage is not None and counted == made.usage.input_tokens


def test_the_items_of_a_response_are_told() -> None:
    kept = KeptResponses(1 << 20, 9)
    output = [{"id": "msg_9", "type": "message", "role": "assistant", "content": []}]
    items = [{"role": "user", "content": "Hi"}, {"type": "function_call_output", "output": "x"}]
    kept.add("me", {"id": "resp_1", "output": output}, [*items, *output])
    told = kept.input_items("me", "resp_1")
    last, first = told["data"]
    assert (last["type"], first["type"]) == ("function_call_output", "message")
    assert first["content"] == [{"type": "input_text", "text": "Hi"}]
    assert (told["first_id"], told["last_id"]) == (last["id"], first["id"])


def test_events_of_a_text_have_what_the_interface_requires() -> None:
    events = events_of(ResponsesShape("m", {}), calling_reader(), CALLS)
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
