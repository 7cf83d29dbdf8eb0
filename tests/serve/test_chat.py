"""Chats: what they may ask for and what they may not, whole and as streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from decoding_cases import END, VOCAB
from frozen_times import free_drafts
from openai import BadRequestError, NotFoundError
from serving_cases import (
    CALLS,
    HELLO,
    TEMPLATE,
    Connect,
    Serve,
    Speaker,
    calling_reader,
    events_of,
)

from edgespec.drafting.suffix import SuffixDrafter
from edgespec.serve.chat import parse_messages, read_chat
from edgespec.serve.parsing import ApiError, Defaults, Fields, Limits, Output, ServedModel
from edgespec.serve.serializers import ChatSerializer, ToldTokens
from edgespec.testing import ByteTokenizer


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


SETUP = ServedModel(("edgespec",), 2048, Defaults(think_budget=500), Limits())


@pytest.mark.parametrize(
    ("fields", "budget", "thinks"),
    [
        ({}, 500, None),
        ({"reasoning_effort": "none"}, 0, False),
        ({"reasoning_effort": "high"}, 500, None),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, 1024, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 90}}, 90, True),
        ({"thinking": {"type": "disabled"}}, 0, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0, False),
        ({"think": False}, 0, False),
        ({"think": "high"}, 500, None),
        ({"thinking": {"budget_tokens": 9}, "reasoning_effort": "low"}, 9, None),
        ({"thinking": {"budget_tokens": -1}}, 500, None),
        ({"thinking_budget": 9}, 500, None),
    ],
)
def test_clients_say_in_many_ways_how_long_a_model_may_think(
    fields: dict[str, Any], budget: int | None, thinks: bool | None
) -> None:
    asked = read_chat(Fields({"messages": HELLO, **fields}), SETUP)
    assert (asked.think_budget, asked.variables.get("enable_thinking")) == (budget, thinks)


def test_a_thought_ends_at_its_budget_and_an_answer_comes(serve: Serve) -> None:
    """Streamed or not; without a budget the whole answer was a thought."""
    address = serve(Speaker("<think>" + "hm " * 400))
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 0}
    told = httpx.post(f"{address}/v1/chat/completions", json=body).json()
    assert told["choices"][0]["message"]["content"] == ""
    body |= {"thinking": {"budget_tokens": 6}}
    message = httpx.post(f"{address}/v1/chat/completions", json=body).json()["choices"][0][
        "message"
    ]
    assert message["reasoning_content"] == "hm hm" and message["content"]


def test_a_prediction_is_drafted_and_changes_nothing(serve: Serve) -> None:
    """The model says what was predicted, but for one letter."""
    text = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n"
    body = {"messages": HELLO, "temperature": 0}
    predicted = {**body, "prediction": {"type": "content", "content": text.replace("add", "sum")}}
    address = serve(Speaker(text), drafter=SuffixDrafter(), curve=free_drafts(3))
    made = [
        httpx.post(f"{address}/v1/chat/completions", json=one).json() for one in (predicted, body)
    ]
    assert [one["choices"][0]["message"]["content"] for one in made] == [text, text]
    assert made[0]["timings"]["draft_n_accepted"] > 5


def taken(*messages: Any) -> list[dict[str, Any]]:
    return parse_messages(Fields({"messages": list(messages)}), Limits())


def test_parts_are_lines_and_developers_write_the_system_message() -> None:
    parts = [{"type": "text", "text": "Good"}, {"type": "text", "text": "day"}]
    assert taken({"role": "developer", "content": parts}, {"role": "user", "content": "Hi"}) == [
        {"role": "system", "content": "Good\nday"},
        {"role": "user", "content": "Hi"},
    ]


def test_a_call_that_is_sent_back_is_an_object_for_templates() -> None:
    """Clients send arguments as a text; an answer of calls alone has no content."""
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "call_1", "type": "function", "index": 0, "function": function}
    (found,) = taken({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    assert found["content"] == ""
    assert found["tool_calls"] == [
        {
            "type": "function",
            "id": "call_1",
            "function": {"name": "weather", "arguments": {"city": "Rome"}},
        }
    ]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Sun"}
    assert taken(result) == [result]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[0].content must be a text or a list of text parts, not null"),
        ({"role": "judge", "content": "a"}, "messages[0].role must be one of"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].image_url is not taken: an image needs its bytes",
        ),
        (
            {"role": "user", "content": "a", "audio": {"id": "a"}},
            "messages[0].audio is not supported",
        ),
    ],
)
def test_an_error_names_the_place(message: Any, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        taken(message)
    assert str(caught.value).startswith(words)
    assert caught.value.param == words.split()[0]


def test_a_conversation_has_a_message() -> None:
    with pytest.raises(ApiError, match=r"^messages must have at least one message$"):
        taken()


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


def test_a_call_comes_in_parts_of_its_arguments() -> None:
    """Its name, id and type once, then arguments alone, under the number of the call."""
    serializer = ChatSerializer("m", Output(streams=True), ToldTokens(ByteTokenizer(VOCAB, END)))
    events = events_of(serializer, calling_reader(), CALLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "Hm."
    assert "".join(one.get("content", "") for one in deltas) == "I look."
    parts = [part for one in deltas for part in one.get("tool_calls", [])]
    first, second = ([one for one in parts if one["index"] == place] for place in (0, 1))
    assert [set(one) for one in first] == [{"index", "id", "type", "function"}] + [
        {"index", "function"}
    ] * (len(first) - 1)
    assert first[0]["function"]["name"] == "weather" and len(first) > 10
    assert all(set(one["function"]) == {"arguments"} for one in first[1:])
    texts = ["".join(one["function"]["arguments"] for one in each) for each in (first, second)]
    assert texts == ['{"city": "Rome"}', "{}"] and first[0]["id"] != second[0]["id"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_thought_in_channels_ends_at_its_budget(serve: Serve) -> None:
    """As gpt-oss thinks: what follows is on the channel of answers."""
    template = TEMPLATE.replace("<assistant>", "<|start|>assistant")
    template += "{# <|channel|><|message|> #}"
    speaker = Speaker("<|channel|>analysis<|message|>" + "hm " * 400)
    address = serve(speaker, chat_template=template)
    body = {"messages": HELLO, "max_tokens": 150, "temperature": 0}
    told = httpx.post(f"{address}/v1/chat/completions", json=body).json()
    assert told["choices"][0]["message"]["content"] == ""
    body |= {"thinking": {"budget_tokens": 6}}
    told = httpx.post(f"{address}/v1/chat/completions", json=body).json()
    message = told["choices"][0]["message"]
    assert message["reasoning_content"] == "hm hm" and "hm hm" in message["content"]
