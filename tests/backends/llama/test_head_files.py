"""Heads in files of their own: plans, memory, sessions, and what is refused.

How they follow a model and how they draft is compared in `test_head`, for all kinds.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_gguf import DFlash, write_dflash
from eagle3_gguf import LAYERS, write_eagle
from eagle3_gguf import Head as Eagle
from head_cases import ASSISTED, BESIDE, BLOCKS, EVEN, INSIDE, Files, opened, plan_of, written
from hybrid_gguf import Shape, write_hybrid
from random_gguf import F32, Q8_0

import edgespec
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.head import BlockHead
from edgespec.backends.llama.hidden_rows import LayerRows
from edgespec.drafting.combined import CombinedDrafter
from edgespec.errors import BackendError, DoesNotFitError, ModelFileError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.heads import check_head
from edgespec.models.pairing import heads_for
from edgespec.models.spec import read_model_spec

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("cache_folder")]

SHAPE = Shape("llama", interval=1)
TEXT = list(b"to be or not to be, that is the question: to be or not to be; ")
ROUNDING = 0.006 * 2**20  # of a line of llama.cpp's log; caches may have two


@pytest.fixture(params=BESIDE)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return written(tmp_path, request.param, Q8_0, 0.02)


def written_for(folder: Path, made: Eagle | DFlash) -> tuple[Path, Path]:
    """A target, and a head of this make."""
    model = write_hybrid(folder / "model.gguf", SHAPE)
    if isinstance(made, DFlash):
        return model, write_dflash(folder / "dflash-model.gguf", model, SHAPE, made)
    return model, write_eagle(folder / "eagle3-model.gguf", model, SHAPE, made)


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


def test_a_dflash_block_is_drafted_by_one_step(tmp_path: Path) -> None:
    """Its rows do not depend on what is drafted; what comes next begins where the text ends."""
    with closing(opened(written(tmp_path, "dflash for llama", Q8_0))) as backend:
        backend.prefill(TEXT)
        head = backend.head
        assert isinstance(head, BlockHead) and head.block == 4
        rows = [head.begin(7).copy(), *(head.go_on(token).copy() for token in (1, 2, 3))]
        again = [head.begin(7).copy(), *(head.go_on(token).copy() for token in (9, 8, 7))]
        assert len(rows) == head.block and np.array_equal(rows, again)
        assert head.length == len(TEXT) and head.num_unread == 0


def test_a_dflash_block_sees_all_of_itself_where_its_file_does_not_say(tmp_path: Path) -> None:
    rows = []
    for said in (False, None):
        (folder := tmp_path / str(said)).mkdir()
        with closing(opened(Files(*written_for(folder, DFlash(is_causal=said))))) as backend:
            backend.prefill(TEXT)
            assert backend.head is not None
            rows.append(backend.head.begin(7).copy())
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize(
    ("name", "exact"),
    [*((one, False) for one in BESIDE), ("llama's own tables", True), ("dflash for llama", True)],
)
def test_sessions_and_long_prompts(tmp_path: Path, name: str, exact: bool) -> None:
    """Turns and prompts of several batches are written as without a head."""
    files = written(tmp_path, name, Q8_0, 0.02)
    texts = ["to be or not to be " * 40, "and then?", "64 pears " * 9]
    answers = []
    kinds: list[dict[str, Any]] = [
        {"draft_model": files.head, "drafter": "suffix,head"},
        {"drafter": "none"},
    ]
    for changes in kinds:
        with edgespec.load(
            files.model, context_size=2048, threads=1, exact=exact, **changes
        ) as engine:
            session = edgespec.Session(engine)
            answers.append([session.send(text, max_tokens=30).token_ids for text in texts])
    assert answers[0] == answers[1]


def test_a_plan_has_what_is_allocated(files: Files) -> None:
    """Within 0.1% and the two decimals of llama.cpp's log."""
    plan = plan_of(files.model, draft_model=files.head, drafter="suffix,head")
    planned = plan.component_bytes
    with edgespec.load(
        files.model,
        context_size=512,
        draft_max=3,
        threads=1,
        kernels="off",
        draft_model=files.head,
        drafter="suffix,head",
    ) as engine:
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


def test_a_head_is_tried_where_it_was_named(files: Files) -> None:
    """And offered where it lies beside its model."""
    plan = plan_of(files.model, draft_model=files.head)
    assert plan.drafter == "suffix,head" and plan.draft_model == files.head
    assert "head_weights" in plan.component_bytes
    offered = plan_of(files.model)
    (choice,) = (one for one in offered.choices if one.name == "head")
    assert choice.value == "not used" and f"--draft-model {files.head}" in choice.reason
    assert offered.draft_model is None and "head_rows" not in offered.component_bytes
    assert list(heads_for(read_model_spec(files.model))) == [(files.head, "")]


def test_a_head_that_was_named_is_not_left_unused(tmp_path: Path) -> None:
    model, head = written_for(tmp_path, Eagle())
    with pytest.raises(UnsupportedError, match="not used by --drafter suffix,model") as caught:
        plan_of(model, draft_model=head, drafter="suffix,model")
    assert "'head'" in caught.value.hint
    with pytest.raises(UnsupportedError, match="not used by --drafter head"):
        plan_of(model, draft_model=model, drafter="head")


