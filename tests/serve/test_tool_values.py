"""Arguments of calls in the notations of models, and back from clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.serve.tools import (
    gemma_arguments,
    json_text,
    mended,
    object_or_text,
    python_calls,
    tidied,
    typed,
)

TYPED: list[tuple[str, Any, Any]] = [
    ("12", {"type": "string"}, "12"),
    ("12", {"type": "integer"}, 12),
    ("null", {"type": ["string", "null"]}, None),
    ("True", {"type": "boolean"}, True),
    ('["a"]', {"type": "array"}, ["a"]),
    ("{'a': [1, True, None]}", {"type": "object"}, {"a": [1, True, None]}),
    ("{'a': ", {"type": "object"}, "{'a': "),
    ("12", {"enum": ["12", "13"]}, "12"),
    ("12", {"$ref": "#/$defs/text"}, "12"),
    ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12"),
    ("12", {"$ref": "#/$defs/loop"}, 12),
    ("12", True, 12),
    ("a b", {}, "a b"),
    ("{", {}, "{"),
]


@pytest.mark.parametrize(("text", "schema", "value"), TYPED)
def test_a_text_becomes_what_the_tools_schema_says(text: str, schema: Any, value: Any) -> None:
    whole = {"$defs": {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert typed(text, schema, whole) == value


PYTHON: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("[f()]", [("f", {})]),
    ("[f(a=1, b='x')]", [("f", {"a": 1, "b": "x"})]),
    ('f(a="it\'s", b=-1.5e3)', [("f", {"a": "it's", "b": -1500.0})]),
    ("[f(a=[1, (]))", []),
    ("[f(a={'b': None, \"c\": true}), g.h(x=[])]",
     [("f", {"a": {"b": None, "c": True}}), ("g.h", {"x": []})]),
    ("[f(a='two\nlines')]", [("f", {"a": "two\nlines"})]),
    ("[f(a=__import__('os'))]", []),
    ("[f(1)]", []),
    ("[1, 2]", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls"), PYTHON)
def test_pythons_notation_is_read_and_never_run(
    text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    if calls:
        assert python_calls(text) == calls
    else:
        with pytest.raises(ValueError):
            python_calls(text)


def test_gemmas_notation() -> None:
    text = '{a:<|"|>x, "y" }<|"|>,b:{c:[true,<|"|><|"|>,1.5]},d:null}'
    assert gemma_arguments(text) == {"a": 'x, "y" }', "b": {"c": [True, "", 1.5]}, "d": None}


@given(st.text(alphabet="f(a=[{'\"1,: \\)}]<|x", max_size=60))
def test_what_is_no_notation_is_a_value_error(text: str) -> None:
    for read in (python_calls, gemma_arguments):
        try:
            read(text)
        except ValueError:
            pass


def test_deep_values_are_refused() -> None:
    with pytest.raises(ValueError):
        python_calls("[f(a=" + "[" * 9000 + ")]")
    assert typed("[" * 9000, {"type": "array"}, {}) == "[" * 9000


def test_texts_that_json_cannot_say_are_passed_on_as_they_are() -> None:
    assert tidied('{"a": NaN}') == '{"a": NaN}'
    assert tidied('{"a": <b>}') == '{"a": <b>}'
    assert json.loads(tidied('{"a": "two\nlines"}')) == {"a": "two\nlines"}
    assert tidied(" ") == "{}"
    assert json_text({"a": "\ud800é"}).isascii()


def test_arguments_may_be_whole_where_what_is_around_them_is_not() -> None:
    fields = ("name", "arguments")
    assert mended('{"name": "f", "arguments": {"a": 1}', fields) == ("f", '{"a": 1}', True)
    assert mended('{"name": "f", "arguments": {"a": 1', fields) == ("f", '{"a": 1', False)
    assert mended('{"name": "f"', fields) == ("f", "", False)
    assert mended('{"nam', fields) is None


@pytest.mark.parametrize("text", ['"hello"', '{"a": 1', "NaN", '{"a": "\\ud800"}', "[1]", "hm"])
def test_what_is_no_object_comes_back_as_the_text_it_is(text: str) -> None:
    assert object_or_text(text) == text


def test_objects_and_their_texts_come_back_as_objects() -> None:
    for value in ({"a": 1}, '{"a": 1}'):
        assert object_or_text(value) == {"a": 1}
    assert object_or_text("") == object_or_text(None) == {}
    assert object_or_text(7) == "7"
