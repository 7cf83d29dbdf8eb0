"""llama.cpp's own paths: `/completion`, `/infill`, and the tokens that fill in the middle."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from decoding_cases import END
from filling_cases import Filling
from serving_cases import Serve, Speaker


class Coder(Speaker):
    """A speaker whose prompts are kept."""

    def __init__(self, text: str = "x") -> None:
        super().__init__(text)
        self.tokenizer = Filling()
        self.prompts: list[str] = []

    def prefill(self, tokens: Any) -> Any:
        self.prompts.append(bytes(tokens).decode())
        return super().prefill(tokens)


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


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"t_max_predict_ms": 5}, "t_max_predict_ms is not supported with 5"),
        ({"grammar": 'root ::= "a"'}, "grammar is not supported: send json_schema"),
        ({"json_schema": {"maxLength": 9999}}, "json_schema repeats a part more than 1000 times"),
        ({"xtc_probability": 0.5}, "xtc_probability needs a temperature above 0"),
        ({"logit_bias": [["a", 1]]}, "logit_bias must name token ids"),
        ({"wibble": 1}, "wibble is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    serve: Serve, body: dict[str, Any], problem: str
) -> None:
    response = httpx.post(f"{serve(Speaker())}/completion", json={"prompt": "a", **body})
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


def test_biases_may_be_pairs(serve: Serve) -> None:
    """false is never: nothing else is left of a text that says "H" alone, but for the last one."""
    body = {"prompt": "a", "logit_bias": [[72, False], [122, 5]], "n_predict": 1}
    answer = httpx.post(f"{serve(Speaker('H'))}/completion", json=body).json()
    assert answer["content"] == "z"


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
