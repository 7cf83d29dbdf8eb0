"""What strangers send costs little: bodies, texts, connections and places in queues."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import logging
import re
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pool_cases import SIZE, Made, Start
from queue_cases import CHAT, HELLO, generations
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S, in_thread, join, until

from edgespec.memory.bytes.requests import (
    FORM_BYTES,
    FORM_TOKEN_BYTES,
    guests_bytes,
    requests_bytes,
)
from edgespec.models.chat import TEMPLATE_LIMITS, render_chat
from edgespec.serve import service
from edgespec.serve.parsing import ApiError, Limits, read_json
from edgespec.serve.pool import Member
from edgespec.serve.running import Connections
from edgespec.testing import ByteTokenizer


def opened(address: str, head: str, body: bytes = b"", buffer: int = 0) -> socket.socket:
    """A connection that has sent a request, or a part of one."""
    host, port = address.removeprefix("http://").split(":")
    made = socket.socket()
    if buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(PATIENCE_S)
    made.connect((host, int(port)))
    made.sendall(f"{head}\r\nHost: {host}:{port}\r\n\r\n".encode() + body)
    return made


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["[[[[1]]]]", '{"a":1}', "1", '""'])
def test_values_are_counted_before_any_is_made(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"[{','.join([value] * 999)}]".encode()
    assert len(read_json(body, Limits())) == 999
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ApiError, match="more than 900 values") as caught:
        read_json(body, Limits(values=900))
    assert caught.value.status == 413


@pytest.mark.parametrize("part", ['[{"a": 1}, \\"b\\"], ', '\\\\",[', '"\\,', "\\\\\\,{"])
def test_what_stands_in_texts_is_no_value(part: str) -> None:
    said = {"t": part * 50, "s": part}
    assert read_json(json.dumps(said).encode(), Limits(values=9)) == said
    with pytest.raises(ApiError, match="more than 3 values"):
        read_json(json.dumps(said).encode(), Limits(values=3))


@pytest.mark.parametrize("part", [b'\\",', b"\\,", b'"\\,'])
def test_a_text_without_an_end_is_passed_over_once(part: bytes) -> None:
    """Each quote in it was tried as the first one of a text before: days for 4 MB."""
    with pytest.raises(ApiError):
        read_json(b'{"a":"' + part * (4_000_000 // len(part)), Limits())


def test_few_bytes_that_become_many_values_are_refused(serve: Serve) -> None:
    body = gzip.compress(b'{"m":[' + b",".join([b"[[[[1]]]]"] * 60_000) + b"]}")
    told = httpx.post(serve(Speaker()) + CHAT, content=body, headers={"content-encoding": "gzip"})
    assert told.status_code == 413 and "200000 values" in told.text


def test_large_bodies_of_others_are_held_up_to_a_bound(serve: Serve) -> None:
    address = serve(Speaker(), limits=Limits(body_bytes=100_000, held_bodies=1))
    head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 90001"
    with opened(address, head, b" " * 90_000):
        time.sleep(0.3)
        body = json.dumps({**HELLO, "user": "a" * 80_000})
        told = httpx.post(address + CHAT, content=body)
        assert (told.status_code, told.headers["retry-after"]) == (503, "1")
        assert told.json()["error"]["code"] == "too_many_bodies"
        assert httpx.post(address + CHAT, json=HELLO).status_code == 200
    until(lambda: httpx.post(address + CHAT, content=body).status_code == 200)


@pytest.mark.parametrize(("size", "most"), [(80_000, 2), (1_100_000, 1)])
def test_few_large_bodies_are_read_at_once(
    serve: Serve, size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And small ones beside them."""
    begun, gate = list[str](), threading.Event()

    def slow(template: str, messages: Any, **options: Any) -> str:
        if messages[0]["content"] == "large":
            begun.append("large")
            assert gate.wait(PATIENCE_S)
        return render_chat(template, messages, **options)

    monkeypatch.setattr(service, "render_chat", slow)
    address = serve(Speaker())
    said = [{"role": "user", "content": "large"}]
    body = json.dumps({"messages": said, "user": "a" * size}).encode()
    asked = [
        in_thread(lambda: httpx.post(address + CHAT, content=body, timeout=PATIENCE_S))
        for _ in range(4)
    ]
    until(lambda: len(begun) == most)
    assert httpx.post(address + CHAT, json=HELLO).status_code == 200
    time.sleep(0.2)
    assert len(begun) == most
    gate.set()
    for thread, answers in asked:
        join(thread)
        assert answers[0].status_code == 200


