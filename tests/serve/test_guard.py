"""Who may use a server: keys, origins, host names, sizes."""

from __future__ import annotations

import logging
import re
import socket
from typing import Any

import httpx
import pytest
from serving_cases import ConnectAnthropic, Serve, Speaker
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from waiting import PATIENCE_S, until

from edgespec.decode.engine import Engine
from edgespec.serve.parsing import Limits
from edgespec.serve.server import Server

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
    wanted = "authorization, content-type, x-stainless-os, x-stainless-retry-count"
    before = {
        **good,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    asked = httpx.options(named + CHAT, headers=before)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://good.example"
    assert asked.headers["access-control-allow-headers"] == wanted
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert httpx.options(named + CHAT, headers={**before, **evil}).status_code == 403
    refused = httpx.post(named + CHAT, json=HELLO, headers=good)
    assert refused.status_code == 401  # and the page may read why
    assert refused.headers["access-control-allow-origin"] == "https://good.example"
    assert httpx.post(named + CHAT, json=HELLO, headers=evil).status_code == 403


NAMES = [
    ("rebound.example", 403),
    ("localhost.rebound.example", 403),
    ("", 403),
    ("localhost:PORT", 200),
    ("LocalHost:PORT", 200),
    ("localhost.", 200),
    ("localhost.:PORT", 200),
    ("127.0.0.1", 200),
    ("[::1]:PORT", 200),
    ("host.docker.internal:PORT", 200),
    ("Host.Docker.Internal.", 200),
]


def test_a_name_that_leads_here_from_outside_is_refused_unless_named(serve: Serve) -> None:
    address = serve(Speaker(), hosts=("HOST.docker.internal",))
    port = address.rpartition(":")[2]
    for host, status in NAMES:
        headers = {"host": host.replace("PORT", port)}
        assert httpx.get(f"{address}/health", headers=headers).status_code == status, host
    assert (
        status_of(port, "GET http://LocalHost/v1/models HTTP/1.1", "Host: rebound.example") == 200
    )
    assert status_of(port, "GET http://rebound.example/health HTTP/1.1", "Host: localhost") == 403
    whole = f"GET http://user@localhost:{port}/health?a=b HTTP/1.1"
    assert status_of(port, whole, "Host: localhost") == 200
    anyone = serve(Speaker(), hosts=("*",))
    assert httpx.get(f"{anyone}/health", headers={"host": "a.example"}).status_code == 200


def status_of(port: str, *lines: str) -> int:
    """The status of a request that is sent as it is."""
    with socket.create_connection(("127.0.0.1", int(port)), timeout=PATIENCE_S) as opened:
        opened.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        return int(opened.makefile("rb").readline().split()[1])


def test_slashes_too_many_change_no_path(serve: Serve) -> None:
    address = serve(Speaker(), keys=("k",))
    key = {"x-api-key": "k"}
    for path in ("/v1/models/", "//v1/models", "/v1/models/edgespec/", "/health/", "//"):
        assert httpx.get(address + path, headers=key).status_code == 200, path
    assert httpx.post(f"{address}{CHAT}/", json=HELLO, headers=key).status_code == 200
    assert httpx.get(f"{address}/v1/models/").status_code == 401


def test_a_mounted_application_knows_its_own_paths() -> None:
    """And answers, without keys, only by names of this machine and those it was given."""
    with Engine(Speaker()) as engine, Server(engine) as server:
        mounted = Starlette(routes=[Mount("/llm", app=server.app(["inner.example"]))])
        with TestClient(mounted, base_url="http://inner.example") as client:
            for path in ("/llm/", "/llm/health", "/llm/v1/models/"):
                assert client.get(path).status_code == 200
            refused = client.get("/llm/health", headers={"host": "rebound.example"})
            assert refused.status_code == 403
    with Engine(Speaker()) as engine, Server(engine, keys=["k"]) as server:
        mounted = Starlette(routes=[Mount("/llm", app=server.app())])
        with TestClient(mounted, base_url="http://inner.example") as client:
            paths = ("/llm/health", "/llm/v1/models", "/llm/health/../v1/models")
            assert [client.get(path).status_code for path in paths] == [200, 401, 401]


def test_a_request_is_logged_by_its_id_and_nothing_of_its_inside(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    address = serve(Speaker(), keys=("right-key",))
    private = {"x-api-key": "right-key", "x-private": "private-header"}
    body = {"messages": [{"role": "user", "content": "private prompt"}]}
    asked = httpx.post(f"{address}{CHAT}?private=query", json=body, headers=private)
    until(lambda: CHAT in caplog.text)
    (line,) = [one for one in caplog.records if CHAT in one.getMessage()]
    assert line.levelno == logging.INFO and line.name == "edgespec.serve"
    assert re.fullmatch(
        rf"{asked.headers['x-request-id']} POST {CHAT} 200 \d+ ms", line.getMessage()
    )
    refused = httpx.get(f"{address}/a%0ab%1b[0m", headers={"x-api-key": "wrong-key"})
    until(lambda: "401" in caplog.text)
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.getMessage().startswith(f"{refused.headers['x-request-id']} GET /a")
    assert warning.getMessage().endswith(" from 127.0.0.1")
    assert "\n" not in warning.getMessage() and "\x1b" not in warning.getMessage()
    for secret in ("right-key", "wrong-key", "private"):
        assert secret not in caplog.text


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


def test_health_is_asked_by_http_1_0_without_a_host(serve: Serve) -> None:
    """As HAProxy does; no browser sends a request without a name, and other paths need one."""
    address = httpx.URL(serve(Speaker()))
    for path, status in (("/health", b"200"), ("/v1/models", b"403")):
        with socket.create_connection((address.host, address.port or 0)) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert connection.recv(12).split()[1] == status


def test_a_request_has_its_name_in_both_headers(
    serve: Serve, anthropic_client: ConnectAnthropic
) -> None:
    made = anthropic_client(serve(Speaker("Hi"))).messages.create(
        model="edgespec", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
    )
    assert made._request_id is not None and made._request_id.startswith("req_")
