"""`edgespec.testing`: what a program of somebody else is tested with, as such a program uses it."""

from __future__ import annotations

import json
import urllib.request

import pytest

import edgespec
from edgespec.testing import scripted_engine


def weather(city: str) -> str:
    """What the weather is like."""
    return f"sunny in {city}"


def test_the_function_sees_what_the_model_reads() -> None:
    """Both turns of a conversation, whose first part is in the cache already."""
    seen: list[str] = []
    with scripted_engine(lambda prompt: seen.append(prompt) or str(len(seen))) as engine:  # type: ignore[func-returns-value]
        session = edgespec.Session(engine, system="Be brief.")
        assert [session.send("one").text, session.send("two").text] == ["1", "2"]
    assert seen == [
        "<system>Be brief.\n<user>one\n<assistant>",
        "<system>Be brief.\n<user>one\n<assistant>1\n<user>two\n<assistant>",
    ]


def test_options_of_a_generation_hold() -> None:
    with scripted_engine("Hello, wörld!", context_size=64) as engine:
        assert engine.generate("x").text == "Hello, wörld!"
        assert engine.generate("x", max_tokens=5).finish_reason == "length"
        assert engine.generate("x", stop=["w"]).text == "Hello, "
        chunks = [chunk.text for chunk in engine.stream([{"role": "user", "content": "x"}])]
        assert "".join(chunks) == "Hello, wörld!" and len(chunks) > 10
        with pytest.raises(edgespec.ContextFullError):
            engine.generate("x" * 64)


def test_calls_of_tools_are_found() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    with scripted_engine(call) as engine:
        (found,) = engine.generate("How is it there?", tools=[weather]).tool_calls
    assert (found.name, json.loads(found.arguments)) == ("weather", {"city": "Bonn"})


def test_a_server_runs_on_it() -> None:
    with scripted_engine("Served.") as engine, edgespec.Server(engine, names=["tiny"]) as server:
        request = urllib.request.Request(
            f"{server.start(port=0)}/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "x"}], "model": "tiny"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            (choice,) = json.load(answer)["choices"]
    assert choice["message"]["content"] == "Served."
