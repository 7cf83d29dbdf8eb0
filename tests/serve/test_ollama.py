"""Ollama's interface: by its own client, and beside what its documents show."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from typing import Any

import httpx
import ollama
import pytest
from pool_cases import Start
from serving_cases import CALL, HELLO, WEATHER, Failing, Serve, Speaker
from waiting import PATIENCE_S, in_thread, join, until

from edgespec.decode.engine import Engine
from edgespec.serve.parsing import Limits
from edgespec.serve.server import Server

NUMBERS = {f"{name}_duration" for name in ("total", "load", "prompt_eval", "eval")}
NUMBERS |= {"prompt_eval_count", "eval_count"}
PARTS = ("thinking", "content")


def lines(address: str, path: str, **body: Any) -> list[dict[str, Any]]:
    told = httpx.post(f"{address}{path}", json=body, timeout=PATIENCE_S)
    assert told.headers["content-type"] == "application/x-ndjson"
    assert told.text.endswith("\n")
    return [json.loads(one) for one in told.text.splitlines()]


@pytest.mark.model
def test_its_own_client_gets_what_it_asks_for(exact_engine: Engine) -> None:
    """Calls to the embedded model."""
    with (
        Server(exact_engine, names=["tiny"]) as server,
        ollama.Client(host=server.start()) as api,
    ):
        short: dict[str, Any] = {"temperature": 0, "num_predict": 12}
        chat = partial(api.chat, "tiny", HELLO, options=short)
        generate = partial(api.generate, "tiny", options=short)
        found = api.list().models[0]
        assert (found.model, found.details.family) == ("tiny", "llama") and found.size > 1 << 20
        assert api.ps().models[0].context_length == exact_engine.backend.context_size
        told = api.show("tiny:latest")
        assert told.capabilities == ["completion", "tools"] and "im_start" in told.template
        assert told.modelinfo["llama.block_count"] == 30
        whole = chat()
        assert whole.message.content and whole.done_reason in ("stop", "length")
        assert 0 < whole.eval_count <= 12 and whole.prompt_eval_count > 20
        parts = [*chat(stream=True)]
        assert "".join(one.message.content for one in parts) == whole.message.content
        assert [one.done for one in parts] == [False] * (len(parts) - 1) + [True]
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        form = chat(format=schema, options={**short, "num_predict": 60})
        assert isinstance(json.loads(form.message.content)["n"], int)
        assert chat(format="json").message.content.startswith("{")
        assert chat(tools=[WEATHER], think=False).message
        logged = chat(logprobs=True, top_logprobs=2).logprobs
        assert len(logged[0].top_logprobs) == 2
        kept = chat(keep_alive="10m", options={**short, "stop": ["e"]})
        assert "e" not in kept.message.content
        answer = generate("Hi")
        assert answer.response == whole.message.content and answer.done
        assert "".join(one.response for one in generate("Hi", stream=True)) == answer.response
        raw = generate("The sky is", raw=True)
        assert raw.response and raw.prompt_eval_count < 6
        assert api.generate("tiny").done_reason == "load"
        told = generate("Hi", system="Answer in one word.")
        assert told.prompt_eval_count != answer.prompt_eval_count
        with pytest.raises(ollama.ResponseError, match="makes no embeddings") as caught:
            api.embed("tiny", "a text")
        assert caught.value.status_code == 404


def test_lines_have_the_fields_of_its_documents(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speaker, "memory_bytes", lambda _: {"weights": 5, "kv_cache": 2})
    address, head = serve(Speaker("Hello!")), {"model", "created_at", "done"}
    short = {"prompt": "Hi", "options": {"num_predict": 3}}
    for path, body, field, text, reason in (
        ("chat", {"messages": HELLO}, "message", "Hello!", "stop"),
        ("generate", short, "response", "Hel", "length"),
    ):
        *parts, last = lines(address, f"/api/{path}", **body)
        assert all(one.keys() == head | {field} for one in parts)
        told = [one[field] if path == "generate" else one[field]["content"] for one in parts]
        assert "".join(told) == text and last.keys() == head | {field, "done_reason"} | NUMBERS
        assert (last["done"], last["done_reason"]) == (True, reason)
        assert all(type(last[name]) is int and last[name] >= 0 for name in NUMBERS)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", last["created_at"])
    assert last["eval_count"] == 3
    card = {"name", "model", "modified_at", "size", "digest", "details"}
    for path, more in (("tags", set()), ("ps", {"expires_at", "size_vram", "context_length"})):
        (model,) = httpx.get(f"{address}/api/{path}").json()["models"]
        assert model.keys() == card | more
        assert model["size"] == 7  # without a plan, what was allocated
    told = httpx.post(f"{address}/api/show", json={"model": "edgespec"}).json()
    assert told.keys() >= {"modelfile", "parameters", "template", "details", "model_info"}
    version = httpx.get(f"{address}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # the least that Copilot takes
    told = httpx.get(f"{serve(Speaker(), keys=['secret'])}/api/tags").json()
    assert told == {"error": "the API key is missing or wrong"}


@pytest.mark.parametrize("streams", [False, True])
def test_thoughts_are_apart_and_calls_come_whole_and_go_back(serve: Serve, streams: bool) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"
    backend = Speaker(f"<think>Hm.</think>I look.\n{CALL}")
    asked: Any = {"model": "edgespec", "tools": [WEATHER], "stream": streams, "think": True}
    with ollama.Client(host=serve(backend, chat_template=template)) as api:
        told = api.chat(messages=HELLO, **asked)
        messages = [one.message for one in told] if streams else [told.message]
        thought, text = ("".join(getattr(one, name) or "" for one in messages) for name in PARTS)
        assert (thought, text) == ("Hm.", "I look.")
        (call,) = (call for one in messages for call in one.tool_calls or ())
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
        assert api.generate("edgespec", "Hi").thinking == "Hm."
        assert "thinking" not in api.show("edgespec").capabilities  # of no file
        backend.ids = [*b"Take a coat."]
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        rest = {"role": "tool", "tool_name": "weather", "content": "Rain"}
        last = api.chat("edgespec", [*HELLO, said, rest], options={"num_predict": 12})
        assert last.message.content == "Take a coat."


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("chat", {"messages": 5}, "messages must be a list"),
        ("chat", {"options": 5}, "options must be an object"),
        ("chat", {"options": {"temperature": "hot"}}, "temperature must be a number"),
        ("chat", {"options": {"num_predict": "all"}}, "max_tokens must be a whole number"),
        ("chat", {"format": 5}, "response_format.schema must be an object"),
        ("chat", {"think": "often"}, "think must be one of"),
        ("chat", {"keep_alive": "soon"}, "is no time such as 5m"),
        ("chat", {"messages": [{"role": "user", "content": "", "images": ["?"]}]}, "is not taken"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"prompt": "x", "context": [1]}, "context is not supported"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "system has no place"),
        ("show", {"model": "owl"}, 'there is no model "owl" here'),
        ("pull", {"model": "owl"}, "POST /api/pull is not supported"),
    ],
)
def test_what_is_wrong_is_an_error_of_the_interface(
    serve: Serve, path: str, body: dict[str, Any], problem: str
) -> None:
    body = {"messages": HELLO, **body} if path == "chat" else body
    told = httpx.post(f"{serve(Speaker())}/api/{path}", json=body)
    assert told.status_code in (400, 404)
    assert problem in told.json()["error"] and told.json().keys() == {"error"}


def test_what_fails_in_a_stream_is_its_last_line(serve: Serve) -> None:
    *parts, last = lines(serve(Failing()), "/api/chat", messages=HELLO)
    assert parts and last.keys() == {"error"} and "the server failed" in last["error"]


def test_who_waits_is_sent_nothing_that_is_no_line(start: Start) -> None:
    """For a model or a token, ten times as long as other interfaces take to send a comment."""
    server = start(limits=Limits(comment_s=0.02))
    made, body = server.models["b"], {"model": "b:latest", "messages": HELLO}
    for is_loaded in (False, True):
        gate = made.backends[0].gate if is_loaded else made.gate
        gate.clear()
        thread, found = in_thread(partial(lines, server.address, "/api/chat", **body))
        time.sleep(0.2)
        gate.set()
        join(thread)
        *parts, last = found[0]
        assert "".join(one["message"]["content"] for one in parts) == "I am b."
        assert last["total_duration"] > 1e8
        assert (last["load_duration"] > 1e8) != is_loaded


def test_models_are_listed_loaded_and_unloaded(start: Start) -> None:
    """But for a pinned one, which is not said to have left."""
    server = start()
    server.pool.members[0].is_pinned = True
    with ollama.Client(host=server.address) as api:
        for name, reason in (("a", "load"), ("b", "unload")):
            assert api.generate(f"{name}:latest").done_reason == "load"
            assert name in [one.model for one in api.ps().models] and len(api.list().models) == 3
            assert api.generate(name, keep_alive=0).done_reason == reason
        until(lambda: [one.model for one in api.ps().models] == ["a"])
