"""Early-exit drafters: the file, its way back to the target's ids, and lossless drafting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import INF, Frozen, free_drafts
from random_gguf import F32, IDS, Q4_0, Q8_0, VOCABULARY, floats, write_model, write_untrained

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.early_exit import EmbeddingTable, ExitBackend
from edgespec.decode.engine import Engine
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.proposal import StepContext
from edgespec.errors import BackendError, EdgespecError, ModelFileError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.early_exit import read_exit
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.onnx.weights import raw_rows
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler
from edgespec.setup.loading import open_draft_model

SETTINGS = RunConfig(context_size=256, batch_size=16, max_nodes=8, max_leaves=1)
TEXT = [3, 200, 7, 101, 55, 8]


@pytest.fixture(
    params=[
        pytest.param(("llama", Q4_0), id="llama"),
        pytest.param(("qwen2", Q8_0), id="qwen2", marks=pytest.mark.long),
    ]
)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "target.gguf", *request.param))


@pytest.fixture
def drafter(target: ModelSpec, tmp_path: Path) -> ModelSpec:
    return write_untrained(target, tmp_path / "exit.gguf", 2)


@pytest.fixture
def backend(target: ModelSpec, drafter: ModelSpec) -> Iterator[LlamaBackend]:
    made = open_draft_model(drafter, target, SETTINGS)
    yield made
    made.close()


def test_another_target_is_refused(drafter: ModelSpec, tmp_path: Path) -> None:
    other = read_model_spec(write_model(tmp_path / "other.gguf", drafter.arch, Q4_0, seed=6))
    with pytest.raises(UnsupportedError, match=r"exit\.gguf is an early exit of target\.gguf"):
        check_pair(other, drafter)


def test_a_copy_of_the_target_is_accepted(
    target: ModelSpec, drafter: ModelSpec, tmp_path: Path
) -> None:
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(target.path.read_bytes())
    check_pair(read_model_spec(copy), drafter)


@pytest.mark.parametrize("kind", [F32, Q4_0])
def test_embeddings_fed_equal_tokens_fed(kind: Any, tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "llama", kind))
    rows = []
    table = EmbeddingTable(spec)
    for embed in (None, table):
        model = LlamaBackend(spec.path, SETTINGS, embed=embed)
        model.prefill(TEXT)
        rows.append(model.verify(DraftTree.chain(TEXT[:3])).copy())
        model.close()
    table.close()
    assert np.array_equal(rows[0], rows[1])


def test_an_exit_is_fed_the_targets_embeddings(
    backend: LlamaBackend, target: ModelSpec, drafter: ModelSpec
) -> None:
    assert isinstance(backend, ExitBackend)
    text = [int(token) for token in IDS[[5, 80, 33, 21]]]
    ours = backend.verify(DraftTree.chain(text)).copy()
    table = EmbeddingTable(target)
    plain = LlamaBackend(drafter.path, SETTINGS, embed=table)
    assert np.array_equal(ours, plain.verify(DraftTree.chain(text)))
    assert ours.shape == (4, len(IDS))
    plain.close()
    table.close()


def test_what_is_drafted_are_the_targets_tokens_of_the_best_rows(
    backend: LlamaBackend, target: ModelSpec, drafter: ModelSpec
) -> None:
    best = int(IDS[backend.verify(DraftTree.chain(TEXT))[-1].argmax()])
    backend.truncate(0)
    curve = Frozen([INF, *[1.0] * 8])
    model = ModelDrafter(backend, curve, target.vocab_size, early_exit=read_exit(drafter))
    model.begin(TEXT)
    assert model.propose(StepContext(1, 0.0, curve, depth=6, branches=False)).tokens == [best]
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), target.vocab_size)
    for _ in range(30):
        model.begin(TEXT)
        drawn = model.propose(StepContext(1, 0.0, curve, depth=6, branches=False, sampler=sampler))
        assert set(drawn.tokens) <= set(IDS.tolist())
        (distribution,) = drawn.distributions
        assert distribution is not None and len(distribution) == target.vocab_size
        assert np.delete(distribution, IDS).sum() == 0.0


def test_tokens_without_a_row_are_read_all_the_same(backend: LlamaBackend) -> None:
    backend.prefill([101])
    first = backend.verify(DraftTree.chain([4])).copy()
    backend.truncate(0)
    backend.prefill([103])
    assert not np.array_equal(first, backend.verify(DraftTree.chain([4])))


def test_embeddings_are_the_rows_of_the_table(target: ModelSpec) -> None:
    table = EmbeddingTable(target)
    expected = floats(target, "token_embd.weight")
    for tokens in ([1, 2, 3], [3, 4, 1], [9, 9, 2], list(range(20)), []):
        assert np.array_equal(table(tokens), expected[tokens])
    table.close()


def test_a_drafter_that_cannot_be_loaded_keeps_no_file_open(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EmbeddingTable] = []
    init = EmbeddingTable.__init__

    def noted(table: EmbeddingTable, spec: ModelSpec) -> None:
        made.append(table)
        init(table, spec)

    monkeypatch.setattr(EmbeddingTable, "__init__", noted)
    with pytest.raises(EdgespecError):
        ExitBackend(str(tmp_path / "missing.gguf"), SETTINGS, target)
    assert made[0]._file.closed


def test_a_table_that_has_become_shorter_is_an_error(target: ModelSpec, tmp_path: Path) -> None:
    """And no row is left as the memory was."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(target.path.read_bytes())
    spec = read_model_spec(copy)
    table, tensor = EmbeddingTable(spec), spec.tensors["token_embd.weight"]
    row_bytes = tensor.data_bytes // tensor.dims[1]
    os.truncate(copy, tensor.offset + 5 * row_bytes - 1)
    assert np.array_equal(table([0, 3]), floats(target, "token_embd.weight")[[0, 3]])
    for token in (4, 5):
        with pytest.raises(BackendError, match="has become shorter"):
            table([0, token])
    with pytest.raises(ModelFileError, match="has become shorter"):
        raw_rows(copy, tensor)
    table.close()


