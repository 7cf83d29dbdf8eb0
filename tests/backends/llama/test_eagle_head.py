"""EAGLE-3 heads: their memory and vocabularies, and what cannot be drafted with.

How they follow a model is compared in `test_head`, with heads of other kinds.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_gguf import LAYERS, Head, write_eagle
from frozen_times import Frozen
from head_cases import assert_planned
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q8_0

import edgespec
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.head import BackendWithHead, EagleHead
from edgespec.backends.llama.hidden_rows import LayerRows
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.model import HeadDrafter, HeadText
from edgespec.errors import BackendError, DoesNotFitError, ModelFileError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.models.heads import layers_to_read
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

SHAPE = Shape("llama", interval=1)
EVEN = tuple(range(0, 258, 2))
TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ")


def pair(folder: Path, made: Head, *, say: float = 0.002, arch: str = "llama") -> tuple[Path, Path]:
    """A target whose head is often right."""
    shape = replace(SHAPE, arch=arch)
    model = write_hybrid(folder / "model.gguf", shape, say=say)
    head = write_eagle(folder / "eagle3-model.gguf", model, shape, made, knows=say < 0.1)
    return model, head


def loaded(model: Path, head: Path, **changes: Any) -> Engine:
    values = {"context_size": 512, "draft_max": 3, "threads": 1, **changes}
    return edgespec.load(model, draft_model=head, **values)


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize("made", [Head(), Head(ids=EVEN), Head(ids=EVEN, has_table=True)])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_drafts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, made: Head
) -> None:
    """Those of a head that is often right, fewer where it knows every other token alone."""
    # A busy machine's rounds take longer than the curve says, and drafts would be given up.
    monkeypatch.setattr("edgespec.decode.step.perf_counter", lambda: 0.0)
    model, head = pair(tmp_path, made, arch=arch)
    spec, read = read_model_spec(head, heads=True), layers_to_read(read_model_spec(model), LAYERS)
    settings = RunConfig(512, max_nodes=4, gpu_layers=0, captured_layers=read)
    backend = BackendWithHead(model, settings)
    opened = backend.open_head(lambda one: EagleHead(one, spec, RunConfig(512)))
    drafter = HeadDrafter(HeadText(opened), Frozen([0.0, *[0.01] * 8]), 258)
    curve = Frozen([0.0, 1.0, 1.001, 1.002, 1.003])
    engine = Engine(backend, curve=curve, drafter=drafter)
    plain = engine.generate(TEXT, max_tokens=60, speculate=False).token_ids
    result = engine.generate(TEXT, max_tokens=60)
    assert result.token_ids == plain
    least, counters = 0.5 if made.ids is None else 0.1, result.counters
    assert counters.accepted_tokens >= least * counters.drafted_tokens > 0
    drawn = engine.generate(TEXT, max_tokens=60, sampling=SamplingParams(temperature=0.7, seed=1))
    assert len(drawn.token_ids) == 60 and drawn.counters.drafted_tokens > 0
    engine.close()


def test_an_engine_loads_a_head_beside_its_model(tmp_path: Path, cache_folder: Path) -> None:
    model, head = pair(tmp_path, Head(ids=EVEN))
    with loaded(model, head) as engine:
        assert isinstance(engine.drafter, CombinedDrafter)
        assert engine.drafter.name == "suffix,head"
        parts = {"head_weights", "head_kv_cache", "head_compute", "head_rows", "head_logits"}
        assert parts <= set(engine.drafter.memory_bytes())
        answer = engine.generate(TEXT, max_tokens=30)
        again = engine.generate([*TEXT, *answer.token_ids, 5], max_tokens=10, reuse=True)
        assert len(again.token_ids) == 10
    assert len(list(cache_folder.glob("learned/*.json"))) == 1, "how the head did is kept"
    with loaded(model, head, draft_max=0) as engine:
        assert len(engine.generate(TEXT, max_tokens=5).token_ids) == 5


@pytest.mark.parametrize("exact", [False, True])
def test_sessions_and_long_prompts(tmp_path: Path, cache_folder: Path, exact: bool) -> None:
    """Turns and prompts of several batches are written as without a head."""
    model, head = pair(tmp_path, Head())
    texts = ["to be or not to be " * 40, "and then?", "64 pears " * 9]
    answers = []
    for changes in ({"drafter": "suffix,head", "draft_model": head}, {"drafter": "none"}):
        with edgespec.load(model, context_size=2048, threads=1, exact=exact, **changes) as engine:
            session = edgespec.Session(engine)
            answers.append([session.send(text, max_tokens=40).token_ids for text in texts])
    assert answers[0] == answers[1]


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


def plan_of(model: Path, **changes: Any) -> Plan:
    request = Request(context_size=512, draft_max=3, kernels="off", **changes)
    return make_run_plan(read_model_spec(model), request)


@pytest.mark.parametrize(
    "made",
    [
        Head(),
        Head(ids=EVEN, has_output=True),
        Head(has_output=False, keeps_normed=False),
        Head(width=96, has_table=True, norms_before_fc=True),
    ],
)
def test_a_plan_has_what_is_allocated(tmp_path: Path, cache_folder: Path, made: Head) -> None:
    """Within 0.1% and the two decimals of llama.cpp's log."""
    arch = "qwen3moe" if made == Head() else "llama" if made.width is None else "qwen2"
    model, head = pair(tmp_path, made, arch=arch)
    planned = plan_of(model, draft_model=head, drafter="suffix,head", threads=1).component_bytes
    with loaded(model, head, drafter="suffix,head", kernels="off") as engine:
        engine.generate(TEXT, max_tokens=20)
        assert isinstance(engine.drafter, CombinedDrafter)
        found = engine.drafter.memory_bytes() | engine.backend.memory_bytes()
    assert_planned(found, planned)


