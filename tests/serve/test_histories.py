"""Whose earlier texts draft for a request of the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving_cases import TEMPLATE, Gated, Serve, Speaker

from edgespec.decode.engine import Engine
from edgespec.serve.access import CACHE_SALT
from edgespec.serve.service import Prompts

ASKED: Any = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}


@pytest.fixture
def histories(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of the generations that servers begin."""
    found: list[str] = []
    stream = Engine.stream

    def noted(self: Engine, prompt: Any, options: Any = None, **changes: Any) -> Any:
        found.append(options.history)
        return stream(self, prompt, options, **changes)

    monkeypatch.setattr(Engine, "stream", noted)
    return found


def ask(address: str, **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx.post(f"{address}/v1/chat/completions", json=ASKED, headers=named)
    assert response.status_code == 200


def test_each_key_has_a_history_which_does_not_tell_the_key(
    serve: Serve, histories: list[str]
) -> None:
    address = serve(Speaker(), keys=("first key", "second key"))
    ask(address, authorization="Bearer first key")
    ask(address, x_api_key="second key")
    ask(address, x_api_key="first key")
    one, other = histories[0], histories[2]
    assert histories == [one, one, other, other, one, one]
    assert one != other and "" not in (one, other)
    assert not any("key" in history for history in histories)


def test_without_keys_all_share_one_whatever_clients_send(
    serve: Serve, histories: list[str]
) -> None:
    address = serve(Speaker())
    ask(address)
    ask(address, authorization="Bearer anything")
    assert set(histories) == {""}


def test_a_request_cannot_name_a_history(serve: Serve, histories: list[str]) -> None:
    address = serve(Speaker())
    response = httpx.post(f"{address}/v1/chat/completions", json={**ASKED, "history": "another's"})
    assert set(histories) <= {""}, response.text


def cached(address: str, key: str, **more: Any) -> int:
    """Tokens of a prompt that were in the cache."""
    body = {"messages": [{"role": "user", "content": "a secret word"}], "max_tokens": 3, **more}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_with_two_keys_no_one_finds_in_the_cache_what_another_wrote(serve: Serve) -> None:
    address = serve(Speaker(), keys=("first", "second"))
    assert [cached(address, key) for key in ("first", "second")] == [0, 0]
    backend = Gated(users=4)
    backend.gate.set()
    several = serve(backend, keys=("first", "second"))
    keys = ("first", "second", "second", "first")
    assert [cached(several, key) > 0 for key in keys] == [False, False, True, True]


def test_those_who_share_a_key_share_the_cache(serve: Serve) -> None:
    address = serve(Speaker(), keys=("only",))
    assert [cached(address, "only") > 0 for _ in range(2)] == [False, True]


def test_ids_of_what_a_key_was_told_are_its_own(serve: Serve) -> None:
    """Answers keep the ids that the model wrote, which another text of them may not have."""
    with Engine(Speaker(), chat_template=TEMPLATE) as engine:
        prompts = Prompts(engine)
        result = engine.generate([7, 8], max_tokens=3)
        prompts.learn("ab", [7, 8], result, "first")
        token = CACHE_SALT.set("second")
        assert prompts.ids_of("ab") == [*b"ab"]
        CACHE_SALT.set("first")
        assert prompts.ids_of("ab") == [7, 8]
        CACHE_SALT.reset(token)