def test_drafting_needs_no_package_beside_llama_cpp(target: ModelSpec, drafter: ModelSpec) -> None:
    """Not gguf, which reads weights elsewhere."""
    program = (
        "import sys; sys.modules['gguf'] = None\n"
        "import edgespec\n"
        "from edgespec.measure import timing\n"
        "from edgespec.setup import loading\n"
        "timing._LOOK_SECONDS, loading._CURVE_SECONDS = 0.0, 0.1\n"
        f"engine = edgespec.load({str(target.path)!r}, context_size=256, backend='llamacpp',\n"
        f"    draft_model={str(drafter.path)!r})\n"
        "engine.generate([3, 200, 7], max_tokens=4)\n"
        "engine.close()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_drafting_is_lossless(
    target: ModelSpec, tmp_path: Path, exit_layer: int, temperature: float
) -> None:
    """Greedy text is the plain one; drawn drafts leave no trace of the tokens without a row."""
    drafter = write_untrained(target, tmp_path / "exit.gguf", exit_layer)
    draft = open_draft_model(drafter, target, SETTINGS)
    info = read_exit(drafter)
    curve = Frozen([INF, *[0.01] * 8])
    model = ModelDrafter(draft, curve, target.vocab_size, early_exit=info)
    engine = Engine(
        LlamaBackend(target.path, SETTINGS),
        curve=free_drafts(8),
        drafter=CombinedDrafter([model]),
    )
    sampling = SamplingParams(temperature=temperature, seed=1)
    drafted = engine.generate(TEXT, max_tokens=64, sampling=sampling)
    plain = engine.generate(TEXT, max_tokens=64, sampling=sampling, speculate=False)
    assert drafted.counters.drafted_tokens > 0
    if temperature == 0.0:
        assert drafted.token_ids == plain.token_ids
    if exit_layer == 3:
        assert drafted.counters.accepted_tokens > 0
    engine.close()
    draft.close()


def test_a_drafter_is_loaded_by_its_path(target: ModelSpec, drafter: ModelSpec) -> None:
    with edgespec.load(
        target.path, context_size=256, threads=1, backend="llamacpp", draft_model=drafter.path
    ) as engine:
        assert engine.drafter is not None and "model" in engine.drafter.name
        assert len(engine.generate(TEXT, max_tokens=8).token_ids) <= 8


def test_an_exit_after_all_blocks_but_the_last_is_the_target(
    target: ModelSpec, tmp_path: Path
) -> None:
    """Its adapter is the target's last block in 8 bits, so nearly all drafts are right."""
    drafter = write_untrained(target, tmp_path / "e.gguf", 3, np.arange(VOCABULARY, dtype=np.int32))
    model = open_draft_model(drafter, target, SETTINGS)
    reference = LlamaBackend(target.path, SETTINGS)
    ours, theirs = (made.verify(DraftTree.chain(TEXT)) for made in (model, reference))
    assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9996
    model.close()
    reference.close()


def test_a_plan_counts_the_drafter(target: ModelSpec, drafter: ModelSpec) -> None:
    from edgespec.memory.plan.plan import Request
    from edgespec.setup.planning import make_run_plan

    plan = make_run_plan(target, Request(draft_model=drafter.path, backend="llamacpp"))
    names = {part.name for part in plan.components}
    assert {"draft_weights", "draft_kv_cache", "drafter_tables"} <= names
    assert read_gguf(drafter.path).file_bytes < target.file_bytes
