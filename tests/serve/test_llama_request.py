"""llama.cpp's own paths: `/completion`, `/infill`, and the tokens that fill in the middle."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
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


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"grammar": "a", "json_schema": {}}, "json_schema and grammar cannot both be kept to"),
        ({"json_schema": 5}, "json_schema must be an object"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported with true"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data is"),
        ({"prompt": [97, None]}, "prompt must be text or token ids"),
        ({"samplers": ["top_k", "wibble"]}, "there is no sampler 'wibble'"),
        ({"response_fields": [1]}, "response_fields must be a list of names"),
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
