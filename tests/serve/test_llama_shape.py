"""Completions as llama.cpp's server tells them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from decoding_cases import END
from serving_cases import Gated, Serve, Speaker
from waiting import until


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


def test_an_answer_that_fills_the_context_is_truncated(serve: Serve) -> None:
    body = {"prompt": "a" * 2000, "n_predict": -1}
    address = serve(Speaker("ab", loops=True))
    answer = httpx.post(f"{address}/completion", json=body).json()
    assert answer["truncated"] and answer["tokens_predicted"] == 48
    body = {**body, "n_predict": 48}
    assert not httpx.post(f"{address}/completion", json=body).json()["truncated"]


def test_times_may_come_with_each_event(serve: Serve) -> None:
    body = {"prompt": "ab", "stream": True, "timings_per_token": True}
    response = httpx.post(f"{serve(Speaker())}/completion", json=body)
    lines = [line for line in response.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(event["timings"]["prompt_n"] == 2 for event in events)
    written = [event["timings"]["predicted_n"] for event in events]
    assert written == sorted(written) and written[-1] == 14


def test_two_answers_at_once_have_two_slots(serve: Serve) -> None:
    backend = Gated(users=2)
    address = serve(backend)
    body = {"prompt": "a", "n_predict": 5}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(httpx.post, f"{address}/completion", json=body) for _ in range(2)]
        until(lambda: sum(one["is_processing"] for one in slots(address)) == 2)
        backend.gate.set()
        answers = [one.result().json() for one in asked]
    assert sorted(one["id_slot"] for one in answers) == [0, 1]
    assert [one["id"] for one in slots(address)] == [0, 1]


def slots(address: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{address}/slots").json()
    return found
