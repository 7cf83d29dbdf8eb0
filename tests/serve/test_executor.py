"""One engine behind a queue: who waits, who is refused, and what fails."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from queue_cases import CHAT, HELLO, generations
from serving_cases import Serve, Speaker
from waiting import until

from edgespec.serve.parsing import Limits
from edgespec.serve.service import Generation


def test_a_full_queue_refuses_and_says_when_to_come_again(serve: Serve) -> None:
    backend = Speaker()
    address = serve(backend, limits=Limits(waiting=2))
    backend.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        asked = []
        for number in range(3):
            asked.append(pool.submit(httpx.post, address + CHAT, json=HELLO, timeout=20))
            until(lambda there=number + 1: generations(address) == there)  # type: ignore[misc]
        found = httpx.post(address + CHAT, json=HELLO)
        backend.gate.set()
        assert found.status_code == 429
        assert found.headers["retry-after"] == "1"
        assert found.json()["error"]["code"] == "queue_full"
        assert [one.result().status_code for one in asked] == [200, 200, 200]


def test_requests_are_answered_one_after_the_other(serve: Serve) -> None:
    address = serve(Speaker())
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(httpx.post, address + CHAT, json=HELLO, timeout=20) for _ in range(8)]
    assert all(one.result().status_code == 200 for one in asked)


def test_what_fails_in_the_engine_is_told_and_the_next_one_is_answered(serve: Serve) -> None:
    class Failing(Speaker):
        broken = True

        def verify(self, tree: Any) -> Any:
            if self.broken:
                raise RuntimeError("out of order: /secret/path")
            return super().verify(tree)

    backend = Failing()
    address = serve(backend)
    response = httpx.post(address + CHAT, json=HELLO)
    assert response.status_code == 500
    name = response.headers["x-request-id"]
    assert response.json()["error"] == {
        "message": f"the server failed: RuntimeError (request {name})",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    streamed = httpx.post(address + CHAT, json={**HELLO, "stream": True})
    assert streamed.status_code == 200  # its first token came
    assert '"type":"server_error"' in streamed.text and "[DONE]" not in streamed.text
    backend.broken = False
    assert httpx.post(address + CHAT, json=HELLO).status_code == 200


def test_an_answer_does_not_hold_up_the_end_of_python(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(Speaker(loops=True))
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    found = httpx.post(address + CHAT, json={**HELLO, "max_tokens": -1}, timeout=20)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "cancelled")


def test_a_generation_that_nobody_can_read_any_more_is_cancelled() -> None:
    """Its loop is closed, as that of a server in a program that has ended it."""
    loop, cancelled, nothing = asyncio.new_event_loop(), threading.Event(), cast(Any, None)
    made = Generation(loop, nothing, cancelled, "", [])
    loop.close()
    made.end(nothing)
    assert cancelled.is_set()
