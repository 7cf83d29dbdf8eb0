"""What a chat may ask for, and what it may not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError
from serving_cases import CALL, HELLO, WEATHER, Connect, Serve, Speaker

from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.memory.times.curve import CostCurve
from edgespec.serve.asked import Setup
from edgespec.serve.chat_request import read_chat
from edgespec.serve.defaults import Defaults
from edgespec.serve.limits import Limits


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


SETUP = Setup(("edgespec",), 2048, Defaults(think_budget=500), Limits())


@pytest.mark.parametrize(
    ("fields", "budget", "thinks"),
    [
        ({}, 500, None),
        ({"reasoning_effort": "none"}, 0, False),
        ({"reasoning_effort": "high"}, 500, None),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, 1024, None),
        ({"reasoning": {"max_tokens": 70}}, 70, None),
        ({"reasoning": {"enabled": False}}, 0, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 90}}, 90, True),
        ({"thinking": {"type": "disabled"}}, 0, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0, False),
        ({"think": False}, 0, False),
        ({"think": "high"}, 500, None),
        ({"thinking_budget": 9, "reasoning_effort": "low"}, 9, None),
        ({"thinking_budget": -1}, 500, None),
    ],
)
def test_clients_say_in_many_ways_how_long_a_model_may_think(
    fields: dict[str, Any], budget: int | None, thinks: bool | None
) -> None:
    asked = read_chat({"messages": HELLO, **fields}, SETUP)
    assert (asked.think_budget, asked.variables.get("enable_thinking")) == (budget, thinks)


def test_a_thought_ends_at_its_budget_and_an_answer_comes(serve: Serve) -> None:
    """Streamed or not; without a budget the whole answer was a thought."""
    address = serve(Speaker("<think>" + "hm " * 400))
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 0}
    told = httpx.post(f"{address}/v1/chat/completions", json=body).json()
    assert told["choices"][0]["message"]["content"] == ""
    body |= {"thinking_budget": 6}
    message = httpx.post(f"{address}/v1/chat/completions", json=body).json()["choices"][0][
        "message"
    ]
    assert message["reasoning_content"] == "hm hm" and message["content"]


def test_a_prediction_is_drafted_and_changes_nothing(serve: Serve) -> None:
    """The model says what was predicted, but for one letter."""
    text = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n"
    body = {"messages": HELLO, "temperature": 0}
    predicted = {**body, "prediction": {"type": "content", "content": text.replace("add", "sum")}}
    address = serve(Speaker(text), drafter=SuffixDrafter(), curve=CostCurve([1.0, 1.0, 1.01, 1.02]))
    made = [
        httpx.post(f"{address}/v1/chat/completions", json=one).json() for one in (predicted, body)
    ]
    assert [one["choices"][0]["message"]["content"] for one in made] == [text, text]
    assert made[0]["timings"]["draft_n_accepted"] > 5


def test_functions_are_called_by_their_older_name(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker(CALL))).chat.completions
    asked: Any = {"functions": [WEATHER["function"]], "function_call": "auto"}
    made = talk.create(model="edgespec", messages=HELLO, temperature=0, **asked)
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "function_call"
    assert message.function_call is not None and message.tool_calls is None
    assert (message.function_call.name, json.loads(message.function_call.arguments)) == (
        "weather",
        {"city": "Rome"},
    )
    stream = talk.create(model="edgespec", messages=HELLO, temperature=0, stream=True, **asked)
    deltas = [chunk.choices[0] for chunk in stream]
    assert deltas[-1].finish_reason == "function_call"
    assert [one.delta.function_call.name for one in deltas if one.delta.function_call] == [
        "weather"
    ]
