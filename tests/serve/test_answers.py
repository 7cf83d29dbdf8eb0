"""Streams that are left, queues that are full, readers that are slow."""

from __future__ import annotations

import socket
import threading
import time

import httpx
from queue_cases import CHAT, HELLO, generations
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S, until

from edgespec.serve.parsing import Limits


def connection(address: str, body: bytes, *headers: str) -> socket.socket:
    """One that has sent a request."""
    host, port = address.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    head = ["POST /v1/chat/completions HTTP/1.1", f"Host: {host}:{port}", *headers]
    opened.sendall(("\r\n".join([*head, f"Content-Length: {len(body)}"]) + "\r\n\r\n").encode())
    opened.sendall(body)
    return opened


def test_a_closed_connection_ends_its_generation_within_a_step(serve: Serve) -> None:
    backend = Speaker(loops=True)
    address = serve(backend)
    with httpx.stream("POST", address + CHAT, json={**HELLO, "stream": True}) as response:
        next(response.iter_lines())
        backend.gate.clear()
    time.sleep(1.0)  # until the server knows
    made = backend.steps_made
    backend.gate.set()
    assert httpx.post(address + CHAT, json={**HELLO, "max_tokens": 1}).status_code == 200
    assert backend.steps_made <= made + 1


def test_one_that_is_not_streamed_ends_as_well(serve: Serve) -> None:
    backend = Speaker(loops=True)
    address = serve(backend)
    backend.gate.clear()
    opened = connection(address, b'{"messages":[{"role":"user","content":"Hi"}]}')
    until(lambda: generations(address) == 1)
    opened.close()
    time.sleep(1.0)  # until the server knows
    backend.gate.set()
    assert httpx.post(address + CHAT, json={**HELLO, "max_tokens": 1}).status_code == 200
    assert backend.steps_made <= 1


def test_a_slow_reader_slows_nobody_else(serve: Serve) -> None:
    address = serve(Speaker(loops=True))
    body = b'{"messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":2000}'
    with connection(address, body):  # and never reads
        quick = httpx.post(address + CHAT, json={**HELLO, "max_tokens": 3}, timeout=PATIENCE_S)
        assert quick.json()["choices"][0]["message"]["content"] == "Hel"


def test_a_client_that_sends_a_byte_at_a_time_is_let_go(serve: Serve) -> None:
    address = serve(Speaker(), limits=Limits(header_s=0.3, body_s=0.3))
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as opened:
        began = time.monotonic()
        try:
            for byte in b"POST /v1/chat/completions HTTP/1.1\r\nHost: a":
                opened.sendall(bytes([byte]))
                time.sleep(0.05)
            assert opened.recv(1) == b""
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert time.monotonic() - began < 3
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as opened:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 99\r\n\r\n{{"
        )
        opened.sendall(head.encode())
        assert b" 408 " in opened.recv(100)


def test_a_server_that_is_closed_ends_its_answers(serve: Serve) -> None:
    """The fixture checks that no thread is left."""
    backend = Speaker(loops=True)
    address = serve(backend)
    backend.gate.clear()
    threading.Thread(target=lambda: _ignored(address), daemon=True).start()
    until(lambda: generations(address) == 1)


def _ignored(address: str) -> None:
    try:
        httpx.post(address + CHAT, json=HELLO, timeout=PATIENCE_S)
    except httpx.HTTPError:
        pass


def lines_of(address: str, seen: list[str], **more: object) -> None:
    body = {**HELLO, "stream": True, "max_tokens": 3, **more}
    with httpx.stream("POST", address + CHAT, json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            seen.append(line)


def test_headers_and_a_comment_come_while_a_prompt_is_read(serve: Serve) -> None:
    """Of one that is read and of one that waits for its turn."""
    backend = Speaker()
    address = serve(backend, limits=Limits(comment_s=0.05))
    backend.gate.clear()
    several: list[list[str]] = [[], []]
    threads = [threading.Thread(target=lines_of, args=(address, seen)) for seen in several]
    for thread in threads:
        thread.start()
    for seen in several:
        until(lambda seen=seen: seen.count(": waiting") >= 3)  # type: ignore[misc]
        assert '"role":"assistant"' in seen[0]
    backend.gate.set()
    for thread in threads:
        thread.join()
    for seen in several:
        assert "".join(seen).count('"finish_reason":"length"') == 1
        assert seen[-2:] == ["data: [DONE]", ""]
