"""Arguments of calls in the notations of models, and back from clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.serve.answer_reader import call_of
from edgespec.serve.call_arguments import (
    JsonRepair,
    gemma_arguments,
    json_text,
    parse_argument,
    python_calls,
)
from edgespec.serve.chat import object_or_text

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
    assert parse_argument(text, schema, whole) == value


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
    assert parse_argument("[" * 9000, {"type": "array"}, {}) == "[" * 9000


SLIPS = [
    ('{"p": "a",}', '{"p": "a"}'),
    ('{"p": [1, 2, ], }', '{"p": [1, 2 ] }'),
    ('{,"p": 1,, "q": 2}', '{"p": 1, "q": 2}'),
    ('{"p": True, "q": None, "r": False}', '{"p": true, "q": null, "r": false}'),
    ('{"p": "a", "q": }', '{"p": "a", "q": null}'),
    ('{"q": , "p": 1}', '{"q": null, "p": 1}'),
    ('{"n": 1_000, "m": 007, "x": .5, "y": 5.}', '{"n": 1000, "m": 7, "x": 0.5, "y": 5.0}'),
    ('{"n": NaN, "m": -Infinity, "x": 1e999}', '{"n": null, "m": null, "x": null}'),
    ('{"x": 1e5, "n": 12345678901234567890}', '{"x": 1e5, "n": 12345678901234567890}'),
    ('{"p": "two\nlines\t"}', '{"p": "two\\nlines\\t"}'),
    (r"""{"p": "it\'s \d C:\dir \\ \u00e9"}""", r"""{"p": "it's \\d C:\\dir \\ \u00e9"}"""),
    (r'{"p": "\ud83d\ude00 \ud83d \ude00"}', '{"p": "\\ud83d\\ude00 \ufffd \ufffd"}'),
    (r'{"p": "\u12"}', r'{"p": "\\u12"}'),
    ('{"p": "True, NaN, ,}"}', '{"p": "True, NaN, ,}"}'),
    ('{"p": "\ud800"}', '{"p": "\ufffd"}'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "mended_text"), SLIPS)
def test_slips_of_models_are_repaired_however_they_come(text: str, mended_text: str) -> None:
    assert isinstance(json.loads(mended_text), dict)
    assert JsonRepair().push(text, is_last=True) == mended_text
    repair = JsonRepair()
    assert "".join([*map(repair.push, text), repair.push("", is_last=True)]) == mended_text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)


@given(VALUES, st.booleans(), st.integers(1, 5))
def test_json_stays_as_it_is(value: Any, ascii_alone: bool, size: int) -> None:
    text, repair = json.dumps(value, ensure_ascii=ascii_alone), JsonRepair()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert "".join([*map(repair.push, pieces), repair.push("", is_last=True)]) == text


def test_what_cannot_be_repaired_is_no_whole_call() -> None:
    for text in ('{"a": <b>}', "{'a': 1}", "[1]", "hm", '{"a": 1'):
        assert not call_of("f", text).is_whole and call_of("f", text).arguments == text
    assert call_of("f", {"a": float("nan")}).arguments == '{"a": null}'
    assert call_of("f", None).arguments == call_of("f", "").arguments == "{}"
    assert json_text({"a": "\ud800é"}).isascii()


@pytest.mark.parametrize("text", ['"hello"', '{"a": 1', "NaN", '{"a": "\\ud800"}', "[1]", "hm"])
def test_what_is_no_object_comes_back_as_the_text_it_is(text: str) -> None:
    assert object_or_text(text) == text


def test_objects_and_their_texts_come_back_as_objects() -> None:
    for value in ({"a": 1}, '{"a": 1}'):
        assert object_or_text(value) == {"a": 1}
    assert object_or_text("") == object_or_text(None) == {}
    assert object_or_text(7) == "7"
