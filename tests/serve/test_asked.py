"""How an answer is sent, and which model is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.serve.asked import Output, take_model, take_output
from edgespec.serve.fields import Fields
from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal


def taken(**values: Any) -> Output:
    fields = Fields(values)
    found = take_output(fields, Limits(choices=3))
    fields.end()
    return found


def test_streams_have_options_of_their_own() -> None:
    assert taken() == Output()
    told = {"include_usage": True, "include_sources": True, "include_obfuscation": False}
    assert taken(stream=True, n=3, stream_options=told) == Output(3, True, True, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage is not"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation is not supported with true",
        ),
        ({"n": 4}, "n must be 1 to 3, not 4"),
    ],
)
def test_what_cannot_be_sent(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as caught:
        taken(**values)
    assert str(caught.value).startswith(words)


def test_a_model_may_have_several_names_and_no_other() -> None:
    names = ("tiny", "edgespec")
    for asked in ({}, {"model": "tiny"}, {"model": "edgespec"}, {"model": None}):
        take_model(Fields(asked), names)
    with pytest.raises(Refusal, match=r'there is no model "gpt" here, only tiny') as caught:
        take_model(Fields({"model": "gpt"}), names)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