def test_a_budget_holds_with_a_head(tmp_path: Path) -> None:
    """What does not fit is refused where the head was asked for, and left out where it was not."""
    model, head = written_for(tmp_path, Eagle())
    asked: dict[str, Any] = {"draft_model": head, "drafter": "suffix,head"}
    needed = plan_of(model, **asked).predicted_peak_bytes
    assert plan_of(model, **asked, budget_bytes=needed).predicted_peak_bytes <= needed
    least = plan_of(model, drafter="suffix").predicted_peak_bytes
    assert least < needed
    with pytest.raises(DoesNotFitError):
        plan_of(model, **asked, budget_bytes=least // 2)
    left_out = plan_of(model, draft_model=head, budget_bytes=least)
    assert left_out.drafter == "suffix" and left_out.predicted_peak_bytes <= least


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_read_by_name_is_what_llama_cpp_hands_out(tmp_path: Path, threads: int) -> None:
    """In every step, also in those of several batches."""
    model, found = write_hybrid(tmp_path / "model.gguf", SHAPE), list[Any]()
    for read in ((), LAYERS):
        settings = RunConfig(256, 8, 24, 1, threads, captured_layers=read)
        with closing(LlamaContext(settings)) as context:
            context.open(str(model), None, lambda _params: None)
            rows, batch = LayerRows(context, LAYERS), Batch(context.lib, 32, 1, None, context.width)
            start = 0
            for count in (5, 1, 8, 24, 2):
                batch.put(0, range(40, 40 + count))
                batch.positions[:count] = range(start, start + count)
                batch.ids[:count, 0] = 0
                context.decode(batch, count)
                found.append(np.empty((count, rows.width), np.float32))
                rows.copy(0, found[-1])
                start += count
            if read:
                with pytest.raises(BackendError, match="layer 1 takes in"):
                    rows.copy(1, np.empty((2, rows.width), np.float32))
    for ours, theirs in zip(found[:5], found[5:], strict=True):
        assert np.array_equal(ours, theirs)


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("shape", "made", "problem"),
    [
        (replace(SHAPE, width=96), Eagle(), "reads 64 values a layer, and the model has 96"),
        (replace(SHAPE, width=96), DFlash(), "reads 64 values a layer, and the model has 96"),
        (replace(SHAPE, layers=2), Eagle(), "layers 1, 2, 3 of a model that has 2"),
        (replace(SHAPE, layers=2), DFlash(), "layers 1, 3 of a model that has 2"),
        (replace(SHAPE, vocabulary=300), Eagle(), "made for 258 tokens, and the model has 300"),
        (replace(SHAPE, vocabulary=300), DFlash(), "made for 258 tokens, and the model has 300"),
        (Shape("glm4moe", interval=1), Eagle(), "glm4moe models do not hand out"),
        (Shape("glm4moe", interval=1), DFlash(), "glm4moe models do not hand out"),
        (SHAPE, Eagle(layers=(1, 2)), "reads 2 layers"),
        (SHAPE, Eagle(width=96, has_output=False), "no table of its own"),
    ],
)
def test_wrong_pairs_are_refused(
    tmp_path: Path, shape: Shape, made: Eagle | DFlash, problem: str
) -> None:
    """In one sentence, before anything is loaded."""
    _, head = written_for(tmp_path, made)
    other = write_hybrid(tmp_path / "other.gguf", shape, Q8_0)
    with pytest.raises(UnsupportedError, match=problem) as caught:
        plan_of(other, draft_model=head)
    assert "trained for this model" in caught.value.hint


@pytest.mark.parametrize(
    ("made", "key", "problem"),
    [
        (Eagle(), b"eagle3.target_layers", "which layers"),
        (DFlash(), b"ggml.mask_token_id", "which token is its mask"),
    ],
)
def test_a_head_that_does_not_say_what_it_needs_is_no_head(
    tmp_path: Path, made: Eagle | DFlash, key: bytes, problem: str
) -> None:
    model, head = written_for(tmp_path, made)
    head.write_bytes(head.read_bytes().replace(key, key[:-1] + b"z"))
    with pytest.raises(ModelFileError, match=problem):
        plan_of(model, draft_model=head)


def test_later_kinds_of_dflash_are_refused(tmp_path: Path) -> None:
    """Which llama.cpp drives in other ways."""
    model, head = (read_model_spec(one, heads=True) for one in written_for(tmp_path, DFlash()))
    check_head(model, head)
    later = replace(head, tensors={**head.tensors, "markov_w1.weight": head.tensors["fc.weight"]})
    with pytest.raises(UnsupportedError, match="DSpark"):
        check_head(model, later)
    with pytest.raises(UnsupportedError, match="a sliding window"):
        check_head(model, replace(head, is_sliding=(True, False)))


def test_a_file_says_what_a_head_reads(tmp_path: Path) -> None:
    _, head = written_for(tmp_path, Eagle(ids=EVEN, keeps_normed=False))
    spec = read_model_spec(head, heads=True)
    assert spec.reads is not None and spec.reads.layers == (1, 2, 3)
    assert spec.reads.width == 64
    assert spec.vocab_size == 258 and np.prod(spec.tensors["d2t"].dims) == len(EVEN)


@pytest.mark.parametrize("name", [*BLOCKS, ASSISTED])
def test_a_head_is_no_model(name: str, tmp_path: Path) -> None:
    head = written(tmp_path, name, Q8_0).head
    assert head is not None
    with pytest.raises(ModelFileError, match="a draft head") as caught:
        read_model_spec(head)
    assert "--draft-model" in caught.value.hint
