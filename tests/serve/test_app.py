"""What the `openai` client, and plain HTTP, get of chats and completions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from decoding_cases import END
from openai import BadRequestError, NotFoundError
from serving_cases import Connect, Serve, Speaker

HELLO: Any = [{"role": "user", "content": "Hi"}]


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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_end_an_answer(serve: Serve, name: str) -> None:
    body = {"messages": HELLO, name: 5}
    answer = httpx.post(f"{serve(Speaker(loops=True))}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_max_tokens_an_answer_ends_with_the_context(serve: Serve) -> None:
    backend = Speaker(loops=True)
    backend.context_size = 100
    answer = httpx.post(f"{serve(backend)}/v1/chat/completions", json={"messages": HELLO}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 100


def test_stops_choices_and_biases(serve: Serve, client: Connect) -> None:
    answer = client(serve(Speaker())).chat.completions.create(
        model="edgespec",
        messages=HELLO,
        stop=[", w"],
        n=2,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"33": -100},
        extra_body={"top_k": 1, "min_p": 0.1, "repeat_penalty": 1.0},
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens == 2 * len("Hello, w")


def test_completions_continue_texts_and_ids(serve: Serve, client: Connect) -> None:
    complete = client(serve(Speaker())).completions
    answer = complete.create(model="edgespec", prompt=["ab", "xyz"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    echoed = complete.create(model="edgespec", prompt=[97, 98], max_tokens=5, echo=True)
    assert echoed.choices[0].text == "abHello"
    short = complete.create(model="edgespec", prompt="a" * 50)  # OpenAI's 16 tokens
    assert short.usage is not None and short.usage.completion_tokens == len("Hello, world!") + 1


def test_paths_are_there_without_v1(serve: Serve, client: Connect) -> None:
    address = serve(Speaker(), names=("tiny", "other"))
    for path in ("/health", "/v1/health", "/models", "/v1/models"):
        assert httpx.get(f"{address}{path}").status_code == 200
    model = client(address).models.list().data[0]
    assert model.id == "tiny" and model.owned_by == "edgespec"
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["meta"]["n_ctx"] == 2048
    assert client(address).models.retrieve("other").id == "tiny"
    answer = httpx.post(f"{address}/completions", json={"prompt": "a", "model": "other"})
    assert answer.json()["model"] == "tiny"


def test_what_is_not_supported_is_refused_by_name(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker())).chat.completions
    with pytest.raises(BadRequestError, match="modalities is not supported") as refused:
        talk.create(model="edgespec", messages=HELLO, modalities=["text", "audio"])
    assert refused.value.param == "modalities"
    with pytest.raises(BadRequestError, match="wibble is not supported"):
        talk.create(model="edgespec", messages=HELLO, extra_body={"wibble": 1})
    with pytest.raises(NotFoundError, match='no model "gpt-9"'):
        talk.create(model="gpt-9", messages=HELLO)


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "messages must have at least one message"),
    ({"messages": "Hi"}, 'messages must be a list, not "Hi"'),
    ({"messages": [1]}, "messages[0] must be an object, not 1"),
    ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
    ({"messages": HELLO, "temperature": "hot"}, 'temperature must be a number, not "hot"'),
    ({"messages": HELLO, "temperature": -1}, "temperature must be 0 to 100, not -1"),
    ({"messages": HELLO, "top_p": True}, "top_p must be a number, not true"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens must be at least 1"),
    ({"messages": HELLO, "n": 99}, "n must be 1 to 8, not 99"),
    ({"messages": HELLO, "stop": [1]}, "stop must be a text or a list of texts"),
    ({"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias must name token ids"),
    ({"messages": HELLO, "logit_bias": {"9999": 1}}, "9999"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs must be 0 to 20"),
    ({"messages": HELLO, "mirostat": 1}, "mirostat must be 0 or 2"),
    ({"messages": HELLO, "samplers": ["x"]}, "there is no sampler 'x'"),
    ({"messages": HELLO, "stream_options": {}}, "stream_options is for streams"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type must be"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, "the context 2048"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        'messages[0].content[0].type "image_url" is not supported',
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


def test_an_end_token_is_no_text(serve: Serve, client: Connect) -> None:
    answer = client(serve(Speaker("é" + chr(END)))).completions.create(model="edgespec", prompt="a")
    assert answer.choices[0].text == "é" + chr(END)
