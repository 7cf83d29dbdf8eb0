"""Who may use a server: keys, origins, host names, sizes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving_cases import Serve, Speaker

from edgespec.serve.limits import Limits

HELLO: Any = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic right"}, 401),
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "right"}, 200),
    ],
)
def test_a_key_is_asked_for(serve: Serve, headers: dict[str, str], status: int) -> None:
    address = serve(Speaker(), keys=("right", "other"))
    assert httpx.post(address + CHAT, json=HELLO, headers=headers).status_code == status
    assert httpx.get(f"{address}/v1/models", headers=headers).status_code == status
    assert httpx.get(f"{address}/health").status_code == 200


def test_pages_of_other_origins_are_refused_unless_named(serve: Serve) -> None:
    address = serve(Speaker())
    evil = {"origin": "https://evil.example"}
    assert httpx.post(address + CHAT, json=HELLO, headers=evil).status_code == 403
    assert httpx.options(address + CHAT, headers=evil).status_code == 403
    own = {"origin": address}
    response = httpx.post(address + CHAT, json=HELLO, headers=own)
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers

    named = serve(Speaker(), origins=("https://good.example",), keys=("k",))
    good = {"origin": "https://good.example"}
    asked = httpx.options(named + CHAT, headers=good)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "https://good.example"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    refused = httpx.post(named + CHAT, json=HELLO, headers=good)
    assert refused.status_code == 401  # and the page may read why
    assert refused.headers["access-control-allow-origin"] == "https://good.example"
    assert httpx.post(named + CHAT, json=HELLO, headers=evil).status_code == 403


def test_a_name_that_leads_here_from_outside_is_refused(serve: Serve) -> None:
    address = serve(Speaker())
    port = address.rpartition(":")[2]
    for host, status in (("rebound.example", 403), (f"localhost:{port}", 200), ("127.0.0.1", 200)):
        assert httpx.get(f"{address}/health", headers={"host": host}).status_code == status


def test_large_bodies_are_refused_before_they_are_read(serve: Serve) -> None:
    address = serve(Speaker(), limits=Limits(body_bytes=1000))
    response = httpx.post(address + CHAT, content=b"x" * 5000)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_are_told_as_everything_else(serve: Serve) -> None:
    address = serve(Speaker())
    assert httpx.get(f"{address}/v1/files").json()["error"]["code"] == "unknown_path"
    assert httpx.get(address + CHAT).status_code == 405
    assert httpx.post(f"{address}/v1/embeddings", json={}).status_code in (404, 501)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"a":' * 70 + b"1" + b"}" * 70,
        b'{"temperature": 1' + b"0" * 5000 + b', "messages": []}',
        b'{"model": "\\ud800", "messages": []}',
    ],
)
def test_what_is_no_request_is_refused(serve: Serve, body: bytes) -> None:
    response = httpx.post(serve(Speaker()) + CHAT, content=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]
