"""What assistants compute with, against llama.cpp's own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gemma4_gguf import (
    ASSISTANT,
    Heads,
    write_hollow_assistant,
    write_hollow_gemma4,
)
from hybrid_gguf import Shape
from planning_cases import compute_bytes

from edgespec.backends.llama.kernels import model_params
from edgespec.backends.llama.library import LOG, library
from edgespec.memory.bytes.footprint import RunShape
from edgespec.memory.bytes.head_footprint import head_file_footprint
from edgespec.models.spec import ModelSpec, read_model_spec

pytestmark = pytest.mark.model


@contextmanager
def contexts_of(specs: tuple[ModelSpec, ModelSpec], batch: int) -> Iterator[list[dict[str, int]]]:
    """What llama.cpp says a model and its head take, by component, with nothing allocated."""
    lib, sizes, other = library(), list[dict[str, int]](), None
    made: list[Any] = []
    models, of_head = [], 1 if specs[1].arch == ASSISTANT.arch else batch
    for spec, tokens in zip(specs, (batch, of_head), strict=True):
        params = model_params()
        params.no_alloc, params.load_mode, params.n_gpu_layers = True, 0, 0
        params.load_mtp = other is not None
        models.append(lib.llama_model_load_from_file(str(spec.path).encode(), params))
        assert models[-1], LOG.problem()
        LOG.clear()
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.ctx_other = 4096, 1, other
        params.ctx_type = int(other is not None)
        params.n_batch, params.n_ubatch = tokens + 8, tokens
        params.n_outputs_max = 1 if other else 8
        params.flash_attn_type, params.kv_unified, params.swa_full = 1, True, False
        other = lib.llama_init_from_model(models[-1], params)
        assert other, LOG.problem()
        made.append(other)
        sizes.append(LOG.buffer_bytes())
    try:
        yield sizes
    finally:
        for context in reversed(made):
            lib.llama_free(context)
        for model in models:
            lib.llama_model_free(model)


GEMMA_31B = Shape("gemma4", 60, 5376, 21_504, 262_144, 32, 4, 512, interval=6)


GEMMA_E4B = Shape("gemma4", 42, 2560, 10_240, 262_144, 8, 2, 512, interval=6)


REAL = {
    "31B": (GEMMA_31B, Heads(256, 16, 1024)),
    "E4B": (GEMMA_E4B, Heads(256, 2, 512, per_layer=256, shared=18)),
}


@pytest.mark.parametrize("batch", [32, 512])
@pytest.mark.parametrize("name", REAL)
def test_assistants_of_real_shapes_take_what_llama_cpp_says(
    name: str, batch: int, tmp_path: Path
) -> None:
    """Within 0.1% and the two decimals of the log, and so does what they look into."""
    shape, heads = REAL[name]
    small = Shape(ASSISTANT.arch, 4, 1024, 4096, shape.vocabulary, 16, shape.kv_heads, 512)
    small = replace(small, interval=4)
    write_hollow_assistant(tmp_path / "head.gguf", small, replace(heads, shared=0), shape.width)
    spec = read_model_spec(write_hollow_gemma4(tmp_path / "model.gguf", shape, heads))
    head = read_model_spec(tmp_path / "head.gguf", heads=True)
    target = RunShape(4096, batch, 8)
    parts = head_file_footprint(spec, target, head, RunShape(4096, 64, 8))
    planned = {part.name: part.nbytes for part in parts}
    with contexts_of((spec, head), batch) as (of_model, of_head):
        assert "head_kv_cache" not in planned and "kv_cache" not in of_head
        close = pytest.approx(of_head["compute"], rel=1e-3, abs=0.006 * 2**20)
        assert planned["head_compute"] == close
        close = pytest.approx(of_model["compute"], rel=1e-3, abs=0.006 * 2**20)
        assert compute_bytes(spec, target) == close
