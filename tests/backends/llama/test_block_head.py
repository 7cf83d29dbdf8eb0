"""DFlash heads: their memory, vocabularies and prices, and what cannot be drafted with.

How they follow a model is compared in `test_head`, with heads of other kinds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_gguf import DFlash, write_dflash
from frozen_times import Frozen
from head_cases import assert_planned
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q8_0

import edgespec
from edgespec.backends.llama.head import BackendWithHead, BlockHead
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.model import HeadDrafter, HeadText
from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.models.heads import check_head
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

SHAPE = Shape("llama", interval=1)
EVEN = tuple(range(0, 258, 2))
TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ")


def pair(folder: Path, made: DFlash, arch: str = "llama") -> tuple[Path, Path]:
    """A target whose head is right about the token behind the next one."""
    shape = replace(SHAPE, arch=arch)
    model = write_hybrid(folder / "model.gguf", shape, say=0.002)
    head = write_dflash(folder / "dflash-model.gguf", model, shape, made, knows=True)
    return model, head


def opened(model: Path, head: Path) -> tuple[BackendWithHead, BlockHead]:
    backend = BackendWithHead(model, RunConfig(512, max_nodes=8, gpu_layers=0))
    spec = read_model_spec(head, heads=True)
    made = backend.open_head(lambda one: BlockHead(one, spec, RunConfig(512)))
    assert isinstance(made, BlockHead)
    return backend, made


def plan_of(model: Path, **changes: Any) -> Plan:
    request = Request(context_size=512, draft_max=3, kernels="off", **changes)
    return make_run_plan(read_model_spec(model), request)


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize("made", [DFlash(), DFlash(ids=EVEN), DFlash(has_tables=True, block=16)])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3moe"])
def test_drafts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, made: DFlash
) -> None:
    # A busy machine's rounds take longer than the curve says, and drafts would be given up.
    monkeypatch.setattr("edgespec.decode.step.perf_counter", lambda: 0.0)
    backend, head = opened(*pair(tmp_path, made, arch))
    assert head.block == min(made.block, 8) - 1
    drafter = HeadDrafter(HeadText(head), Frozen([0.0, *[0.01] * 8]), 258)
    engine = Engine(
        backend, curve=Frozen([0.0, *(1 + 0.001 * i for i in range(8))]), drafter=drafter
    )
    plain = engine.generate(TEXT, max_tokens=60, speculate=False).token_ids
    result = engine.generate(TEXT, max_tokens=60)
    assert result.token_ids == plain
    assert result.counters.accepted_tokens > 0
    engine.close()


def test_a_block_is_drafted_by_one_step(tmp_path: Path) -> None:
    """Its rows do not depend on what is drafted; what comes next begins where the text ends."""
    backend, head = opened(*pair(tmp_path, DFlash()))
    backend.prefill(TEXT)
    rows = [head.begin(7).copy(), *(head.go_on(token).copy() for token in (1, 2, 3))]
    again = [head.begin(7).copy(), *(head.go_on(token).copy() for token in (9, 8, 7))]
    assert len(rows) == head.block and np.array_equal(rows, again)
    assert head.length == len(TEXT) and head.num_unread == 0
    backend.close()


@pytest.mark.parametrize(
    "made", [DFlash(), DFlash(ids=EVEN), DFlash(has_tables=True, layers=5, reads=(0, 1, 2, 3))]
)
def test_a_plan_has_what_is_allocated(tmp_path: Path, cache_folder: Path, made: DFlash) -> None:
    """Within 0.1% and the two decimals of llama.cpp's log."""
    model, head = pair(tmp_path, made, "qwen3")
    asked: dict[str, Any] = {"draft_model": head, "drafter": "suffix,head", "threads": 1}
    planned = plan_of(model, **asked).component_bytes
    asked |= {"context_size": 512, "draft_max": 3, "kernels": "off"}
    with edgespec.load(model, **asked) as engine:
        engine.generate(TEXT, max_tokens=20)
        assert isinstance(engine.drafter, CombinedDrafter)
        found = engine.drafter.memory_bytes() | engine.backend.memory_bytes()
    assert_planned(found, planned)


def test_a_head_is_tried_where_it_was_named(tmp_path: Path, cache_folder: Path) -> None:
    model, head = pair(tmp_path, DFlash())
    assert plan_of(model, draft_model=head).drafter == "suffix,head"
    (choice,) = (one for one in plan_of(model).choices if one.name == "head")
    assert f"--draft-model {head}" in choice.reason


@pytest.mark.parametrize("exact", [False, True])
def test_sessions_and_long_prompts(tmp_path: Path, cache_folder: Path, exact: bool) -> None:
    """Turns and prompts of several batches are written as without a head."""
    model, head = pair(tmp_path, DFlash())
    texts = ["to be or not to be " * 40, "and then?", "64 pears " * 9]
    answers = []
    kinds: list[dict[str, Any]] = [
        {"drafter": "suffix,head", "draft_model": head},
        {"drafter": "none"},
    ]
    for changes in kinds:
        with edgespec.load(model, context_size=2048, threads=1, exact=exact, **changes) as engine:
            session = edgespec.Session(engine)
            answers.append([session.send(text, max_tokens=40).token_ids for text in texts])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("shape", "made", "problem"),
    [
        (replace(SHAPE, width=96), DFlash(), "reads 64 values a layer, and the model has 96"),
        (replace(SHAPE, layers=2), DFlash(), "layers 1, 3 of a model that has 2"),
        (replace(SHAPE, vocabulary=300), DFlash(), "made for 258 tokens, and the model has 300"),
        (Shape("glm4moe", interval=1), DFlash(), "glm4moe models do not hand out"),
    ],
)
def test_wrong_pairs_are_refused(tmp_path: Path, shape: Shape, made: DFlash, problem: str) -> None:
    _, head = pair(tmp_path, made)
    other = write_hybrid(tmp_path / "other.gguf", shape, Q8_0)
    with pytest.raises(UnsupportedError, match=problem):
        plan_of(other, draft_model=head)


def test_later_kinds_are_refused(tmp_path: Path) -> None:
    """Which llama.cpp drives in other ways."""
    model, head = (read_model_spec(one, heads=True) for one in pair(tmp_path, DFlash()))
    check_head(model, head)
    later = replace(head, tensors={**head.tensors, "markov_w1.weight": head.tensors["fc.weight"]})
    with pytest.raises(UnsupportedError, match="DSpark"):
        check_head(model, later)
    with pytest.raises(UnsupportedError, match="a sliding window"):
        check_head(model, replace(head, is_sliding=(True, False)))


def test_a_head_without_a_mask_is_refused(tmp_path: Path) -> None:
    model, head = pair(tmp_path, DFlash())
    head.write_bytes(head.read_bytes().replace(b"ggml.mask_token_id", b"ggml.mask_token_ix"))
    with pytest.raises(ModelFileError, match="which token is its mask"):
        plan_of(model, draft_model=head)
