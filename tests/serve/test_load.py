"""Many clients at once: some go away, some send nonsense, some read slowly."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from random_gguf import Q8_0, write_model
from serving_cases import TEMPLATE, Serve, Speaker

import edgespec
from edgespec.serve.parsing import Limits
from edgespec.serve.server import Server

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
BUSY = Limits(waiting=64)


def one_client(address: str, seed: int, requests: int) -> Counter[str]:
    """What came of each request of a client, by what it was."""
    chance, found = random.Random(seed), Counter[str]()
    with httpx.Client(base_url=address, timeout=120) as client:
        for _ in range(requests):
            kind = chance.choice(("whole", "stream", "stream", "left", "slow", "bad"))
            found[f"{kind} {_KINDS[kind](client, chance)}"] += 1
    return found


def _whole(client: httpx.Client, chance: random.Random) -> bool:
    body = {"messages": MESSAGES, "max_tokens": chance.randrange(1, 24)}
    answer = client.post("/v1/chat/completions", json=body)
    return answer.status_code == 200 and bool(answer.json()["choices"][0]["message"]["content"])


def _stream(client: httpx.Client, chance: random.Random, pause_s: float = 0.0) -> bool:
    body = {"messages": MESSAGES, "max_tokens": chance.randrange(1, 24), "stream": True}
    lines = []
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            time.sleep(pause_s)
    found = [line for line in lines if line]
    reason = json.loads(found[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    return found[-1] == "data: [DONE]" and reason in ("stop", "length")


def _slow(client: httpx.Client, chance: random.Random) -> bool:
    return _stream(client, chance, pause_s=0.01)


def _left(client: httpx.Client, chance: random.Random) -> bool:
    body = {"messages": MESSAGES, "max_tokens": 400, "stream": True}
    left_after = chance.randrange(1, 4)
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number >= left_after:
                break
    return True


def _bad(client: httpx.Client, chance: random.Random) -> bool:
    bodies = (b"{", b"[]", b'{"messages": 1}', b'{"messages": [{}]}', b'{"what": 1}')
    return client.post("/v1/chat/completions", content=chance.choice(bodies)).status_code == 400


_KINDS = {"whole": _whole, "stream": _stream, "slow": _slow, "left": _left, "bad": _bad}


READERS = "AnyIO worker thread"


def load(address: str, clients: int, requests: int) -> Counter[str]:
    with ThreadPoolExecutor(clients) as pool:
        several = [pool.submit(one_client, address, seed, requests) for seed in range(clients)]
        return sum((one.result() for one in several), Counter())


def test_every_good_request_is_answered(serve: Serve) -> None:
    found = load(serve(Speaker(loops=True), limits=BUSY), clients=8, requests=8)
    assert found.total() == 64
    assert [what for what in found if what.endswith("False")] == []


def num_threads(of_readers: bool) -> int:
    """Anyio's, which read requests, are as many as ever came at once, for a while; the others."""
    return sum((one.name == READERS) == of_readers for one in threading.enumerate())


@pytest.mark.slow
@pytest.mark.model
def test_requests_of_sixteen_clients_leave_nothing_behind(tmp_path: Path) -> None:
    process = psutil.Process()
    model = write_model(tmp_path / "tiny.gguf", "llama", Q8_0, reads_bytes=True, template=TEMPLATE)
    engine = edgespec.load(model, context_size=1024, users=8)
    with engine, Server(engine, limits=BUSY) as server:
        address = server.start()
        load(address, clients=16, requests=2)  # everything is touched once
        others, before = num_threads(of_readers=False), process.memory_info().rss
        found = load(address, clients=16, requests=4)
        time.sleep(1.0)
        assert [what for what in found if what.endswith("False")] == []
        assert found.total() == 64
        assert process.memory_info().rss < before + (16 << 20)
        assert num_threads(of_readers=False) <= others
        assert num_threads(of_readers=True) <= 16
        assert not server.service.executor.running and not server.service.executor.waiting
