"""Completions of texts and of ids."""

from __future__ import annotations

from serving_cases import Connect, Serve, Speaker


def test_completions_continue_texts_and_ids(serve: Serve, client: Connect) -> None:
    complete = client(serve(Speaker())).completions
    answer = complete.create(model="edgespec", prompt=["ab", "xyz"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    echoed = complete.create(model="edgespec", prompt=[97, 98], max_tokens=5, echo=True)
    assert echoed.choices[0].text == "abHello"
    short = complete.create(model="edgespec", prompt="a" * 50)  # OpenAI's 16 tokens
    assert short.usage is not None and short.usage.completion_tokens == len("Hello, world!") + 1
