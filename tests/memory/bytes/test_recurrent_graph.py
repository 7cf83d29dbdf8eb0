"""What hybrids take against llama.cpp's own words, for files with the shape of a model and no data.

`no_alloc` lays everything out and allocates nothing. The log has two decimals of a MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrid_gguf import HYBRIDS, Shape, write_hollow
from planning_cases import compute_bytes

from edgespec.backends.llama.kernels import model_params
from edgespec.backends.llama.library import LOG, library
from edgespec.memory.bytes.footprint import RunShape, state_bytes
from edgespec.memory.bytes.recurrent_graph import most_snapshots
from edgespec.models.spec import ModelSpec, read_model_spec

pytestmark = pytest.mark.model

ROUNDING = 0.006 * 2**20  # of the log, and of inputs of a few bytes
MODELS = {
    **{f"tiny {arch}": Shape(arch) for arch in HYBRIDS},
    "Qwen 3.5 0.8B": Shape("qwen35", 24, 1024, 3584, 248_320, 8, 2, 256, 128, 16, 16, 4, 4),
    "Qwen 3.5 4B": Shape("qwen35", 32, 2560, 9216, 248_320, 16, 4, 256, 128, 32, 16, 4, 4),
    "LFM2 1.2B": Shape("lfm2", 16, 2048, 8192, 65_536, 32, 8, 64, interval=3),
    "Nemotron H 9B": Shape("nemotron_h", 56, 4480, 15_680, 131_072, 40, 8, 128, 128, 128, 8, 4),
    "Qwen 3.5 35B A3B": Shape(
        "qwen35moe", 40, 2048, 1024, 248_320, 16, 2, 256, 128, 32, 16, 4, 4, experts=256, used=8
    ),
    "LFM2 8B A1B": Shape(
        "lfm2moe", 24, 2048, 3584, 65_536, 32, 8, 64, interval=4, experts=32, used=4
    ),
    "Nemotron 3 Nano": Shape(
        "nemotron_h_moe", 52, 2688, 3712, 131_072, 32, 2, 128, 128, 64, 8, 4, experts=128, used=6
    ),
}


@contextmanager
def model_of(spec: ModelSpec) -> Iterator[Any]:
    lib = library()
    LOG.clear()
    params = model_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = True, 0, 0
    model = lib.llama_model_load_from_file(str(spec.path).encode(), params)
    assert model, LOG.problem()
    try:
        yield model
    finally:
        lib.llama_model_free(model)


def context_of(model: Any, shape: RunShape) -> dict[str, int]:
    """What a context as RecurrentBackend makes it takes, by component."""
    lib = library()
    LOG.clear()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = shape.context_size, 1
    params.n_batch, params.n_ubatch = shape.batch_size + shape.max_nodes, shape.batch_size
    params.n_outputs_max, params.n_rs_seq = shape.max_nodes, shape.snapshots
    params.flash_attn_type, params.kv_unified = 1, True
    context = lib.llama_init_from_model(model, params)
    assert context, LOG.problem()
    lib.llama_free(context)
    return LOG.buffer_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in MODELS if not one.startswith("tiny")])
def test_a_run_of_a_real_shape_takes_what_llama_cpp_says(name: str, tmp_path: Path) -> None:
    test_a_run_takes_what_llama_cpp_says(name, tmp_path)


@pytest.mark.parametrize("name", [one for one in MODELS if one.startswith("tiny")])
def test_a_run_takes_what_llama_cpp_says(name: str, tmp_path: Path) -> None:
    """Compute buffer and state, with no, four and sixteen snapshots: within 0.1%."""
    spec = read_model_spec(write_hollow(tmp_path / "model.gguf", MODELS[name]))
    with model_of(spec) as model:
        for snapshots in sorted({0, 4, min(16, most_snapshots(spec))}):
            for batch in (32, 64, 128, 512):
                shape = RunShape(4096, batch, max(8, snapshots + 1), snapshots=snapshots)
                said = context_of(model, shape)
                for part, planned in (
                    ("compute", compute_bytes(spec, shape)),
                    ("recurrent_state", state_bytes(spec, shape)),
                ):
                    close = pytest.approx(said[part], rel=1e-3, abs=ROUNDING)
                    assert planned == close, (part, shape)


@pytest.mark.parametrize(
    "shape",
    [
        Shape("lfm2", 16, interval=3),
        Shape("lfm2", 6, interval=4),
        Shape("lfm2", 16, interval=16),
        Shape("nemotron_h", 16),
        Shape("nemotron_h", 20),
        Shape("nemotron_h", 56),
        Shape("lfm2moe", 16, interval=3),
        Shape("lfm2moe", 24, interval=4, experts=32, used=4),
        Shape("nemotron_h_moe", 20),
        Shape("nemotron_h_moe", 52, experts=128, used=6),
    ],
)
def test_as_many_snapshots_as_the_graph_has_room_for(shape: Shape, tmp_path: Path) -> None:
    """Any more end the process: were this number too large, this test would end it."""
    spec = read_model_spec(write_hollow(tmp_path / "model.gguf", shape))
    most = most_snapshots(spec)
    assert 5 < most < 64
    with model_of(spec) as model:
        said = context_of(model, RunShape(512, 64, 8, snapshots=most))
    assert said["compute"] > 0


def test_kinds_without_snapshots_have_none(tmp_path: Path) -> None:
    spec = read_model_spec(write_hollow(tmp_path / "model.gguf", Shape("qwen35")))
    assert spec.has_snapshots and most_snapshots(spec) >= 64


def test_a_file_that_lacks_tensors_is_still_planned(tmp_path: Path) -> None:
    """llama.cpp says what is missing; a plan of it is no traceback."""
    spec = read_model_spec(write_hollow(tmp_path / "model.gguf", Shape("qwen35")))
    shape = RunShape(512, 64, 8)
    whole = compute_bytes(spec, shape)
    kept = {name: one for name, one in spec.tensors.items() if "ssm_conv1d" not in name}
    assert 0 < compute_bytes(replace(spec, tensors=kept), shape) != whole
