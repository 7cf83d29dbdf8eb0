"""How an answer is sent."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.serve.parsing import (
    ApiError,
    Fields,
    Limits,
    Output,
    parse_output,
)


def taken(**values: Any) -> Output:
    fields = Fields(values)
    found = Output(**parse_output(fields, Limits(choices=3)))
    fields.end()
    return found


def test_streams_have_options_of_their_own() -> None:
    assert taken() == Output()
    assert taken(stream_options={"include_usage": True, "usage": True}) == Output(usage=True)
    told = {"include_usage": True, "include_sources": True, "include_obfuscation": True}
    assert taken(stream=True, n=3, stream_options=told) == Output(
        choices=3, streams=True, usage=True, sources=True
    )


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
