"""What a completion may ask for: also the logprobs of its prompt."""

from __future__ import annotations

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
    with pytest.raises(BadRequestError, match="max_tokens must be at least 1 without echo"):
        complete.create(model="edgespec", prompt="abc", max_tokens=0)
    with pytest.raises(BadRequestError, match="logprobs of a prompt are told alone"):
        complete.create(model="edgespec", prompt="a", echo=True, logprobs=1, stop="x")
    with pytest.raises(BadRequestError, match="3000 tokens and the context 2048"):
        complete.create(model="edgespec", prompt="a" * 3000, echo=True, logprobs=1)
