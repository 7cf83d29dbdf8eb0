"""Adapters by request, as llama.cpp's server takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from lora_gguf import write_adapter
from random_gguf import F32, write_model
from serving_cases import Speaker

import edgespec
from edgespec.decode.engine import Engine

pytestmark = pytest.mark.model
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", "llama", F32, reads_bytes=True, template=TEMPLATE)
    named = [
        str(write_adapter(folder / f"{name}.gguf", model, seed)) for seed, name in enumerate("ab")
    ]
    asked: Any = {"context_size": 256, "threads": 1, "lora": named}
    plan = edgespec.plan(model, **asked)
    with edgespec.load(model, **asked) as engine, edgespec.Server(engine, plan=plan) as server:
        yield server.start()


def answer(address: str, path: str = "/completion", **fields: Any) -> str:
    body: dict[str, Any] = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}]}
    body = {"max_tokens": 12, "temperature": 0, "logprobs": 0, **body, **fields}
    del body["messages" if path == "/completion" else "prompt"], body["logprobs"]
    told = httpx.post(f"{address}{path}", json=body)
    assert told.status_code == 200, told.text
    document = told.json()
    return str(document["content"] if "content" in document else document["choices"][0]["message"])


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_request_says_how_much_of_each_it_wants(address: str, path: str) -> None:
    both = [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 1.0}]
    usual, same = answer(address, path), answer(address, path, lora=both)
    none, half = (
        answer(address, path, lora=[]),
        answer(address, path, lora=[{"id": 0, "scale": 0.5}]),
    )
    assert usual == same and len({usual, none, half}) == 3


def test_scales_of_all_others_can_be_set(address: str) -> None:
    told = httpx.get(f"{address}/lora-adapters").json()
    assert told == [
        {"id": 0, "path": "a.gguf", "scale": 1.0},
        {"id": 1, "path": "b.gguf", "scale": 1.0},
    ]
    wanted = [{"id": 1, "scale": 0.25}]
    assert httpx.post(f"{address}/lora-adapters", json=wanted).json() == {"success": True}
    assert [one["scale"] for one in httpx.get(f"{address}/lora-adapters").json()] == [0.0, 0.25]
    assert answer(address) == answer(address, lora=wanted) != answer(address, lora=[])
    assert httpx.post(f"{address}/lora-adapters", json=told).status_code == 200


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        (5, "lora must be a list"),
        ([{"scale": 1}], "lora[0].id is missing"),
        ([{"id": 0, "scale": "much"}], "lora[0].scale must be a number"),
        ([{"id": 2}], "there is no adapter 2: the model was loaded with 2"),
    ],
)
def test_wrong_ones_are_refused(address: str, lora: Any, problem: str) -> None:
    told = httpx.post(f"{address}/completion", json={"prompt": "x", "lora": lora})
    assert told.status_code == 400 and problem in told.json()["error"]["message"]


def test_a_model_without_any_says_so() -> None:
    with Engine(Speaker()) as engine, edgespec.Server(engine) as server:
        address = server.start()
        assert httpx.get(f"{address}/lora-adapters").json() == []
        told = httpx.post(f"{address}/lora-adapters", json=[{"id": 0, "scale": 1}])
        assert told.status_code == 400 and "there is no adapter 0 of 0" in told.text
