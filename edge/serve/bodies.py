"""From the bytes of a request to JSON that is safe to look at."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from edgespec.serve.api_error import ApiError
from edgespec.serve.fields import shown
from edgespec.serve.limits import Limits

# By their names in Content-Encoding, with zlib's number of each format's header.
_GZIP, _ZLIB, _NO_HEADER = 31, 15, -15
_ENCODINGS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}


class LargeBodies:
    """Bodies with images, of which a few are held at once. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._count = limits, 0

    @contextmanager
    def admits(self) -> Iterator[Callable[[int], None]]:
        """A check of how large a body is so far, until its document is not needed any more.

        The check raises ApiError where others are held.
        """
        is_large = False

        def check(size: int) -> None:
            nonlocal is_large
            if is_large or size <= self._limits.body_bytes:
                return
            if self._count >= self._limits.image_bodies:
                raise ApiError(
                    f"{self._count} other requests with images are being read: try again soon",
                    status=503,
                    code="too_many_images",
                )
            is_large = True
            self._count += 1

        try:
            yield check
        finally:
            self._count -= is_large


def read_json(
    body: bytes | bytearray, limits: Limits, encoding: str = "", most: int | None = None
) -> Any:
    """The document of a body. Raises ApiError for anything else.

    `encoding` is the request's Content-Encoding, `most` bytes are what it may have without.
    Halves of surrogate pairs, which no UTF-8 has, become U+FFFD.
    """
    most = most or limits.body_bytes
    try:
        text = _decompressed(body, encoding.strip().lower(), most).decode("utf-8")
        document = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as problem:
        raise ApiError(f"the body is not UTF-8: {problem.reason}") from problem
    except RecursionError as problem:
        raise ApiError(f"the body is nested deeper than {limits.json_depth}") from problem
    except ValueError as problem:  # digits beyond what Python converts are told this way, too
        raise ApiError(f"the body is no JSON: {str(problem)[:100]}") from problem
    return _plain(document, limits.json_depth)


def _decompressed(body: bytes | bytearray, encoding: str, most: int) -> bytes | bytearray:
    """The body without its encoding, of at most `most` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding not in _ENCODINGS:
        raise ApiError(
            f"the content encoding {shown(encoding)} is not supported, only gzip and deflate",
            status=415,
            code="unsupported_encoding",
        )
    header = _ENCODINGS[encoding]
    if header == _ZLIB and not _has_zlib_header(body):  # as some clients send it
        header = _NO_HEADER
    part = zlib.decompressobj(header)
    try:
        data = part.decompress(body, most + 1)
    except zlib.error as problem:
        raise ApiError(f"the body is not {encoding}") from problem
    if len(data) > most:
        raise ApiError(f"the body has more than {most} bytes", status=413)
    if not part.eof or part.unused_data:
        where = "after" if part.eof else "before"
        raise ApiError(f"the body ends {where} its {encoding} data does")
    return data


def _has_zlib_header(body: bytes | bytearray) -> bool:
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(f"the body is no JSON: {name} is no number")


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _encodable(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise ApiError("the body is nested too deep")
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    return {_encodable(name): _plain(item, depth - 1) for name, item in value.items()}


def _encodable(text: str) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