LONG = "a" * 100_000
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": LONG}),
    ("/completion", {"prompt": [[1], LONG]}),
    ("/tokenize", {"content": LONG}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ("/apply-template", {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize(("path", "body"), PATHS, ids=[path for path, _ in PATHS])
def test_a_text_that_never_fits_is_not_tokenized(
    serve: Serve, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, encode = serve(Speaker()), ByteTokenizer.encode

    def short(self: ByteTokenizer, text: str, **options: Any) -> list[int]:
        assert len(text) < len(LONG)
        return encode(self, text, **options)

    monkeypatch.setattr(ByteTokenizer, "encode", short)
    told = httpx.post(address + path, json=body)
    assert told.status_code == 400 and told.json()["error"]["code"] == "context_length_exceeded"


SPREAD: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": [{"role": "user", "content": "a" * 1000}] * 100}),
    (
        "thoughts",
        {
            "messages": [
                *HELLO["messages"],
                {"role": "assistant", "content": "a", "reasoning_content": LONG},
                *HELLO["messages"],
            ]
        },
    ),
    ("variables", {**HELLO, "chat_template_kwargs": {"x": [LONG]}}),
]


@pytest.mark.parametrize(("what", "body"), SPREAD, ids=[what for what, _ in SPREAD])
def test_a_conversation_that_never_fits_is_not_rendered(
    serve: Serve, what: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is spread: the process that renders it has memory for what a context holds."""
    address = serve(Speaker())
    monkeypatch.setattr(service, "render_chat", lambda *_, **__: pytest.fail("rendered"))
    told = httpx.post(address + CHAT, json=body)
    assert told.status_code == 400, what
    assert told.json()["error"]["code"] == "context_length_exceeded"


def test_ids_of_a_text_that_never_fits_are_refused(serve: Serve) -> None:
    told = httpx.post(f"{serve(Speaker())}/detokenize", json={"tokens": [97] * 60_000})
    assert told.status_code == 400 and "text of more than" in told.text


def test_pieces_are_told_as_json(serve: Serve) -> None:
    body = {"content": 'a"\n', "with_pieces": True}
    told = httpx.post(f"{serve(Speaker())}/tokenize", json=body).json()
    assert [one["piece"] for one in told["tokens"]] == ["a", '"', "\n"]


def test_a_plan_has_what_requests_take() -> None:
    assert 48 << 20 < requests_bytes(512) < requests_bytes(2048) < requests_bytes(1 << 20)
    assert requests_bytes(1 << 20) == requests_bytes(1 << 21), "a body is bounded, too"


def test_a_plan_has_what_guests_may_take() -> None:
    templates = guests_bytes(0, 2048)
    assert templates == TEMPLATE_LIMITS.most_bytes(2048 * 256)
    assert guests_bytes(49_152, 2048) - templates == FORM_BYTES + 49_152 * FORM_TOKEN_BYTES
    assert guests_bytes(0, 1 << 20) == TEMPLATE_LIMITS.most_bytes(4 << 20), "as a body is"


# -- queues ----------------------------------------------------------------------------------------


def test_who_finds_the_queue_full_is_told_before_he_sends_a_body(serve: Serve) -> None:
    backend = Speaker()
    address = serve(backend, limits=Limits(waiting=0))
    backend.gate.clear()
    thread, _ = in_thread(lambda: httpx.post(address + CHAT, json=HELLO, timeout=PATIENCE_S))
    until(lambda: generations(address) == 1)
    with opened(address, "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 4000000") as one:
        assert b" 429 " in one.recv(100)
    backend.gate.set()
    join(thread)


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_loads_no_model(start: Start, stream: bool) -> None:
    server = start(*(Member(Made(name)) for name in "ab"), room=SIZE)
    assert server.ask("a").status_code == 200
    told = server.ask("b", temperature="hot", stream=stream)
    assert told.status_code == 400 and "temperature must be a number" in told.text
    assert server.states() == {"a": "ready", "b": "unloaded"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_who_leaves_waits_for_no_model(start: Start, path: str) -> None:
    server = start()
    server.models["a"].gate.clear()
    body = json.dumps({"model": "a", "messages": HELLO["messages"], "prompt": "a", "content": "a"})
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}"
    with opened(server.address, head, body.encode()):
        until(lambda: len(server.pool.members[0].tickets) == 1)
        until(lambda: server.states()["a"] == "loading")
    until(lambda: not server.pool.members[0].tickets)
    server.models["a"].gate.set()
    until(lambda: server.states()["a"] == "ready")
    assert server.pool.members[0].holders == 0


def test_a_request_may_have_a_salt_of_its_own(serve: Serve) -> None:
    address = serve(Speaker())

    def cached(**more: Any) -> int:
        told = httpx.post(address + CHAT, json={**HELLO, "max_tokens": 2, **more}).json()
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt="a") > 0 for _ in range(2)] == [False, True]
    assert cached(cache_salt="b") == 0
    assert httpx.post(address + CHAT, json={**HELLO, "cache_salt": 3}).status_code == 400


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_server_that_stops_says_so(start: Start, path: str) -> None:
    """To whole answers, to streams, and to those who wait for a model."""
    server = start()
    assert server.ask("a").status_code == 200
    server.models["a"].backends[0].gate.clear()
    server.models["b"].gate.clear()
    found: dict[str, httpx.Response] = {}

    def ask(name: str, **more: Any) -> None:
        body = {"messages": HELLO["messages"], "max_tokens": 5, **more}
        found[name] = httpx.post(server.address + path, json=body, timeout=PATIENCE_S)

    asked = [("whole", {}), ("stream", {"stream": True}), ("waits", {"model": "b"})]
    threads = [in_thread(lambda n=n, m=m: ask(n, **m))[0] for n, m in asked]  # type: ignore[misc]
    until(lambda: generations(server.address) == 3)
    ends, _ = in_thread(server.close)
    for thread in threads:
        join(thread)
    server.models["a"].backends[0].gate.set()
    join(ends)
    for name in ("whole", "waits"):
        overloaded = 529 if path == "/v1/messages" else 503  # Anthropic's word for it
        assert found[name].status_code == overloaded
        assert found[name].headers["retry-after"] == "1"
        assert found[name].json()["error"]["message"] == "the server stops"
        assert ("type" in found[name].json()) == (path == "/v1/messages")
    assert found["stream"].status_code == 200 and "the server stops" in found["stream"].text


# -- connections -----------------------------------------------------------------------------------


def test_who_takes_nothing_of_a_whole_answer_is_cut_off(serve: Serve) -> None:
    """What the system has taken over still comes; the answer is more than it holds."""
    speaker = Speaker()
    speaker.context_size = 1 << 20
    address = serve(speaker, limits=Limits(write_s=0.3))
    body = json.dumps({"content": "a" * 500_000, "with_pieces": True}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nContent-Length: {len(body)}"
    with opened(address, head, body, buffer=2048) as one:
        answer = one.recv(1024)
        declared = re.search(rb"content-length: (\d+)", answer)
        time.sleep(1.0)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        while part := one.recv(1 << 20):
            answer += part
    assert declared and len(answer) < int(declared[1])


def test_idle_connections_keep_nobody_out(serve: Serve) -> None:
    address = serve(Speaker(), limits=Limits(connections=4))
    host, port = address.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(12)]
    assert httpx.get(f"{address}/health", timeout=PATIENCE_S).status_code == 200
    for one in idle:
        one.close()


def test_requests_beyond_the_connections_are_told_to_come_again(serve: Serve) -> None:
    address = serve(Speaker(), limits=Limits(connections=1))
    head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9"
    with opened(address, head):
        time.sleep(0.2)
        told = httpx.post(address + CHAT, json=HELLO)
        assert (told.status_code, told.headers["retry-after"]) == (503, "1")
        assert told.json()["error"]["code"] == "too_many_requests"


def test_out_of_descriptors_the_log_has_a_line_and_the_oldest_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connections, ended = Connections(Limits()), list[int]()

    class Open(asyncio.Transport):
        def __init__(self, number: int) -> None:
            self.number = number

        def abort(self) -> None:
            ended.append(self.number)

    for number in range(3):
        connections.add(Open(number))
    loop: Any = SimpleNamespace(default_exception_handler=lambda context: pytest.fail(str(context)))
    problem = OSError(errno.EMFILE, "Too many open files")
    for _ in range(2):
        connections.handle(loop, {"message": "accept", "exception": problem})
    assert ended == [0, 1]
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "Too many open files" in line.getMessage()
