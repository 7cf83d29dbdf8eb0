"""Other models of a plan: what is refused before a file is read, and what drawn drafts take."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning_cases import SPEC

from edgespec.errors import UnsupportedError
from edgespec.memory.plan.plan import Request
from edgespec.setup.planning import draft_rows_bytes, draft_spec_of, switch_spec_of


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(drafter="model"), "the drafter 'model' needs a draft model"),
        (Request(drafter="suffix,head", backend="onnx"), "ONNX Runtime runs no heads"),
        (Request(drafter="suffix,head"), "tiny"),
    ],
)
def test_drafters_that_this_model_cannot_have(request_: Request, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        draft_spec_of(SPEC, request_)
    assert caught.value.hint


def test_without_a_name_there_is_no_other_model() -> None:
    assert draft_spec_of(SPEC, Request()) is None
    assert draft_spec_of(SPEC, Request(drafter="suffix,recycling")) is None
    assert switch_spec_of(SPEC, Request()) is None


def test_texts_of_two_models_are_not_remembered() -> None:
    with pytest.raises(UnsupportedError, match="--remember keeps what one model writes"):
        switch_spec_of(SPEC, Request(switch=Path("small.gguf"), remember=True))


def test_laws_of_drawn_drafts_are_planned() -> None:
    """Of 8 nodes, in 4 bytes a token and the target's in 8; tables draw nothing."""
    assert draft_rows_bytes(SPEC, None, "suffix,recycling") == 0
    assert draft_rows_bytes(SPEC, None, "suffix,head") == 8 * SPEC.vocab_size * 12
