"""Values of wrong types, which users of the Python interface give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.errors import UnsupportedError


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("SamplingParams", {"seed": "7"}, "seed must be a whole number or None, not '7'"),
        ("SamplingParams", {"temperature": None}, "temperature must be a number, not None"),
        ("SamplingParams", {"samplers": "top_k"}, "samplers must be a list of texts, not one text"),
        ("SamplingParams", {"logit_bias": {"5": 1}}, "logit_bias must be a mapping or a list of"),
        ("LoadOptions", {"context_size": "1024"}, "context_size must be a whole number or None, "),
        ("LoadOptions", {"budget_bytes": "400MiB"}, "budget_bytes must be a whole number or None"),
        ("LoadOptions", {"threads": 2.0}, "threads must be a whole number or None, not 2.0"),
        ("LoadOptions", {"workers": "a:1"}, "workers must be a list of texts, not one text"),
        ("LoadOptions", {"draft_model": 3}, "draft_model must be a text or a path or None, not 3"),
        ("LoadOptions", {"exact": "no"}, "exact must be True or False, not 'no'"),
        ("LoadOptions", {"users": True}, "users must be a whole number or None, not True"),
        ("GenerationOptions", {"max_tokens": "5"}, "max_tokens must be a whole number, not '5'"),
        ("GenerationOptions", {"sampling": {}}, "sampling must be SamplingParams or None, not {}"),
        ("GenerationOptions", {"stop": [1]}, r"stop must be a list of texts, not \[1\]"),
        ("GenerationOptions", {"grammar": b"x"}, "grammar must be a text or None, not b'x'"),
    ],
)
def test_a_wrong_type_is_told_by_name_and_value(
    kind: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"^{told}"):
        getattr(edgespec, kind)(**values)


def test_keywords_of_load_and_plan_are_told_before_anything_is_read() -> None:
    with pytest.raises(UnsupportedError, match="context_size must be a whole number"):
        edgespec.plan(context_size="1024")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="budget_bytes must be a whole number"):
        edgespec.load(budget_bytes="400MiB")  # type: ignore[arg-type]


def test_one_text_is_no_list_of_keys() -> None:
    """Each of its letters would let in; and a key is not shown."""
    with pytest.raises(
        UnsupportedError, match=r"^keys must be a list of texts or None, not one text$"
    ):
        edgespec.Server(None, keys="secret")  # type: ignore[arg-type]


def test_what_stands_for_a_type_is_taken() -> None:
    options = edgespec.LoadOptions(threads=np.int64(2), workers=["a:1"])  # type: ignore[arg-type]
    assert options.threads == 2
    assert edgespec.LoadOptions(lora="a.gguf").lora == ("a.gguf",)
    params = edgespec.SamplingParams(temperature=1, logit_bias={5: 1}, samplers=["top_k"])  # type: ignore[arg-type]
    assert params.logit_bias == ((5, 1.0),) and params.samplers == ("top_k",)
    assert edgespec.GenerationOptions(stop="END").stop == ("END",)
