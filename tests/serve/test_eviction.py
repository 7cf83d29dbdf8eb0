"""Which models leave for others, and that everybody gets an answer; with made-up models."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_cases import SIZE, Made, Start
from waiting import until

from edgespec.serve.pool import Member


def test_what_is_not_in_the_way_stays(start: Start) -> None:
    """The small one was used least recently, and without it there is no room either."""
    sizes = {"small": 10, "a": 90, "b": 90}
    server = start(*(Member(Made(name, size)) for name, size in sizes.items()), room=110)
    for name in ("small", "a", "b"):
        assert server.ask(name).status_code == 200
    assert server.states() == {"small": "ready", "a": "unloaded", "b": "ready"}


def test_pinned_models_stay_whoever_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.serve.pool._PATIENCE_S", 0.0)
    server = start(Member(Made("a"), is_pinned=True), *(Member(Made(name)) for name in "bc"))
    until(lambda: server.states()["a"] == "ready")
    for name in "bcbc":
        assert server.ask(name).status_code == 200
    assert server.pool.members[0].loads == 1
    assert server.pool.members[1].loads == 2


@pytest.mark.parametrize("asked", [4, pytest.param(38, marks=pytest.mark.long)])
def test_eight_models_in_room_for_two_answer_eight_clients(
    start: Start, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most requests are for a few of the models; nobody is left out or waits for ever."""
    monkeypatch.setattr("edgespec.serve.pool._PATIENCE_S", 0.2)
    names = "abcdefgh"
    server = start(*(Member(Made(name)) for name in names), room=2 * SIZE)

    def client(seed: int) -> list[tuple[str, str]]:
        chance = random.Random(seed)
        found = []
        for _ in range(asked):
            name = chance.choice(names[:3] if chance.random() < 0.7 else names)
            answer = server.ask(name, max_tokens=8)
            found.append((name, answer.json()["choices"][0]["message"]["content"]))
        return found

    with ThreadPoolExecutor(8) as pool:
        told = [one for each in pool.map(client, range(8)) for one in each]
    assert len(told) == 8 * asked
    assert all(text == f"I am {name}."[:8] for name, text in told)
    assert all(max(one.others, default=0) <= 1 for one in server.models.values())
