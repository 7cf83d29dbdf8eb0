"""A client of servers: what it is told."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest
from canned_server import CHUNKED, HEAD, event, sending
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_cases import Serve, Speaker

from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.serve import client as module
from edgespec.serve.client import Client, Event


def test_what_is_refused_and_what_is_not_there_is_told(serve: Serve) -> None:
    address = serve(Speaker())
    client = Client(address)
    with pytest.raises(
        UnsupportedError, match="the server refuses: echo must be true or false, not 1"
    ):
        list(client.stream("completions", {"prompt": "a", "echo": 1}))
    with pytest.raises(BackendError, match="there is no server at"):
        list(Client("http://127.0.0.1:1").stream("completions", {"prompt": "a"}))
    for wrong in ("ftp://a", "http://", "http://a:x", "http://[::1", "http://a b\x1b", "a:99999"):
        with pytest.raises(UnsupportedError):
            list(Client(wrong).stream("completions", {}))


# -- servers that are broken, or something else ---------------------------------------------------


def asked(pieces: Iterable[bytes], key: str = "") -> tuple[str, str]:
    """What of an answer comes, and the sentence at its end."""
    text, told = "", ""
    with sending(pieces) as address:
        try:
            for part in Client(address, key).stream("completions", {"prompt": "a"}):
                text += part.text
        except EdgespecError as problem:
            told = str(problem)
            assert told and "\n" not in told and len(told) < 700
    return text, told


BROKEN = {
    "no JSON": ([HEAD, event("Hel"), b"data: {oops\n\n"], "Hel", "it sent what is no answer"),
    "a number": ([HEAD, event("Hel"), b"data: 5\n\n"], "Hel", "it sent what is no answer"),
    "deep JSON": ([HEAD, b"data: " + b"[" * 100_000 + b"\n\n"], "", "it sent what is no answer"),
    "a truncated stream": ([HEAD, event("Hel")], "Hel", "before the answer was complete"),
    "a truncated chunk": ([CHUNKED, b"ff\r\n" + event("Hel")], "Hel", "broke off"),
    "a chunk of no size": ([CHUNKED, b"zz\r\n"], "", "broke off"),
    "HTML": ([HEAD.replace(b"event-stream", b"html"), b"<html>Hi</html>"], "", "but text/html"),
    "nothing": ([HEAD], "", "broke off before"),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.6\r\n"], "", "broke off"),
    "a failure": ([HEAD, event("Hel"), b'data: {"error": {"message": "full"}}\n'], "Hel", "full"),
    "a text as failure": ([HEAD, b'data: {"error": "no"}\n'], "", "the server gave up: no"),
    "a strange failure": ([HEAD, b'data: {"error": [1]}\n'], "", "gave up: without a word"),
    "elsewhere": (
        [b"HTTP/1.1 301 Moved\r\nlocation: http://evil.example/v1\r\n\r\n"],
        "",
        "the server sends elsewhere, to http://evil.example/v1",
    ),
    "many headers": ([b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n"] * 200], "", "more than 100 headers"),
    "a long header": ([b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000], "", "broke off"),
    "a long line": ([HEAD, b"data: ", *[b"x" * 65536] * 17], "", "a line of more than 1048576"),
    "a long error": ([b"HTTP/1.1 500 No\r\n\r\n", b"x" * 100_000], "", "refuses: status 500"),
    "long words": (
        [b'HTTP/1.1 400 No\r\n\r\n{"error": {"message": "' + b"w\\n" * 9999 + b'"}}'],
        "",
        "the server refuses: w w w",
    ),
}


@pytest.mark.parametrize(("pieces", "text", "told"), BROKEN.values(), ids=BROKEN)
def test_a_broken_stream_ends_in_a_sentence(pieces: list[bytes], text: str, told: str) -> None:
    found = asked(pieces)
    assert found[0] == text and told in found[1]


def test_values_of_other_types_are_left_out() -> None:
    odd = (
        b'data: {"choices": [{"delta": {"content": 5}, "finish_reason": 7}], "usage": [1], '
        b'"timings": {"a": "x", "b": 1e999, "c": 2, "d": 1' + b"0" * 400 + b"}}\n\n"
        b'data: {"choices": "x"}\ndata: {"choices": [5]}\ndata: {"choices": [{"delta": []}]}\n'
        b": a comment\n"
    )
    with sending(
        [HEAD, odd, event("Hi", reason="stop", usage={"completion_tokens": 3})]
    ) as address:
        parts = list(Client(address).stream("completions", {}))
    assert parts[0] == Event("", "", {}, {"c": 2})
    assert parts[1:5] == [Event("", "", {}, {})] * 4
    assert parts[5:] == [Event("Hi", "stop", {"completion_tokens": 3}, {})]


def test_answers_without_an_end_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_BYTES", 2000)
    text, told = asked(itertools.chain([HEAD], itertools.repeat(event("a"))))
    assert set(text) == {"a"} and "an answer of more than 2000 bytes" in told


def test_headers_without_an_end_are_limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and so does each "100 Continue"."""
    monkeypatch.setattr(module, "_SILENCE_S", 0.3)

    def slowly(piece: bytes) -> Iterable[bytes]:
        while True:
            time.sleep(0.02)
            yield piece

    for piece in (b"a", b"HTTP/1.1 100 Continue\r\n\r\n"):
        assert "broke off" in asked(slowly(piece))[1]


def test_keys_are_sent_as_they_are_or_refused() -> None:
    assert asked([HEAD, event("Hi", reason="stop")], "schlüssel") == ("Hi", "")
    assert asked([], "a\r\nx-other: b") == ("", "EDGESPEC_API_KEY is no key")


PIECES = st.sampled_from(
    [HEAD, CHUNKED, event("Hi"), b"data: [DONE]\n", b"5\r\n", b"\r\n", b"data:"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES | st.binary(max_size=20), max_size=6))
def test_whatever_a_server_sends_ends(pieces: list[bytes]) -> None:
    asked(pieces)
