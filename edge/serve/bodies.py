"""From the bytes of a request to JSON that is safe to look at."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal


def read_json(body: bytes, limits: Limits) -> Any:
    """The document of a body. Raises Refusal for anything else.

    Halves of surrogate pairs, which no UTF-8 has, become U+FFFD.
    """
    try:
        text = body.decode("utf-8")
        document = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as problem:
        raise Refusal(f"the body is not UTF-8: {problem.reason}") from problem
    except RecursionError as problem:
        raise Refusal(f"the body is nested deeper than {limits.json_depth}") from problem
    except ValueError as problem:  # digits beyond what Python converts are told this way, too
        raise Refusal(f"the body is no JSON: {str(problem)[:100]}") from problem
    return _plain(document, limits.json_depth)


def depth_and_parts(document: Any) -> tuple[int, int]:
    """How deep a document is nested, and how many objects and lists it has."""
    depth = parts = 0
    level = [document]
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict | list):
                parts += 1
                inner += one.values() if isinstance(one, dict) else one
        depth += 1
        level = inner
    return depth, parts


def _refuse_constant(name: str) -> NoReturn:
    raise Refusal(f"the body is no JSON: {name} is no number")


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else _encodable(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise Refusal("the body is nested too deep")
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    return {_encodable(name): _plain(item, depth - 1) for name, item in value.items()}


def _encodable(text: str) -> str:
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
