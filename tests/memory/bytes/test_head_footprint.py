"""The memory of heads against llama.cpp's own words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dflash_gguf import DFlash, write_hollow_dflash
from eagle3_gguf import Head, write_hollow_eagle
from hybrid_gguf import Shape, write_hollow
from planning_cases import compute_bytes

from edgespec.backends.llama.kernels import model_params
from edgespec.backends.llama.library import LOG, library
from edgespec.memory.bytes.footprint import RunShape
from edgespec.memory.bytes.head_footprint import (
    BLOCK_TOKENS,
    EAGLE_TOKENS,
    HEAD_NODES,
    head_file_footprint,
    head_footprint,
)
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    "shape",
    [
        Shape("qwen35", 24, 1024, 3584, 248_320, 8, 2, 256, 128, 16, 16, 4, 4, predicting=1),
        Shape("qwen35", 32, 2560, 9216, 248_320, 16, 4, 256, 128, 32, 16, 4, 4, predicting=1),
    ],
)
def test_heads_of_real_shapes_take_what_llama_cpp_says(shape: Shape, tmp_path: Path) -> None:
    """Within 0.1% and the two decimals of the log."""
    spec = read_model_spec(write_hollow(tmp_path / "model.gguf", shape))
    lib = library()
    params = model_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers, params.load_mtp = True, 0, 0, True
    model = lib.llama_model_load_from_file(str(spec.path).encode(), params)
    assert model
    for batch in (32, 64, 512):
        LOG.clear()
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.ctx_type = 4096, 1, 1
        params.n_batch, params.n_ubatch, params.n_outputs_max = batch + 8, batch, 1
        params.flash_attn_type, params.kv_unified = 1, True
        context = lib.llama_init_from_model(model, params)
        assert context
        lib.llama_free(context)
        parts = head_footprint(spec, RunShape(4096, batch, 8, head=True))
        planned = {part.name: part.nbytes for part in parts}
        said = LOG.buffer_bytes()["compute"]
        assert planned["head_compute"] == pytest.approx(said, rel=1e-3, abs=0.006 * 2**20)
    lib.llama_model_free(model)


@pytest.mark.parametrize("batch", [32, 512])
@pytest.mark.parametrize(
    ("shape", "made"),
    [
        (
            Shape("llama", 32, 4096, 14336, 128_256, 32, 8, 128, interval=1),
            Head((2, 16, 29), ids=tuple(range(32_000)), heads=32, kv_heads=8, head=128,
                 hidden=14336),
        ),
        (
            Shape("qwen3", 28, 1024, 3072, 151_936, 16, 8, 128, interval=1),
            Head((2, 14, 25), has_output=False, heads=16, kv_heads=8, head=64, hidden=3072),
        ),
        (
            Shape("qwen3", 36, 4096, 12288, 151_936, 32, 8, 128, interval=1),
            DFlash((1, 9, 17, 25, 33), 5, block=16, heads=32, kv_heads=8, head=128, hidden=12288),
        ),
        (
            Shape("llama", 32, 4096, 14336, 128_256, 32, 8, 128, interval=1),
            DFlash((1, 8, 15, 22, 29), 5, tuple(range(32_000)), block=10, heads=32, kv_heads=8,
                   head=128, hidden=14336),
        ),
    ],
)  # fmt: skip
def test_heads_in_files_of_real_shapes_take_what_llama_cpp_says(
    shape: Shape, made: Head | DFlash, batch: int, tmp_path: Path
) -> None:
    """Within 0.1% and the two decimals of the log: theirs, and what targets need for them."""
    spec = read_model_spec(write_hollow(tmp_path / "model.gguf", shape))
    if isinstance(made, Head):
        write_hollow_eagle(tmp_path / "head.gguf", shape, made)
        layers, tokens_read, outputs = made.layers, EAGLE_TOKENS, EAGLE_TOKENS
    else:
        write_hollow_dflash(tmp_path / "head.gguf", shape, made)
        layers, tokens_read, outputs = made.reads, BLOCK_TOKENS, HEAD_NODES
    head = read_model_spec(tmp_path / "head.gguf", heads=True)
    lib = library()
    params = model_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = True, 0, 0
    models = [
        lib.llama_model_load_from_file(str(one.path).encode(), params) for one in (spec, head)
    ]
    assert all(models)
    sizes, other = [], None
    for model, tokens in zip(models, (batch, tokens_read), strict=True):
        LOG.clear()
        made_with = lib.llama_context_default_params()
        made_with.n_ctx, made_with.n_seq_max, made_with.ctx_other = 4096, 1, other
        made_with.n_batch = made_with.n_ubatch = tokens
        made_with.n_outputs_max = outputs if other else 8
        made_with.flash_attn_type, made_with.kv_unified = 1, True
        context = lib.llama_init_from_model(model, made_with)
        assert context
        sizes.append((context, LOG.buffer_bytes()))
        other = context
    target = RunShape(4096, batch, 8, hands_out=layers)
    parts = head_file_footprint(spec, target, head, RunShape(4096, 16, 16))
    planned = {part.name: part.nbytes for part in parts}
    said = sizes[1][1]
    for context, _ in reversed(sizes):
        lib.llama_free(context)
    for model in reversed(models):
        lib.llama_model_free(model)
    assert planned["head_compute"] == pytest.approx(said["compute"], rel=1e-3, abs=0.006 * 2**20)
    plain = compute_bytes(spec, replace(target, hands_out=()))
    assert plain == pytest.approx(sizes[0][1]["compute"], rel=1e-3, abs=0.006 * 2**20)
