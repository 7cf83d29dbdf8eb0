"""Last blocks and assistants in files of their own (`mtp-`): plans, memory, and what is refused.

How they follow a model is compared in `test_head`, with heads of other kinds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma4_gguf import (
    GEMMA4,
    Heads,
    write_gemma4,
)
from head_cases import ASSISTED, BLOCKS, INSIDE, Files, opened, written
from hybrid_gguf import Shape, write_hybrid
from random_gguf import F32, Q8_0

import edgespec
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.models.pairing import heads_for
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

NAMES = (*BLOCKS, ASSISTED)
TEXT = list(b"to be or not to be, that is the question: to be or not to be; ")
ROUNDING = 0.006 * 2**20  # of a line of llama.cpp's log; caches may have two


@pytest.fixture(params=NAMES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return written(tmp_path, request.param, Q8_0, 0.02)


def loaded(files: Files, **changes: Any) -> Engine:
    values = {"context_size": 512, "draft_max": 3, "threads": 1, "kernels": "off", **changes}
    return edgespec.load(files.model, draft_model=files.head, **values)


def plan_of(model: Path, **changes: Any) -> Plan:
    request = Request(context_size=512, draft_max=3, kernels="off", threads=1, **changes)
    return make_run_plan(read_model_spec(model), request)


@pytest.mark.parametrize("arch", INSIDE)
def test_a_block_drafts_the_same_in_either_file(arch: str, tmp_path: Path) -> None:
    """Bit by bit: the same weights, of the model with its head and of their parts."""
    inside = Files(write_hybrid(tmp_path / "whole.gguf", INSIDE[arch], F32))
    beside = written(tmp_path, f"{arch} beside it", F32)
    rows = []
    for files in (inside, beside):
        backend = opened(files)
        backend.prefill(TEXT)
        assert backend.head is not None
        rows.append([backend.head.begin(7).copy(), backend.head.go_on(9).copy()])
        backend.close()
    assert np.array_equal(rows[0], rows[1])


def test_an_engine_loads_a_head_beside_its_model(files: Files, cache_folder: Path) -> None:
    """Answers and turns of a session are those of plain decoding."""
    answers, texts = [], ("to be or", "and then?")
    for options in ({"draft_model": files.head, "drafter": "suffix,head"}, {"drafter": "none"}):
        asked: dict[str, Any] = {"context_size": 512, "threads": 1, **options}
        with edgespec.load(files.model, **asked) as engine:
            session = edgespec.Session(engine)
            answers.append([session.send(text, max_tokens=30).token_ids for text in texts])
    assert answers[0] == answers[1]


def test_a_plan_has_what_is_allocated(files: Files, cache_folder: Path) -> None:
    """Within 0.1% and the two decimals of llama.cpp's log."""
    plan = plan_of(files.model, draft_model=files.head, drafter="suffix,head")
    planned = plan.component_bytes
    with loaded(files, drafter="suffix,head") as engine:
        engine.generate(TEXT, max_tokens=20)
        assert isinstance(engine.drafter, CombinedDrafter)
        found = engine.drafter.memory_bytes() | engine.backend.memory_bytes()
    for name in ("kv_cache", "compute", "head_kv_cache", "head_compute", "head_rows"):
        close = pytest.approx(planned.get(name, 0), rel=1e-3, abs=2 * ROUNDING)
        assert found.get(name, 0) == close, name
    weights = sum(planned.get(f"head_weights{end}", 0) for end in ("", "_repacked"))
    there = sum(found.get(f"head_weights{end}", 0) for end in ("", "_repacked"))
    assert there == pytest.approx(weights, rel=1e-3, abs=2 * ROUNDING)
    assert found["head_logits"] == planned["head_logits"]


def test_a_head_is_tried_where_it_was_named(files: Files, cache_folder: Path) -> None:
    """And offered where it lies beside its model."""
    plan = plan_of(files.model, draft_model=files.head)
    assert plan.drafter == "suffix,head" and plan.draft_model == files.head
    assert "head_weights" in plan.component_bytes
    offered = plan_of(files.model)
    (choice,) = (one for one in offered.choices if one.name == "head")
    assert choice.value == "not used" and f"--draft-model {files.head}" in choice.reason
    assert list(heads_for(read_model_spec(files.model))) == [(files.head, "")]


def test_a_head_is_no_model(files: Files) -> None:
    assert files.head is not None
    with pytest.raises(ModelFileError, match="a draft head") as caught:
        read_model_spec(files.head)
    assert "--draft-model" in caught.value.hint


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


QWEN_4B = Shape("qwen35", 32, 2560, 9216, 248_320, 16, 4, 256, 128, 32, 16, 4, 4, predicting=1)
