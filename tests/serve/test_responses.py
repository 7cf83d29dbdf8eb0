"""Responses through the `openai` client: requests, events, and those that are kept."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from serving_cases import CALL, WEATHER, Connect, Serve, Speaker

from edgespec.serve.refusal import Refusal
from edgespec.serve.responses import KeptResponses


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
    assert "serve one that was made for them" in told.json()["error"]["message"]


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


def document(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def is_there(kept: KeptResponses, number: int, owner: str = "me") -> bool:
    try:
        return bool(kept.document(owner, f"resp_{number}"))
    except Refusal as refusal:
        assert (refusal.status, refusal.code) == (404, "response_not_found")
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


def test_a_key_has_its_own() -> None:
    kept = KeptResponses(1 << 20, 10)
    kept.add("me", document(1), [{"role": "user"}])
    assert kept.items("me", "resp_1") == [{"role": "user"}]
    assert not is_there(kept, 1, "you") and kept.item("you", "msg_1") is None
    with pytest.raises(Refusal):
        kept.remove("you", "resp_1")
    assert is_there(kept, 1)