def test_a_head_is_tried_where_it_was_named(tmp_path: Path, cache_folder: Path) -> None:
    model, head = pair(tmp_path, Head())
    plan = plan_of(model, draft_model=head)
    assert plan.drafter == "suffix,head" and plan.draft_model == head
    assert "head_weights" in plan.component_bytes
    offered = plan_of(model)
    (choice,) = (one for one in offered.choices if one.name == "head")
    assert choice.value == "not used" and f"--draft-model {head}" in choice.reason
    assert offered.draft_model is None and "head_rows" not in offered.component_bytes
    with pytest.raises(UnsupportedError, match="not used by --drafter suffix,model") as caught:
        plan_of(model, draft_model=head, drafter="suffix,model")
    assert "'head'" in caught.value.hint
    with pytest.raises(UnsupportedError, match="not used by --drafter head"):
        plan_of(model, draft_model=model, drafter="head")


def test_a_budget_holds_with_a_head(tmp_path: Path, cache_folder: Path) -> None:
    """What does not fit is refused where the head was asked for, and left out where it was not."""
    model, head = pair(tmp_path, Head())
    asked = {"draft_model": head, "drafter": "suffix,head"}
    needed = plan_of(model, **asked).predicted_peak_bytes
    assert plan_of(model, **asked, budget_bytes=needed).predicted_peak_bytes <= needed
    least = plan_of(model, drafter="suffix").predicted_peak_bytes
    assert least < needed
    with pytest.raises(DoesNotFitError):
        plan_of(model, **asked, budget_bytes=least // 2)
    left_out = plan_of(model, draft_model=head, budget_bytes=least)
    assert left_out.drafter == "suffix" and left_out.predicted_peak_bytes <= least


@pytest.mark.parametrize(
    ("shape", "made", "problem"),
    [
        (replace(SHAPE, width=96), Head(), "reads 64 values a layer, and the model has 96"),
        (replace(SHAPE, layers=2), Head(), "layers 1, 2, 3 of a model that has 2"),
        (replace(SHAPE, vocabulary=300), Head(), "made for 258 tokens, and the model has 300"),
        (Shape("glm4moe", interval=1), Head(), "glm4moe models do not hand out"),
        (SHAPE, Head(layers=(1, 2)), "reads 2 layers"),
        (SHAPE, Head(width=96, has_output=False), "no table of its own"),
    ],
)
def test_wrong_pairs_are_refused(tmp_path: Path, shape: Shape, made: Head, problem: str) -> None:
    """In one sentence, before anything is loaded."""
    _, head = pair(tmp_path, made)
    other = write_hybrid(tmp_path / "other.gguf", shape, Q8_0)
    with pytest.raises(UnsupportedError, match=problem) as caught:
        plan_of(other, draft_model=head)
    assert "trained for this model" in caught.value.hint


def test_a_head_that_does_not_say_what_it_reads_is_no_head(tmp_path: Path) -> None:
    model, head = pair(tmp_path, Head())
    head.write_bytes(head.read_bytes().replace(b"eagle3.target_layers", b"eagle3.target_layerz"))
    with pytest.raises(ModelFileError, match="which layers"):
        plan_of(model, draft_model=head)


def spec_of(head: Path) -> ModelSpec:
    return read_model_spec(head, heads=True)


def test_a_file_says_what_a_head_reads(tmp_path: Path) -> None:
    _, head = pair(tmp_path, Head(ids=EVEN, keeps_normed=False))
    spec = spec_of(head)
    assert spec.reads is not None and spec.reads.layers == (1, 2, 3)
    assert spec.reads.width == 64
    assert spec.vocab_size == 258 and np.prod(spec.tensors["d2t"].dims) == len(EVEN)
