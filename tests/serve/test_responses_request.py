"""Responses through the `openai` client."""

from __future__ import annotations

import httpx
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


def test_what_needs_a_memory_of_responses_is_refused(serve: Serve) -> None:
    address = serve(Speaker())
    for field, value in (("previous_response_id", "resp_1"), ("store", True)):
        body = {"input": "Hi", field: value}
        error = httpx.post(f"{address}/v1/responses", json=body).json()["error"]
        assert error["message"].startswith(f"{field} is not supported")
    assert httpx.post(f"{address}/v1/embeddings", json={"input": "a"}).status_code == 501
