"""Completions as llama.cpp's server tells them."""

from __future__ import annotations

import json

import httpx
from decoding_cases import END
from serving_cases import Serve, Speaker


def test_a_completion_is_told_as_llama_cpp_does(serve: Serve) -> None:
    body = {"prompt": "ab", "n_predict": 20, "n_probs": 1, "return_tokens": True}
    address = serve(Speaker("a\nb"))
    answer = httpx.post(f"{address}/completion", json=body).json()
    assert answer["content"] == "a\nb"
    assert answer["tokens"] == [97, 10, 98, END]
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (4, 2)
    assert answer["has_new_line"] and not answer["truncated"] and answer["prompt"] == "ab"
    assert answer["generation_settings"]["n_predict"] == 20
    first = answer["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"]) == (97, "a", [97])
    assert first["top_logprobs"][0]["id"] == 97


def test_a_stream_ends_with_an_event_that_says_so(serve: Serve) -> None:
    body = {"prompt": "ab", "stream": True, "stop": ["wor"]}
    response = httpx.post(f"{serve(Speaker())}/completion", json=body)
    lines = [line for line in response.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == "Hello, "
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert bytes(one for event in events for one in event["tokens"]) == b"Hello, wor"
    assert (events[-1]["stop_type"], events[-1]["stopping_word"]) == ("word", "wor")


def test_several_prompts_are_a_list_of_answers(serve: Serve) -> None:
    body = {"prompt": ["ab", [97]], "n_predict": 2}
    answers = httpx.post(f"{serve(Speaker())}/completion", json=body).json()
    assert [(one["index"], one["content"], one["stop_type"]) for one in answers] == [
        (0, "He", "limit"),
        (1, "He", "limit"),
    ]
