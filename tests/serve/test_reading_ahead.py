"""Requests that read a prompt and write nothing, in every interface, and how reading is told."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from serving_cases import HELLO, Connect, ConnectAnthropic, Serve, Speaker
from waiting import PATIENCE_S

NOTHING: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": HELLO, "max_tokens": 0}),
    ("chat/completions", {"messages": HELLO, "prompt_cache_options": {"prewarm": True}}),
    ("completions", {"prompt": "<user>Hi<assistant>", "max_tokens": 0}),
    ("messages", {"messages": HELLO, "max_tokens": 0}),
    ("responses", {"input": "Hi", "max_output_tokens": 0}),
    ("responses", {"input": "Hi", "prompt_cache_options": {"prewarm": True}}),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "body"), NOTHING)
def test_a_prompt_is_read_and_nothing_is_written(
    serve: Serve, path: str, body: dict[str, Any], streams: bool
) -> None:
    backend = Speaker("<think>Hm.</think>Hello")
    address = serve(backend)
    options = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    more = {"stream": True, **options} if streams else {}
    answer = httpx.post(f"{address}/v1/{path}", json={**body, **more}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert "Hello" not in answer.text and "Hm" not in answer.text and "<" not in answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = list(map(json.loads, lines)) if streams else [answer.json()]
    told = [one.get("response", one) for one in events if one.get("response", one).get("usage")]
    usage = told[-1]["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    ends = {"length", "max_tokens", "incomplete", "response.incomplete"}
    assert any(f'"{one}"' in answer.text for one in ends)
    if streams and path.endswith("completions"):
        assert answer.text.endswith("data: [DONE]\n\n")
    assert backend.steps_made == 0, "for an answer that nobody is told"
    asked = {"messages": HELLO, "max_tokens": 4}
    again = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=30).json()
    told_usage = again["usage"]
    cached = told_usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == told_usage["prompt_tokens"] - 1  # all but the last, whose logits are wanted


def test_clients_take_such_answers(
    serve: Serve, client: Connect, anthropic_client: ConnectAnthropic
) -> None:
    address = serve(Speaker())
    ask: Any = client(address)
    chat = ask.chat.completions.create(model="edgespec", messages=HELLO, max_tokens=0)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("", "length")
    response = ask.responses.create(model="edgespec", input="Hi", max_output_tokens=0)
    assert (response.output_text, response.status) == ("", "incomplete")
    talk: Any = anthropic_client(address)
    message = talk.messages.create(model="edgespec", messages=HELLO, max_tokens=0)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 0


def test_how_much_was_read_is_told_while_it_is_read(serve: Serve) -> None:
    backend = Speaker("Hello")
    address = serve(backend)
    backend.gate.clear()
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "return_progress": True}
    told = []
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "prompt_progress" in event:
                    told.append(event)
                    backend.gate.set()
    assert told[0]["choices"] == []
    progress = told[0]["prompt_progress"]
    assert (progress["total"], progress["cache"], progress["processed"]) == (19, 0, 0)
    assert progress["time_ms"] >= 400


PREWARM: dict[str, Any] = {"messages": HELLO, "prompt_cache_options": {"prewarm": True}}


def wait_for(address: str, what: str) -> None:
    """Wait until a request is running, or waiting."""
    end = time.monotonic() + PATIENCE_S
    while httpx.get(f"{address}/status").json()["queue"][what] == 0:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_prompt_that_is_read_ahead_gives_way(serve: Serve) -> None:
    """It ends where somebody comes, whose answer begins; beside somebody it does not begin."""
    backend = Speaker("word ", loops=True)
    address = serve(backend)
    backend.gate.clear()
    with ThreadPoolExecutor() as threads:
        asked = partial(httpx.post, f"{address}/v1/chat/completions", timeout=30)
        ahead = threads.submit(asked, json=PREWARM)
        wait_for(address, "running")
        other = threads.submit(asked, json={"messages": HELLO, "max_tokens": 8})
        wait_for(address, "waiting")
        late = asked(json=PREWARM)  # at once, with nothing read
        assert late.status_code == 200 and late.json()["usage"]["completion_tokens"] == 0
        backend.gate.set()
        assert ahead.result().status_code == other.result().status_code == 200
        assert other.result().json()["choices"][0]["message"]["content"] == "word wor"
    totals = httpx.get(f"{address}/status").json()["totals"]
    assert totals["generations"] == 1
    assert totals["read_ahead_used"] <= totals["read_ahead"] <= 19


def test_of_two_that_are_read_ahead_the_later_one_is(serve: Serve) -> None:
    """It knows more of what is typed; it was answered with nothing read while the first ended."""
    backend = Speaker("Hello")
    address = serve(backend)
    backend.gate.clear()
    more: dict[str, Any] = {**PREWARM, "messages": [{"role": "user", "content": "Hi there"}]}
    with ThreadPoolExecutor() as threads:
        asked = partial(httpx.post, f"{address}/v1/chat/completions", timeout=30)
        first = threads.submit(asked, json=PREWARM)
        wait_for(address, "running")
        second = threads.submit(asked, json=more)
        wait_for(address, "waiting")
        backend.gate.set()
        assert first.result().status_code == second.result().status_code == 200
    answer = asked(json={**more, "prompt_cache_options": {}, "max_tokens": 1}).json()
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_what_was_read_ahead_is_counted(serve: Serve) -> None:
    address = serve(Speaker("Hello"))
    httpx.post(f"{address}/v1/chat/completions", json=PREWARM)
    told = httpx.get(f"{address}/metrics").text
    assert "edgespec_read_ahead_total 19\n" in told
    assert "edgespec_read_ahead_used_total 0\n" in told
    httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2})
    totals = httpx.get(f"{address}/status").json()["totals"]
    assert (totals["read_ahead"], totals["read_ahead_used"]) == (19, 18)
