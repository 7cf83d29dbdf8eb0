"""What fails, as a client is told of it and as the log is."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

import httpx
import pytest
from decoding_cases import END, VOCAB
from fake_backend import FakeBackend
from queue_cases import CHAT, HELLO
from serving_cases import Serve, Speaker
from waiting import until

from edgespec.log import PROMPTS
from edgespec.serve import app
from edgespec.serve.pool import Pool


def test_a_failure_is_logged_with_its_place_and_its_id_alone(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of exceptions may quote what a client sent."""

    def fail(_service: object, asked: Any, _task: object) -> None:
        raise KeyError(asked[0])

    monkeypatch.setitem(app._ASKED, "/tokenize", (*app._ASKED["/tokenize"][:2], fail))
    address = serve(Speaker())
    told = httpx.post(f"{address}/tokenize", json={"content": "private text"})
    name = told.headers["x-request-id"]
    assert told.status_code == 500
    assert told.json()["error"]["message"] == f"the server failed: KeyError (request {name})"
    (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert name in line.getMessage() and "in fail" in line.getMessage()
    assert "private text" not in caplog.text


def test_what_no_route_catches_is_told_the_same_way(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Pool, "find", fail)
    told = httpx.get(f"{serve(Speaker())}/props")
    assert told.status_code == 500
    name = told.headers["x-request-id"]
    assert (
        told.json()["error"]["message"] == f"the server failed: ZeroDivisionError (request {name})"
    )
    (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert name in line.getMessage()


def test_the_log_of_a_stream_that_fails_names_it(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Speaker):
        def verify(self, tree: Any) -> Any:
            raise RuntimeError

    streamed = httpx.post(serve(Failing()) + CHAT, json={**HELLO, "stream": True})
    name = streamed.headers["x-request-id"]
    assert f"the server failed: RuntimeError (request {name})" in streamed.text
    (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert name in line.getMessage() and "in verify" in line.getMessage()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_leaves_no_token_is_the_clients_to_mend(
    serve: Serve, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that can say nothing but its end, where that is forbidden."""
    only_end = [0.0 if token == END else -inf for token in range(VOCAB)]
    body = {"prompt": "a", "ignore_eos": True, "temperature": temperature}
    address = serve(FakeBackend(lambda _: only_end, VOCAB, end=END, context_size=2048))
    told = httpx.post(f"{address}/completion", json=body)
    assert told.status_code == 400
    assert "every one is forbidden" in told.json()["error"]["message"]
    told = httpx.post(f"{address}/completion", json={**body, "stream": True})
    assert told.status_code == 200  # which was said before anything could fail
    assert '"error"' in told.text and "every one is forbidden" in told.text
    assert not [one for one in caplog.records if one.levelno == logging.ERROR]


def test_prompts_and_answers_are_logged_only_when_asked_for(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "edgespec")
    address = serve(Speaker())
    body = {"messages": [{"role": "user", "content": "private"}], "max_tokens": 4}
    answer = httpx.post(address + CHAT, json=body)
    until(lambda: f"{answer.headers['x-request-id']} length: prompt " in caplog.text)
    assert "private" not in caplog.text
    caplog.set_level(logging.INFO, PROMPTS.name)
    httpx.post(address + CHAT, json=body)
    until(lambda: "answer: " in caplog.text)
    assert "private" in caplog.text
