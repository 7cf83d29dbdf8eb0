"""Bodies as they are sent: compressed ones are read within the limit, or refused by name."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib

import httpx
import pytest
from queue_cases import CHAT, HELLO
from serving_cases import Serve, Speaker

from edgespec.serve.parsing import ApiError, Limits, read_json

BODY = json.dumps(HELLO).encode()


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),  # as some clients send it
        ("identity", BODY),
    ],
    ids=["gzip", "capitals", "deflate", "raw deflate", "identity"],
)
def test_compressed_bodies_are_read(serve: Serve, encoding: str, data: bytes) -> None:
    headers = {"content-encoding": encoding}
    answer = httpx.post(serve(Speaker()) + CHAT, content=data, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"


@pytest.mark.parametrize(
    ("encoding", "data", "status", "words"),
    [
        ("zstd", b"(\xb5/\xfd", 415, 'encoding "zstd" is not supported, only gzip and deflate'),
        ("gzip, gzip", gzip.compress(BODY), 415, '"gzip, gzip" is not supported'),
        ("gzip", BODY, 400, "the body is not gzip"),
        ("gzip", gzip.compress(BODY)[:-9], 400, "ends before its gzip data does"),
        ("gzip", gzip.compress(b"") * 9, 400, "ends after its gzip data does"),
        ("gzip", gzip.compress(b" " * 1001), 413, "more than 1000 bytes"),
        ("deflate", zlib.compress(bytes(1 << 20)), 413, "more than 1000 bytes"),
        ("gzip", b"", 400, "ends before"),
    ],
    ids=["zstd", "twice", "no gzip", "cut", "several", "large", "larger", "empty"],
)
def test_what_cannot_be_decompressed_is_refused(
    encoding: str, data: bytes, status: int, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read_json(data, Limits(body_bytes=1000), encoding)
    assert caught.value.status == status


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_beyond_all_others_is_refused(number: str) -> None:
    """A response tells fields of its request, and JSON has no infinity."""
    with pytest.raises(ApiError, match=f"a number that is too large: {number}"):
        read_json(f'{{"metadata": {{"a": {number}}}}}'.encode(), Limits())
    assert read_json(b'{"a": 1e300}', Limits()) == {"a": 1e300}


def test_a_byte_order_mark_is_passed_by() -> None:
    """Programs on Windows write one before UTF-8."""
    assert read_json(b"\xef\xbb\xbf" + BODY, Limits()) == read_json(BODY, Limits())
    with pytest.raises(ApiError, match="the body is no JSON"):
        read_json(b"\xef\xbb\xbf" * 2 + BODY, Limits())


def test_a_body_that_grows_without_bound_is_not_unpacked() -> None:
    """256 MiB are in these 256 KiB; a body of 4 MiB may have four GiB in it."""
    made = zlib.compressobj(9)
    bomb = b"".join(made.compress(bytes(1 << 20)) for _ in range(256)) + made.flush()
    tracemalloc.start()
    with pytest.raises(ApiError, match="more than 4194304 bytes"):
        read_json(bomb, Limits(), "deflate")
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
