"""What the `openai` client, and plain HTTP, get of chats and completions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from decoding_cases import END
from serving_cases import HELLO, Connect, Serve, Speaker


def test_the_client_reads_a_stream(serve: Serve, client: Connect) -> None:
    stream = client(serve(Speaker())).chat.completions.create(
        model="edgespec", messages=HELLO, stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_next_turn_finds_the_conversation_in_the_cache(serve: Serve, client: Connect) -> None:
    backend = Speaker()
    talk = client(serve(backend)).chat.completions
    talk.create(model="edgespec", messages=HELLO)
    said: Any = [
        *HELLO,
        {"role": "assistant", "content": "Hello, world!"},
        {"role": "user", "content": "More"},
    ]
    usage = talk.create(model="edgespec", messages=said).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == len("<user>Hi<assistant>Hello, world!")


def test_paths_are_there_without_v1(serve: Serve, client: Connect) -> None:
    address = serve(Speaker(), names=("tiny", "other"))
    for path in ("/health", "/v1/health", "/models", "/v1/models"):
        assert httpx.get(f"{address}{path}").status_code == 200
    assert httpx.get(f"{address}/lora-adapters").json() == []
    model = client(address).models.list().data[0]
    assert model.id == "tiny" and model.owned_by == "edgespec"
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["meta"]["n_ctx"] == 2048
    assert client(address).models.retrieve("other").id == "tiny"
    answer = httpx.post(f"{address}/completions", json={"prompt": "a", "model": "other"})
    assert answer.json()["model"] == "tiny"


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "messages must have at least one message"),
    ({"messages": "Hi"}, 'messages must be a list, not "Hi"'),
    ({"messages": [1]}, "messages[0] must be an object, not 1"),
    ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
    ({"messages": HELLO, "temperature": "hot"}, 'temperature must be a number, not "hot"'),
    ({"messages": HELLO, "temperature": -1}, "temperature must be 0 to 1e6, not -1"),
    ({"messages": HELLO, "top_p": True}, "top_p must be a number, not true"),
    ({"messages": HELLO, "max_tokens": -2}, "max_tokens must be"),
    ({"messages": HELLO, "prompt_cache_options": {"prewarm": 1}}, "prompt_cache_options.prewarm"),
    ({"messages": HELLO, "n": 99}, "n must be 1 to 8, not 99"),
    ({"messages": HELLO, "stop": [1]}, "stop must be a text or a list of texts"),
    ({"messages": HELLO, "logit_bias": {"a": "b"}}, "logit_bias must name token ids"),
    ({"messages": HELLO, "logit_bias": {"9999": 1}}, "9999"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs must be 0 to 20"),
    ({"messages": HELLO, "mirostat": 1}, "mirostat must be 0 or 2"),
    ({"messages": HELLO, "samplers": ["x"]}, "there is no sampler 'x'"),
    ({"messages": HELLO, "prompt_logprobs": 2}, "prompt_logprobs is not supported"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type must be"),
    ({"messages": HELLO, "lora": 5}, "lora must be a list"),
    ({"messages": HELLO, "lora": [{"scale": 1}]}, "lora[0].id is missing"),
    ({"messages": HELLO, "lora": [{"id": 0, "scale": "much"}]}, "lora[0].scale must be a number"),
    ({"messages": HELLO, "lora": [{"id": 2}]}, "no adapter 2: the model was loaded with 0"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, "the context 2048"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url is not taken: an image needs its bytes",
    ),
]


@pytest.mark.parametrize(("body", "message"), CASES)
def test_bad_requests_are_told_in_a_sentence(
    serve: Serve, body: dict[str, Any], message: str
) -> None:
    response = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_has_a_code(serve: Serve) -> None:
    body = {"messages": [{"role": "user", "content": "a" * 3000}]}
    error = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (3017, 2048)


def test_a_chats_prompt_is_told_without_an_answer(serve: Serve) -> None:
    address = serve(Speaker())
    body: dict[str, Any] = {"messages": HELLO}
    told = httpx.post(f"{address}/apply-template", json=body).json()
    assert told == {"prompt": "<user>Hi<assistant>"}
    counted = httpx.post(f"{address}/v1/chat/completions/input_tokens", json=body).json()
    assert counted == {"input_tokens": 19}
    body["add_generation_prompt"] = False
    assert httpx.post(f"{address}/apply-template", json=body).json() == {"prompt": "<user>Hi"}
    body["add_generation_prompt"] = "no"
    assert httpx.post(f"{address}/apply-template", json=body).status_code == 400
    assert httpx.post(f"{address}/apply-template", json=[1]).status_code == 400


def test_an_end_token_is_no_text(serve: Serve, client: Connect) -> None:
    answer = client(serve(Speaker("é" + chr(END)))).completions.create(model="edgespec", prompt="a")
    assert answer.choices[0].text == "é" + chr(END)
