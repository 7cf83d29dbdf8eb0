"""Completions of texts and of ids; the logprobs of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError
from serving_cases import Connect, Serve, Speaker


def test_a_prompt_is_scored_without_an_answer(serve: Serve, client: Connect) -> None:
    complete = client(serve(Speaker())).completions
    made = complete.create(model="edgespec", prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert made.choices[0].text == "abc"
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert made.usage is not None and made.usage.completion_tokens == 0
    assert made.usage.prompt_tokens == 3
    assert made.to_dict()["timings"]["predicted_n"] == 0  # type: ignore[index]
    with pytest.raises(BadRequestError, match="logprobs of a prompt are told alone"):
        complete.create(model="edgespec", prompt="a", echo=True, logprobs=1, stop="x")
    with pytest.raises(BadRequestError, match="3000 tokens and the context 2048"):
        complete.create(model="edgespec", prompt="a" * 3000, echo=True, logprobs=1)


def test_a_prompt_is_told_alone_in_a_stream(serve: Serve, client: Connect) -> None:
    ask = client(serve(Speaker())).completions.create
    more: Any = {"echo": True, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(model="edgespec", prompt="abc", max_tokens=0, **more))
    assert "".join(one.choices[0].text for one in chunks if one.choices) == "abc"
    assert chunks[-1].usage.completion_tokens == 0


def test_completions_continue_texts_and_ids(serve: Serve, client: Connect) -> None:
    complete = client(serve(Speaker())).completions
    answer = complete.create(model="edgespec", prompt=["ab", "xyz"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    echoed = complete.create(model="edgespec", prompt=[97, 98], max_tokens=5, echo=True)
    assert echoed.choices[0].text == "abHello"
    with pytest.raises(BadRequestError, match=r"has 999 prompts, and \d+ are the limit"):
        complete.create(model="edgespec", prompt=["a"] * 999)
    short = complete.create(model="edgespec", prompt="a" * 50)  # OpenAI's 16 tokens
    assert short.usage is not None and short.usage.completion_tokens == len("Hello, world!") + 1


def test_a_prompt_is_scored(serve: Serve, client: Connect) -> None:
    """As lm-eval asks for it; the first token has no logprob, and an end is a token, too."""
    complete = client(serve(Speaker(""))).completions
    prompts: Any = ["abé", [97, 98]]
    made = complete.create(model="edgespec", prompt=prompts, max_tokens=1, echo=True, logprobs=1)
    first, second = made.choices
    assert first.text == "abé" and second.text == "ab"
    told = first.logprobs
    assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
    assert told.tokens is not None and told.tokens[:2] == ["a", "b"]
    assert len(told.tokens) == len("abé".encode()) + 1
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert told.token_logprobs[1] < -1.0 and len(told.top_logprobs[1]) == 1
    assert [*told.top_logprobs[-1].values()] == [told.token_logprobs[-1]]  # an end is the likeliest
    assert told.text_offset is not None and told.text_offset[:3] == [0, 1, 2]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (4 + 2, 2)
