"""Last blocks and assistants in files of their own (`mtp-`): plans, memory, and what is refused.

How they follow a model is compared in `test_head`, with heads of other kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from head_cases import ASSISTED, BLOCKS, INSIDE, Files, opened, plan_of, written
from hybrid_gguf import write_hybrid
from random_gguf import F32, Q8_0

import edgespec
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.errors import ModelFileError
from edgespec.models.pairing import heads_for
from edgespec.models.spec import read_model_spec

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
