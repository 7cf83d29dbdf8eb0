"""Adapters by request, as llama.cpp's server takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from lora_gguf import write_adapter
from random_gguf import F32, write_model
from serving_cases import HELLO, TEMPLATE, Speaker

import edgespec
from edgespec.decode.engine import Engine

BOTH: Any = [{"id": 0, "path": "a.gguf", "scale": 1.0}, {"id": 1, "path": "b.gguf", "scale": 1.0}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", "llama", F32, reads_bytes=True, template=TEMPLATE)
    named = [str(write_adapter(folder / one["path"], model, one["id"])) for one in BOTH]
    asked: Any = {"context_size": 256, "threads": 1, "lora": named}
    with (
        edgespec.load(model, **asked) as engine,
        edgespec.Server(engine, plan=edgespec.plan(model, **asked)) as server,
        httpx.Client(base_url=server.start()) as opened,
    ):
        yield opened


def answer(client: httpx.Client, lora: Any = None, path: str = "/completion") -> str:
    body = {"prompt": "abc", "messages": HELLO, "max_tokens": 12, "temperature": 0, "lora": lora}
    told = client.post(path, json=body).json()
    return str(told["content"] if "content" in told else told["choices"])


@pytest.mark.model
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_request_says_how_much_of_each_it_wants(client: httpx.Client, path: str) -> None:
    asked: Any = (None, BOTH, [], [{"id": 0, "scale": 0.5}])
    usual, same, *others = (answer(client, one, path) for one in asked)
    assert usual == same and len({usual, *others}) == 3


@pytest.mark.model
def test_scales_of_all_others_can_be_set(client: httpx.Client) -> None:
    assert client.get("/lora-adapters").json() == BOTH
    wanted = [{"id": 1, "scale": 0.25}]
    assert client.post("/lora-adapters", json=wanted).json() == {"success": True}
    assert [one["scale"] for one in client.get("/lora-adapters").json()] == [0.0, 0.25]
    assert answer(client) == answer(client, wanted) != answer(client, [])
    assert client.post("/lora-adapters", json=BOTH).status_code == 200


@pytest.mark.model
@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        (5, "lora must be a list"),
        ([{"scale": 1}], "lora[0].id is missing"),
        ([{"id": 0, "scale": "much"}], "lora[0].scale must be a number"),
        ([{"id": 2}], "there is no adapter 2: the model was loaded with 2"),
    ],
)
def test_wrong_ones_are_refused(client: httpx.Client, lora: Any, problem: str) -> None:
    told = client.post("/completion", json={"prompt": "x", "lora": lora})
    assert told.status_code == 400 and problem in told.json()["error"]["message"]


def test_a_model_without_any_says_so() -> None:
    with Engine(Speaker()) as engine, edgespec.Server(engine) as server:
        address = f"{server.start()}/lora-adapters"
        assert httpx.get(address).json() == []
        told = httpx.post(address, json=[{"id": 0, "scale": 1}])
    assert told.status_code == 400 and "there is no adapter 0 of 0" in told.text
