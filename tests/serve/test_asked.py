"""How an answer is sent, and which model is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgespec.serve.parsing import (
    ApiError,
    Defaults,
    Fields,
    Limits,
    Output,
    ServedModel,
    parse_model,
    parse_output,
)


def taken(**values: Any) -> Output:
    fields = Fields(values)
    found = parse_output(fields, Limits(choices=3))
    fields.end()
    return found


def test_streams_have_options_of_their_own() -> None:
    assert taken() == Output()
    assert taken(stream_options={"include_usage": True, "usage": True}) == Output(usage=True)
    told = {"include_usage": True, "include_sources": True, "include_obfuscation": True}
    assert taken(stream=True, n=3, stream_options=told) == Output(3, True, True, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stream": True, "stream_options": True}, "stream_options must be an object"),
        ({"n": 4}, "n must be 1 to 3, not 4"),
    ],
)
def test_what_cannot_be_sent(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        taken(**values)
    assert str(caught.value).startswith(words)


def test_a_model_may_have_several_names_and_no_other() -> None:
    setup = ServedModel(("tiny", "edgespec"), 2048, Defaults(), Limits())
    for asked in ({}, {"model": "tiny"}, {"model": "edgespec"}, {"model": None}):
        parse_model(Fields(asked), setup)
    with pytest.raises(ApiError, match=r'there is no model "gpt" here, only tiny') as caught:
        parse_model(Fields({"model": "gpt"}), setup)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "--any-model" in str(caught.value)
    parse_model(Fields({"model": "gpt"}), replace(setup, any_model=True))
