"""What a chat may ask for, and what it may not."""

from __future__ import annotations

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from serving_cases import HELLO, Connect, Serve, Speaker


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


def test_what_is_not_supported_is_refused_by_name(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker())).chat.completions
    with pytest.raises(BadRequestError, match="modalities is not supported") as refused:
        talk.create(model="edgespec", messages=HELLO, modalities=["text", "audio"])
    assert refused.value.param == "modalities"
    with pytest.raises(BadRequestError, match="web_search_options is not supported"):
        talk.create(model="edgespec", messages=HELLO, web_search_options={"user_location": None})
    with pytest.raises(NotFoundError, match='no model "gpt-9"'):
        talk.create(model="gpt-9", messages=HELLO)
