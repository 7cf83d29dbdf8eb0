"""A server of several users: their answers, its queue, and what it says of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
from decoding_cases import END, VOCAB
from fake_backend import FakeBackend
from serving_cases import Gated, Serve, letters
from waiting import PATIENCE_S, until

from edgespec.serve.parsing import Limits

CHAT = "/v1/chat/completions"


def asked(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{number} please"}], "max_tokens": 30, **more}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def is_known(address: str, count: int) -> bool:
    """Whether so many answers run or wait."""
    queue = httpx.get(f"{address}/status").json()["queue"]
    return bool(queue["running"] + queue["waiting"] == count)


def test_each_answer_is_the_one_given_alone(serve: Serve) -> None:
    backend = Gated(users=4)
    shared, lonely = serve(backend), serve(FakeBackend(letters, VOCAB, end=END))
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(httpx.post, shared + CHAT, json=asked(n), timeout=30) for n in range(8)]
        until(lambda: httpx.get(f"{shared}/status").json()["queue"]["running"] == 4)
        backend.gate.set()
        texts = [text_of(one.result(PATIENCE_S)) for one in made]
    assert max(backend.together) > 1
    assert httpx.get(f"{shared}/props").json()["total_slots"] == 4
    opened = httpx.get(f"{shared}/status").json()["queue"]
    assert (opened["users"], opened["running"]) == (4, 0)
    assert len(set(texts)) > 1
    alone = [text_of(httpx.post(lonely + CHAT, json=asked(n), timeout=30)) for n in range(8)]
    assert texts == alone


def test_the_answers_of_one_request_read_its_prompt_once(serve: Serve) -> None:
    backend = Gated(users=4)
    backend.gate.set()
    address = serve(backend)
    answer = httpx.post(address + CHAT, json=asked(1, n=4, temperature=1.0, seed=3), timeout=30)
    choices = [one["message"]["content"] for one in answer.json()["choices"]]
    assert len(set(choices)) == 4
    totals = httpx.get(f"{address}/status").json()["totals"]
    assert totals["cached_tokens"] == 3 * (totals["prompt_tokens"] // 4 - 1)


def test_more_than_may_wait_are_told_to_come_again(serve: Serve) -> None:
    backend = Gated(users=2)
    address = serve(backend, limits=Limits(waiting=1))
    with ThreadPoolExecutor(3) as pool:
        made = []
        for number in range(3):
            made.append(pool.submit(httpx.post, address + CHAT, json=asked(number), timeout=30))
            until(partial(is_known, address, number + 1))
        refused = httpx.post(address + CHAT, json=asked(9), timeout=30)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        backend.gate.set()
        assert all(text_of(one.result(PATIENCE_S)) for one in made)


def test_a_conversation_that_comes_back_is_found(serve: Serve) -> None:
    backend = Gated(users=2)
    backend.gate.set()
    address = serve(backend)
    talks: dict[int, list[dict[str, str]]] = {n: [] for n in range(2)}
    for _ in range(3):
        for number, talk in talks.items():
            talk.append({"role": "user", "content": f"{number}" * 40})
            answer = httpx.post(
                address + CHAT, json={"messages": talk, "max_tokens": 20}, timeout=30
            ).json()
            talk.append(answer["choices"][0]["message"])
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.6 * usage["prompt_tokens"]
