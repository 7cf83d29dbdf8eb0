"""Bodies that nobody would send: a refusal with a sentence, never a failure of the server."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving_cases import Serve, Speaker

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {
    "model": "edgespec",
    "messages": [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repeat_last_n": 8,
    "seed": 1,
    "stop": ["x"],
    "n": 1,
    "logit_bias": {"5": 1},
    "stream": False,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"a": 1},
}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 2, "stop": "x", "echo": True, "n": 1}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1, "stream": True}),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2, "text": {}},
    ),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 1, "logprobs": 2, "suffix": ""}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, "logprobs": True}),
    (
        "/v1/messages",
        {
            "model": "edgespec",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "Be brief"}],
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "?", "signature": ""},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"b": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "a"},
            "output_config": {},
        },
    ),
    ("/v1/messages/count_tokens", {"model": "edgespec", "messages": [USER]}),
    (
        "/completion",
        {
            "prompt": "ab",
            "n_predict": 2,
            "n_probs": 1,
            "stop": [],
            "logit_bias": [[5, False], [6, 1.5]],
            "samplers": ["top_k", "temperature"],
            "temperature": 0.5,
            "typical_p": 0.9,
            "xtc_probability": 0.5,
            "dry_multiplier": 0.5,
            "dry_sequence_breakers": ["x"],
            "mirostat": 0,
            "return_tokens": True,
            "grammar": "",
            "id_slot": -1,
        },
    ),
    (
        "/infill",
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "input_extra": [{"filename": "x", "text": "y"}],
            "prompt": "c",
            "n_predict": 1,
        },
    ),
    ("/tokenize", {"content": "ab", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2]}),
]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 10**30, 2**63, "", "x", "\ud800", "\x00"),
    *("é" * 50, [], {}, [[]], [None], {"": ""}, {"type": "text"}, [1, "a"], "a" * 3000, "{{ x }}"),
    *([{"role": "user", "content": "x"}], {"type": "function"}, "<|im_end|>", "auto", "required"),
]


def bodies(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Requests, of which each has a few parts that are changed, missing or too many."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(SEEDS)
        body = copy.deepcopy(body)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            _change(chance, body)
        data = json.dumps(body).encode()
        if chance.random() < 0.2:
            place = chance.randrange(len(data))
            data = (
                data[:place]
                + bytes([chance.randrange(256)])
                + data[place + chance.choice((0, 1)) :]
            )
        yield path, data


def _change(chance: random.Random, value: Any) -> None:
    """Change one part of a document, at any depth."""
    while isinstance(value, dict | list) and value:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = chance.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.6:
            value = inner
            continue
        how = chance.random()
        if how < 0.7:
            value[key] = copy.deepcopy(chance.choice(JUNK))
        elif how < 0.85:
            del value[key]
        elif isinstance(value, dict):
            value[chance.choice(("logprobs", "suffix", "what", "", "é"))] = copy.deepcopy(
                chance.choice(JUNK)
            )
        else:
            value.append(copy.deepcopy(chance.choice(JUNK)))
        return


def assert_none_fails(address: str, seed: int, count: int) -> None:
    refused = 0
    with httpx.Client(base_url=address, timeout=60) as client:
        for path, data in bodies(seed, count):
            response = client.post(path, content=data)
            assert response.status_code in (200, 400, 404), (path, data, response.text)
            if response.status_code != 200:
                refused += 1
                assert response.json()["error"]["message"], data
            assert "server_error" not in response.text, (path, data, response.text)
    assert 0 < refused < count


@pytest.mark.slow
def test_no_body_makes_the_server_fail(serve: Serve) -> None:
    assert_none_fails(serve(Speaker()), seed=1, count=300)


@pytest.mark.slow
def test_ten_thousand_bodies(serve: Serve) -> None:
    assert_none_fails(serve(Speaker()), seed=2, count=2_000)
