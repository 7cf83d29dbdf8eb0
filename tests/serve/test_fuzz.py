"""Requests that nobody would send: an error with a sentence, never a failure of the server."""

from __future__ import annotations

import asyncio
import base64
import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_cases import TEMPLATE, Serve, Speaker
from starlette.types import ASGIApp
from vision_cases import open_engine
from vision_gguf import images, jpeg
from waiting import PATIENCE_S

from edgespec.decode.engine import Engine
from edgespec.serve.parsing import Limits
from edgespec.serve.server import Server

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


def bodies(
    seed: int, count: int, seeds: Sequence[tuple[str, dict[str, Any]]] = SEEDS
) -> Iterator[tuple[str, bytes]]:
    """Requests, of which each has a few parts that are changed, missing or too many."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(seeds)
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


def assert_none_fails(address: str, seed: int, count: int, seeds: Any = SEEDS) -> None:
    refused = 0
    with httpx.Client(base_url=address, timeout=60) as client:
        for path, data in bodies(seed, count, seeds):
            response = client.post(path, content=data)
            assert response.status_code in (200, 400, 404), (path, data, response.text)
            if response.status_code != 200:
                refused += 1
                assert response.json()["error"]["message"], data
            assert "server_error" not in response.text, (path, data, response.text)
    assert 0 < refused < count


@pytest.mark.parametrize(
    ("seed", "count"), [(2, 200), pytest.param(3, 2_000, marks=pytest.mark.long)]
)
def test_no_body_makes_the_server_fail(serve: Serve, seed: int, count: int) -> None:
    assert_none_fails(serve(Speaker()), seed, count)


def seeds_with_images() -> Iterator[tuple[str, dict[str, Any]]]:
    """Images by each interface, some of them cut or of another form."""
    for data in (images(1)[0], jpeg(), images(1)[0][:50], b"GIF89a"):
        text = base64.b64encode(data).decode()
        url = f"data:image/png;base64,{text}"
        image = {"type": "image", "source": {"type": "base64", "data": text}}
        for path, part in (
            ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": url}}),
            ("/v1/messages", image),
            ("/v1/messages", {"type": "tool_result", "tool_use_id": "a", "content": [image]}),
        ):
            content = [part, {"type": "text", "text": "?"}]
            yield path, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        item = {"type": "input_image", "image_url": url, "detail": "auto"}
        asked = [{"role": "user", "content": [item]}]
        yield "/v1/responses", {"input": asked, "max_output_tokens": 1}


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.long)])
def test_no_body_with_images_makes_the_server_fail(vision_folder: Path, count: int) -> None:
    with open_engine(vision_folder, "qwen3vl") as engine, Server(engine) as server:
        assert_none_fails(server.start(), 3, count, list(seeds_with_images()))


# -- whole requests, as a server hands them over ----------------------------------------------

PATHS = sorted(
    {path for path, _ in SEEDS}
    | {"/", "/health", "/props", "/status", "/metrics", "/v1/embeddings"}
    | {"/v1/models", "/v1/models/edgespec", "/v1/models/a/b", "*", "http://localhost/health"}
)
ENCODERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"identity": bytes,
    b"zstd": bytes,
    b"gzip ": lambda data: gzip.compress(data)[:-3],
    b"x-gzip": lambda data: data[::-1],
}
HEADERS: dict[bytes, list[bytes]] = {
    b"host": [b"localhost:1", b"LOCALHOST.", b"[::1]:1", b"a.example", b"", b"[", b":::", b"\xff"],
    b"origin": [b"http://localhost:1", b"https://a.example", b"null", b"", b"://", b"\xe9"],
    b"authorization": [b"Bearer k", b"bearer  k ", b"Basic k", b"Bearer", b"", b"Bearer \xff\xc3"],
    b"x-api-key": [b"k", b"", b"\xff"],
    b"access-control-request-method": [b"POST", b"DELETE", b""],
    b"access-control-request-headers": [b"x-stainless-os", b"", b"a,,b"],
    b"access-control-request-private-network": [b"true"],
    b"content-type": [b"text/plain", b"application/json; charset=utf-16", b"\xff"],
    b"content-length": [b"0", b"-1", b"x", b"99999999999999999999"],
    b"x-request-id": [b"mine", b"\xff"],
    b"expect": [b"100-continue"],
}
values = st.binary(max_size=30).map(lambda data: bytes(one for one in data if one not in b"\r\n\0"))
json_values = st.recursive(
    st.sampled_from(JUNK) | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """The scope and the body of one: most are near one that is answered."""
    path, seed = draw(st.sampled_from(SEEDS))
    body = copy.deepcopy(seed)
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2, 4)))):
        _change(chance, body)
    if draw(st.sampled_from((False, False, True))):
        body[draw(st.sampled_from(sorted(seed)))] = draw(json_values)
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        path, data = draw(st.sampled_from(PATHS) | st.text(max_size=12)), draw(st.binary())
    data = data if draw(st.integers(0, 9)) else data.decode(errors="replace").encode("utf-16")
    path = draw(st.sampled_from(("{}", "{}", "{}", "/{}/", "{}//", "http://LocalHost{}"))).format(
        path
    )
    most = draw(st.sampled_from((0, 0, 3)))
    names = draw(st.lists(st.sampled_from(sorted(HEADERS)), max_size=most))
    headers = {name: draw(st.sampled_from(HEADERS[name]) | values) for name in names}
    headers = {b"host": b"localhost:1", b"x-api-key": b"k", **headers}
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(sorted(ENCODERS)))
        headers[b"content-encoding"], data = name, ENCODERS[name](data)
    method = draw(st.sampled_from(["POST"] * 20 + ["GET", "HEAD", "OPTIONS", "DELETE", "é"]))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(errors="replace"),
        "query_string": draw(values),
        "root_path": "",
        "headers": list(headers.items()),
        "client": draw(st.sampled_from([("127.0.0.1", 1), None])),
        "server": ("127.0.0.1", 1),
    }
    return scope, data


async def answer_of(app: ASGIApp, scope: dict[str, Any], body: bytes) -> tuple[int, str, bytes]:
    """Status, type and body. The body is sent in two parts, and the client stays."""
    half = len(body) // 2
    parts = [(body[:half], True), (body[half:], False)]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(2 * PATIENCE_S)
        data, has_more = parts.pop(0)
        return {"type": "http.request", "body": data, "more_body": has_more}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), PATIENCE_S)
    assert [one["type"] for one in sent].count("http.response.start") == 1
    assert not sent[-1].get("more_body")
    headers = dict(sent[0]["headers"])
    assert headers[b"x-request-id"]
    kind = headers.get(b"content-type", b"").decode()
    return sent[0]["status"], kind, b"".join(one.get("body", b"") for one in sent[1:])


def no_json(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture(scope="module")
def apps() -> Iterator[list[ASGIApp]]:
    """One for everybody, and one with a key and an origin."""
    limits = Limits(body_bytes=20_000)
    with (
        Engine(Speaker(), chat_template=TEMPLATE) as engine,
        Server(engine, limits=limits) as free,
        Server(engine, limits=limits, keys=["k"], origins=["https://a.example"]) as keyed,
    ):
        yield [free.app(), keyed.app()]


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_every_request_is_answered_in_json(
    apps: list[ASGIApp], request: tuple[dict[str, Any], bytes]
) -> None:
    scope, body = request
    for app in apps:
        status, kind, data = asyncio.run(answer_of(app, dict(scope), body))
        assert status < 500 or (status, scope["method"]) == (501, "POST"), (status, data)
        is_preflight = b"access-control-request-method" in dict(scope["headers"])
        if status >= 400 and not is_preflight and scope["method"] != "HEAD":
            assert kind == "application/json"
            assert json.loads(data, parse_constant=no_json)["error"]["message"].strip(), data
        elif kind == "application/json" and data:
            json.loads(data, parse_constant=no_json)
        elif kind.startswith("text/event-stream"):
            for line in data.decode().splitlines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    document = json.loads(line[6:], parse_constant=no_json)
                    assert document.get("error", {}).get("type") != "server_error", data
