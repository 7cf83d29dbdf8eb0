"""Schemas that would take the engine's time are refused before they are grammars."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal
from edgespec.serve.schemas import schema_text


@pytest.mark.parametrize(
    "pattern",
    [
        "^[a-z]+@[a-z]+[.][a-z]{2,}$",
        "^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
        "^[a-z ]{1,800}$",
        "^" + "a?" * 64 + "$",
        "^((a?){6}){8}$",
    ],
)
def test_usual_patterns_are_taken(pattern: str) -> None:
    assert pattern in schema_text({"type": "string", "pattern": pattern}, "schema", Limits())


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"pattern": "^" + "a?" * 65 + "$"}, "more than 64 parts of any number"),
        ({"pattern": "^((a?){10}){10}$"}, "more than 64 parts of any number"),
        ({"items": {"pattern": "a{9999}"}}, "repeats a part more than 1000 times"),
        ({"maxItems": 1001}, "repeats a part more than 1000 times"),
        ({"description": "x" * 70_000}, "65536 are the limit"),
    ],
)
def test_what_takes_too_long_is_refused(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refusal, match=problem):
        schema_text(schema, "schema", Limits())
