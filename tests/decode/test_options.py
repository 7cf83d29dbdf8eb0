"""What a generation may be told, as one value and as keywords."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend

from edgespec.decode import options as module
from edgespec.decode.engine import Engine
from edgespec.decode.options import GenerationOptions
from edgespec.decode.session import Session
from edgespec.errors import UnsupportedError
from edgespec.sampling.params import SamplingParams


def engine() -> Engine:
    return Engine(FakeBackend(lambda context: [float(i == context[-1]) for i in range(256)], 256))


def test_keywords_are_the_fields() -> None:
    """They are written twice, so that editors and type checkers know the keywords."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    keywords = {
        part.target.id: ast.unparse(part.annotation)
        for part in classes["GenerationKeywords"].body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    assert keywords == {field.name: field.type for field in fields(GenerationOptions)}


def test_options_and_keywords_do_the_same() -> None:
    with engine() as one:
        asked = GenerationOptions(max_tokens=5)
        assert one.generate("a", asked).token_ids == one.generate("a", max_tokens=5).token_ids


def test_keywords_take_the_place_of_options() -> None:
    with engine() as one:
        asked = GenerationOptions(max_tokens=5, raw=True)
        assert len(one.generate("a", asked, max_tokens=3).token_ids) == 3
        assert asked.max_tokens == 5


def test_what_cannot_be_is_refused_when_it_is_said() -> None:
    with pytest.raises(UnsupportedError, match="max_tokens must be at least 1, not 0"):
        GenerationOptions(max_tokens=0)
    with pytest.raises(UnsupportedError, match="logprobs must be at least 0, not -1"):
        GenerationOptions(logprobs=-1)
    with pytest.raises(UnsupportedError, match="one of a grammar"):
        GenerationOptions(grammar="root ::= x", json_schema="{}")
    with engine() as one, pytest.raises(TypeError, match="max_token"):
        one.generate("a", max_token=5)  # type: ignore[call-arg]


def test_fields_of_sampling_are_taken_by_their_names() -> None:
    """As everybody writes them; what was given besides stays."""
    begun = GenerationOptions(sampling=SamplingParams(top_k=5), max_tokens=3)
    asked = GenerationOptions.of(begun, temperature=0.7, seed=2, raw=True)
    assert asked.sampling == SamplingParams(temperature=0.7, seed=2, top_k=5)
    assert (asked.max_tokens, asked.raw) == (3, True)
    assert GenerationOptions.of(None, temperature=0.5).sampling == SamplingParams(temperature=0.5)
    with pytest.raises(TypeError, match="temprature"):
        GenerationOptions.of(None, temprature=0.5)  # type: ignore[call-arg]


class Shape:
    """As a class of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "integer"}


def test_a_schema_is_a_text_a_mapping_or_a_class() -> None:
    for schema in ('{"type": "integer"}', {"type": "integer"}, Shape):
        assert GenerationOptions.of(None, json_schema=schema).json_schema == '{"type": "integer"}'
    for wrong in (5, {"enum": [object()]}, ["text"]):
        with pytest.raises(UnsupportedError, match="json_schema"):
            GenerationOptions(json_schema=wrong)  # type: ignore[arg-type]


def test_a_wrong_keyword_is_the_called_function_s() -> None:
    """It was blamed on SamplingParams, whatever was called."""
    one = engine()
    one.chat_template = "{{ messages[0].content }}"
    wrong: Any = {"max_token": 5}
    for call in (one.generate, one.stream, Session(one).send, Session(one).stream):
        name = call.__name__
        with pytest.raises(TypeError, match=rf"^{name}\(\) got .*'max_token'. .* 'max_tokens'"):
            call("x", **wrong)
