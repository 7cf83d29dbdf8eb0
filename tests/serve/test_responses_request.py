"""Responses through the `openai` client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from serving_cases import Connect, Serve, Speaker


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
