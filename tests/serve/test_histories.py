"""Whose earlier texts draft for a request of the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving_cases import Serve, Speaker

from edgespec.decode.engine import Engine

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
