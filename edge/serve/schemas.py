"""Which JSON schemas are turned into grammars: those that do not take the server's time."""

from __future__ import annotations

import json
import re
from typing import Any

from edgespec.serve.bodies import depth_and_parts
from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Of a pattern: what may be left out in a row takes llama.cpp's grammars 1 s a token at 80 of them,
# and 20 s at 160.
_MOST_CHOICES = 64
ANY_OBJECT = '{"type": "object"}'


def schema_text(schema: Any, param: str, limits: Limits) -> str:
    """The text of a schema. Raises Refusal for one that is too large."""
    if not isinstance(schema, dict):
        raise Refusal(f"{param} must be an object", param=param)
    text = json.dumps(schema)
    depth, parts = depth_and_parts(schema)
    for what, found, most in (
        ("bytes", len(text), limits.schema_bytes),
        ("levels", depth, limits.schema_depth),
        ("objects and lists", parts, limits.schema_parts),
    ):
        if found > most:
            raise Refusal(f"{param} has {found} {what}, and {most} are the limit", param=param)
    _check_counts(schema, param, limits.schema_repeats)
    return text


def _check_counts(value: Any, param: str, most: int) -> None:
    """Refuse repetitions that a grammar would have to write out."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict):
            continue
        waiting += one.values()
        counts = [one[name] for name in _COUNTS if isinstance(one.get(name), int | float)]
        pattern = one.get("pattern")
        if isinstance(pattern, str):
            counts.append(_repeats(pattern))
            if _choices(pattern) > _MOST_CHOICES:
                raise Refusal(
                    f"{param} has a pattern with more than {_MOST_CHOICES} parts of any number",
                    param=param,
                )
        if any(count > most for count in counts):
            raise Refusal(f"{param} repeats a part more than {most} times", param=param)


def _choices(pattern: str) -> int:
    """An upper bound of the places where a pattern may go on or not, groups written out."""
    groups = _repeats("".join(re.findall(r"\)(\{[\d,\s]*\})", pattern)))
    return groups * len(re.findall(r"[?*+]|\{\s*\d*\s*,", pattern))


def _repeats(pattern: str) -> int:
    """An upper bound of how often a part of a pattern is repeated."""
    product = 1
    for numbers in re.findall(r"\{([\d,\s]*)\}", pattern):
        product *= max([int(one) for one in re.findall(r"\d{1,9}", numbers)], default=1) or 1
        product = min(product, 1 << 60)
    return product
