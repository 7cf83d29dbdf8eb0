"""llama.cpp's own paths: `/completion`, `/infill`, and the tokens that fill in the middle."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from decoding_cases import VOCAB
from filling_cases import Filling
from serving_cases import Serve, Speaker

from edgespec.serve.completions import Gap, fill_ids
from edgespec.serve.parsing import ApiError
from edgespec.testing import ByteTokenizer


class Coder(Speaker):
    """A speaker whose prompts are kept."""

    def __init__(self, text: str = "x") -> None:
        super().__init__(text)
        self.tokenizer = Filling()
        self.prompts: list[str] = []

    def prefill(self, tokens: Any) -> Any:
        self.prompts.append(bytes(tokens).decode())
        return super().prefill(tokens)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"grammar": "a", "json_schema": {}}, "json_schema and grammar cannot both be kept to"),
        ({"json_schema": 5}, "json_schema must be an object"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported with true"),
        ({"prompt": {"prompt_string": "a"}}, "prompt must be text or token ids"),
        ({"prompt": [97, "a"]}, "prompt must be text or token ids"),
        ({"prompt": [97, None]}, "prompt must be text or token ids"),
        ({"samplers": ["top_k", "wibble"]}, "there is no sampler 'wibble'"),
        ({"response_fields": [1]}, "response_fields must be a list of names"),
        ({"xtc_probability": 0.5}, "xtc_probability needs a temperature above 0"),
        ({"logit_bias": [[97, 1]]}, "logit_bias must be an object"),
        ({"logit_bias": {"ab": 1}}, "logit_bias must name token ids"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    serve: Serve, body: dict[str, Any], problem: str
) -> None:
    response = httpx.post(f"{serve(Speaker())}/completion", json={"prompt": "a", **body})
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


def test_the_middle_is_asked_for_between_the_models_own_tokens(serve: Serve) -> None:
    backend = Coder()
    address = serve(backend)
    body = {"input_prefix": "def f(", "prompt": "a", "input_suffix": "):", "n_predict": 5}
    answer = httpx.post(f"{address}/infill", json=body).json()
    assert answer["content"] == "x" and not answer["truncated"]
    assert backend.prompts == ["\1def f(a\2):\3"]
    body = {**body, "input_extra": [{"filename": "b.py", "text": "y"}, {"text": "z"}]}
    assert httpx.post(f"{address}/infill", json=body).status_code == 200
    assert "".join(backend.prompts).endswith(
        "\4repository\n\5b.py\ny\5file\nz\5current\n\1def f(a\2):\3"
    )


def test_a_suffix_makes_a_completion_fill_in(serve: Serve) -> None:
    backend = Coder()
    body = {"prompt": "a = ", "suffix": "\nb", "max_tokens": 3}
    answer = httpx.post(f"{serve(backend)}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "x"
    assert backend.prompts == ["\1a = \2\nb\3"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_a_model_without_such_tokens_says_so(serve: Serve, path: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{serve(Speaker())}{path}", json=body)
    assert response.status_code == 400
    assert "no tokens for filling in the middle" in response.json()["error"]["message"]


EDITOR = {  # as llama.vim and llama.vscode ask
    "id_slot": 0,
    "input_extra": [{"filename": "b.py", "text": "y", "time": 17}],
    "prompt": "a",
    "n_predict": 9,
    "n_indent": 4,
    "stop": [],
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/predicted_n", "truncated", "nothing/there"],
}


def test_editors_are_answered_with_what_they_name(serve: Serve) -> None:
    body = {"input_prefix": "def f(", "input_suffix": "):", **EDITOR}
    response = httpx.post(f"{serve(Coder())}/infill", json=body)
    assert response.json() == {"content": "x", "timings/predicted_n": 2, "truncated": False}


def test_a_prompt_may_be_read_ahead(serve: Serve) -> None:
    address = serve(Speaker("Hello"))
    body = {"prompt": "some words", "n_predict": 0}
    answer = httpx.post(f"{address}/completion", json=body).json()
    assert (answer["content"], answer["timings"]["prompt_n"]) == ("", 10)
    written = answer["tokens_predicted"], answer["timings"]["predicted_n"]
    assert written == (0, 0)
    events = httpx.post(f"{address}/completion", json={**body, "stream": True}).text
    assert '"content":"H' not in events and '"stop":true' in events
    again = httpx.post(f"{address}/completion", json={**body, "n_predict": 5}).json()
    assert again["content"] == "Hello" and again["timings"]["cache_n"] > 0
    fresh = httpx.post(f"{address}/completion", json={**body, "cache_prompt": False}).json()
    assert fresh["timings"]["cache_n"] == 0


@pytest.mark.parametrize(
    "more",
    [
        {"id_slot": -1, "timings_per_token": False, "return_progress": False, "verbose": False},
        {"ignore_eos": False, "cache_prompt": True, "response_fields": [], "n_probs": 0},
        {"post_sampling_probs": False, "t_max_predict_ms": -1, "n_keep": 0, "n_discard": 0},
        {"lora": [], "return_tokens": True, "min_keep": 0, "samplers": ["top_k", "infill"]},
        {"id_slot": 1, "return_progress": True, "verbose": True, "grammar": "", "user": "me"},
    ],
)
def test_what_changes_no_token_is_taken(serve: Serve, more: dict[str, Any]) -> None:
    response = httpx.post(f"{serve(Speaker())}/completion", json={"prompt": "a", **more})
    assert response.json()["content"] == "Hello, world!"


def test_the_end_may_be_forbidden(serve: Serve) -> None:
    body = {"prompt": "a", "n_predict": 8, "ignore_eos": True}
    answer = httpx.post(f"{serve(Speaker('Hi'))}/completion", json=body).json()
    assert answer["content"].startswith("Hi")
    assert (answer["tokens_predicted"], answer["stop_type"]) == (8, "limit")


def test_an_answer_ends_with_a_line_once_its_time_is_over(serve: Serve) -> None:
    """1,000 lines would take 20 s."""
    backend = Speaker("a\n", loops=True)
    backend.step_s = 0.01
    address = serve(backend)
    body = {"prompt": "a", "n_predict": 2000, "t_max_predict_ms": 1}
    answer = httpx.post(f"{address}/completion", json=body).json()
    assert answer["content"].startswith("a\n") and answer["tokens_predicted"] < 2000
    assert answer["stop_type"] == "limit"
    assert httpx.get(f"{address}/status").json()["totals"]["cancelled"] == 0


def test_a_completion_is_told_as_llama_cpp_does(serve: Serve) -> None:
    body = {"prompt": "ab", "n_predict": 20, "n_probs": 1}
    address = serve(Speaker("a\nb"))
    answer = httpx.post(f"{address}/completion", json=body).json()
    assert answer["content"] == "a\nb"
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (4, 2)
    assert not answer["truncated"]
    first = answer["completion_probabilities"][0]
    assert (first["token"], first["bytes"]) == ("a", [97])
    assert first["top_logprobs"][0]["token"] == "a"


def test_a_stream_ends_with_an_event_that_says_so(serve: Serve) -> None:
    body = {"prompt": "ab", "stream": True, "stop": ["wor"]}
    response = httpx.post(f"{serve(Speaker())}/completion", json=body)
    lines = [line for line in response.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == "Hello, "
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert bytes(one for event in events[:-1] for one in event["tokens"]) == b"Hello, wor"
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


def test_what_is_far_from_the_gap_is_cut() -> None:
    """Of 19 ids three mark the places; a quarter may be the suffix's, more where it is free."""
    gap = Gap("p" * 20, "s" * 20)
    ids, is_cut = fill_ids(Filling(), gap, 19, "it")
    assert (bytes(ids), is_cut) == (b"\1" + b"p" * 12 + b"\2" + b"s" * 4 + b"\3", True)
    ids, _ = fill_ids(Filling(), Gap("p", "s" * 20), 19, "it")
    assert bytes(ids) == b"\1p\2" + b"s" * 15 + b"\3"
    ids, is_cut = fill_ids(Filling(), gap, 43, "it")
    assert (len(ids), is_cut) == (43, False)
    files = Gap("p", "s", [("f", "0123456789")])
    ids, is_cut = fill_ids(Filling(with_files=False), files, 9, "it")
    assert (bytes(ids), is_cut) == (b"\n\n\n\n\1p\2s\3", True)


def test_a_tokenizer_that_cannot_is_refused() -> None:
    with pytest.raises(ApiError, match="/infill is not supported"):
        fill_ids(ByteTokenizer(VOCAB), Gap("a", "b"), None, "/infill")
