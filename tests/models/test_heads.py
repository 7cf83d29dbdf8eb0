"""Which head drafts for which model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gemma4_gguf import (
    GEMMA4,
    Heads,
    write_gemma4,
)
from head_cases import ASSISTED, plan_of, written
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q8_0

from edgespec.errors import UnsupportedError

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("model", "head", "problem"),
    [
        (Shape("qwen35", width=96), "qwen35 beside it", "reads 64 values a layer, and the model"),
        (
            Shape("llama", interval=1),
            "qwen35 beside it",
            "of a qwen35 model, and this one is llama",
        ),
        (Shape("qwen35", vocabulary=300), "qwen35 beside it", "for 258 tokens, and the model has"),
        (Shape("qwen35"), ASSISTED, "the cache of a gemma4 model, and this one is qwen35"),
    ],
)
def test_wrong_pairs_are_refused(tmp_path: Path, model: Shape, head: str, problem: str) -> None:
    """In one sentence, before anything is loaded."""
    other = write_hybrid(tmp_path / "other.gguf", model, Q8_0)
    with pytest.raises(UnsupportedError, match=problem) as caught:
        plan_of(other, draft_model=written(tmp_path, head, Q8_0).head)
    assert "trained for this model" in caught.value.hint


@pytest.mark.parametrize(
    ("shape", "heads", "problem"),
    [
        (replace(GEMMA4, kv_heads=2), Heads(), "heads of other sizes"),
        (GEMMA4, Heads(length=32), "heads of other sizes"),
        (replace(GEMMA4, interval=4, layers=5), Heads(), "one that slides and one that does not"),
        (replace(GEMMA4, width=96), Heads(), "reads 64 values a layer, and the model has 96"),
    ],
)
def test_an_assistant_needs_the_cache_that_it_was_made_for(
    tmp_path: Path, shape: Shape, heads: Heads, problem: str
) -> None:
    """llama.cpp would end the process."""
    head = written(tmp_path, ASSISTED, Q8_0).head
    other = write_gemma4(tmp_path / "other.gguf", shape, heads=heads)
    with pytest.raises(UnsupportedError, match=problem):
        plan_of(other, draft_model=head)
