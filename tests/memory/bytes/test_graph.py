"""The footprint against llama.cpp's own words, for files with the shape of a model and no data.

The tensors are a hole in the file, and `no_alloc` makes llama.cpp lay everything out and allocate
nothing, so an 8B model costs milliseconds. Its log gives sizes with two decimals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hollow_gguf import write_infos
from planning_cases import compute_bytes

from edgespec.backends.llama.kernels import model_params
from edgespec.backends.llama.library import LOG, library
from edgespec.memory.bytes.footprint import RunShape, kv_cache_bytes, weights_bytes
from edgespec.memory.device import host
from edgespec.models.spec import ModelSpec, read_model_spec

pytestmark = pytest.mark.model

MIB = 1 << 20
COPIED, MAPPED = 0, 1  # values of llama_load_mode
KV_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # values of ggml_type
Tensors = dict[str, tuple[tuple[int, ...], str]]  # shape as numpy has it, type


@dataclass(frozen=True)
class Sizes:
    """A decoder's shape; `window` > 0 slides, `experts` > 0 replaces the dense feed-forward."""

    arch: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    tied: bool = True
    window: int = 0
    experts: int = 0
    experts_used: int = 0
    shared: int = 0


MODELS = {
    "llama 1B": Sizes("llama", 16, 2048, 32, 8, 64, 8192, 128_256),
    "llama 3B": Sizes("llama", 28, 3072, 24, 8, 128, 8192, 128_256),
    "llama 8B": Sizes("llama", 32, 4096, 32, 8, 128, 14_336, 128_256, tied=False),
    "qwen2 1.5B": Sizes("qwen2", 28, 1536, 12, 2, 128, 8960, 151_936),
    "qwen2 3B": Sizes("qwen2", 36, 2048, 16, 2, 128, 11_008, 151_936),
    "qwen2 7B": Sizes("qwen2", 28, 3584, 28, 4, 128, 18_944, 152_064, tied=False),
    "gemma3 1B": Sizes("gemma3", 26, 1152, 4, 1, 256, 6912, 262_144, window=512),
    "gemma3 4B": Sizes("gemma3", 34, 2560, 8, 4, 256, 10_240, 262_144, window=1024),
    "gemma3 12B": Sizes("gemma3", 48, 3840, 16, 8, 256, 15_360, 262_144, window=1024),
    "llama with 8 experts of 1B": Sizes(
        "llama", 16, 2048, 32, 8, 64, 4096, 32_000, tied=False, experts=8, experts_used=2
    ),
    "llama with 8 experts of 7B": Sizes(
        "llama", 32, 4096, 32, 8, 128, 14_336, 32_000, tied=False, experts=8, experts_used=2
    ),
    "qwen2 with 60 experts and a shared one": Sizes(
        "qwen2moe", 24, 2048, 16, 16, 128, 1408, 151_936, tied=False,
        experts=60, experts_used=4, shared=5632,
    ),
}  # fmt: skip

# Context, batch, most rows of logits, type of K and V.
RUNS = [
    (512, 32, 1, "f16", "f16"),
    (512, 64, 32, "q8_0", "q8_0"),
    (2000, 256, 32, "bf16", "f16"),
    (4096, 64, 64, "q4_0", "q4_0"),
    (4096, 128, 8, "f16", "f16"),
    (4096, 512, 32, "f16", "f16"),
    (4096, 512, 512, "q8_0", "q8_0"),
    (16_384, 64, 64, "q8_0", "q8_0"),
    (16_384, 128, 16, "f16", "f16"),
    (32_768, 64, 32, "q4_0", "q4_0"),
]


def keys_of(sizes: Sizes) -> dict[str, int | float]:
    keys: dict[str, int | float] = {
        "block_count": sizes.layers,
        "context_length": 32_768,
        "embedding_length": sizes.width,
        "feed_forward_length": sizes.shared or sizes.feed_forward,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.head,
        "attention.value_length": sizes.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.head,
        "vocab_size": sizes.vocabulary,
    }
    if sizes.window:
        keys |= {"attention.sliding_window": sizes.window}
    if sizes.experts:
        keys |= {
            "expert_count": sizes.experts,
            "expert_used_count": sizes.experts_used,
            "expert_feed_forward_length": sizes.feed_forward,
        }
    if sizes.shared:
        keys |= {"expert_shared_feed_forward_length": sizes.shared}
    return keys


def layer_of(sizes: Sizes, kind: str) -> Tensors:
    """Tensors of one layer, without the `blk.0.` before their names."""
    width, head = sizes.width, sizes.head
    queries, keys = sizes.heads * head, sizes.kv_heads * head
    layer: Tensors = {
        "attn_norm.weight": ((width,), "F32"),
        "attn_q.weight": ((queries, width), kind),
        "attn_k.weight": ((keys, width), kind),
        "attn_v.weight": ((keys, width), kind),
        "attn_output.weight": ((width, queries), kind),
        "ffn_norm.weight": ((width,), "F32"),
    }
    if sizes.arch.startswith("qwen2"):
        layer |= {
            "attn_q.bias": ((queries,), "F32"),
            "attn_k.bias": ((keys,), "F32"),
            "attn_v.bias": ((keys,), "F32"),
        }
    if sizes.arch == "gemma3":
        layer |= {
            "attn_q_norm.weight": ((head,), "F32"),
            "attn_k_norm.weight": ((head,), "F32"),
            "post_attention_norm.weight": ((width,), "F32"),
            "post_ffw_norm.weight": ((width,), "F32"),
        }
    if not sizes.experts:
        return layer | feed_forward("", sizes.feed_forward, width, kind)
    layer |= {"ffn_gate_inp.weight": ((sizes.experts, width), "F32")}
    layer |= feed_forward("_exps", sizes.feed_forward, width, kind, sizes.experts)
    if sizes.shared:
        layer |= {"ffn_gate_inp_shexp.weight": ((width,), "F32")}
        layer |= feed_forward("_shexp", sizes.shared, width, kind)
    return layer


def feed_forward(suffix: str, inner: int, width: int, kind: str, *experts: int) -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": ((*experts, inner, width), kind),
        f"ffn_up{suffix}.weight": ((*experts, inner, width), kind),
        f"ffn_down{suffix}.weight": ((*experts, width, inner), kind),
    }


def tensors_of(sizes: Sizes, kinds: tuple[str, ...] = ("Q4_0",), head: str = "Q8_0") -> Tensors:
    """All tensors; the layers take turns with `kinds`."""
    table = (sizes.vocabulary, sizes.width)
    tensors: Tensors = {
        "token_embd.weight": (table, head if sizes.tied else "Q4_0"),
        "output_norm.weight": ((sizes.width,), "F32"),
    }
    if not sizes.tied:
        tensors["output.weight"] = (table, head)
    for number in range(sizes.layers):
        layer = layer_of(sizes, kinds[number % len(kinds)])
        tensors |= {f"blk.{number}.{name}": value for name, value in layer.items()}
    return tensors


def write_sparse(path: Path, sizes: Sizes, tensors: Tensors) -> ModelSpec:
    """A whole GGUF file but for the data, which reads as zeros and takes no room on the disk."""
    writer = gguf.GGUFWriter(path, sizes.arch)
    for key, value in keys_of(sizes).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{sizes.arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    write_infos(writer, path, tensors)
    return read_model_spec(path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything llama.cpp logs, in pieces."""
    pieces: list[str] = []
    write = LOG.write

    def keep(level: int, text: bytes | None) -> None:
        pieces.append((text or b"").decode(errors="replace"))
        write(level, text)

    monkeypatch.setattr(LOG, "write", keep)
    return pieces


@contextmanager
def model_of(spec: ModelSpec, *, no_alloc: bool, mode: int = COPIED) -> Iterator[Any]:
    lib = library()
    LOG.clear()
    params = model_params()
    params.no_alloc, params.load_mode, params.n_gpu_layers = no_alloc, mode, 0
    model = lib.llama_model_load_from_file(str(spec.path).encode(), params)
    assert model, LOG.problem()
    try:
        yield model
    finally:
        lib.llama_model_free(model)


def context_of(model: Any, shape: RunShape) -> None:
    """Make a context as LlamaBackend does, and take it back; what it needs is in the log."""
    lib = library()
    LOG.clear()
    params = lib.llama_context_default_params()
    params.n_ctx, params.swa_full = shape.context_size, False
    params.n_batch, params.n_ubatch = shape.batch_size + shape.max_nodes, shape.batch_size
    params.n_seq_max, params.n_outputs_max = 1, shape.max_nodes
    params.flash_attn_type, params.kv_unified = 1, True
    params.type_k, params.type_v = KV_TYPES[shape.type_k], KV_TYPES[shape.type_v]
    context = lib.llama_init_from_model(model, params)
    assert context, LOG.problem()
    lib.llama_free(context)


def cache_bytes(said: list[str]) -> float:
    """From lines such as `size =  128.00 MiB (  4096 cells, ...`; the buffer itself is a dummy."""
    sizes = re.findall(r"size = +([\d.]+) MiB \( *\d+ cells", "".join(said))
    assert sizes, "no cache was made"
    return sum(map(float, sizes)) * MIB


def assert_close(what: str, expected: float, actual: float) -> None:
    off = expected - actual
    assert abs(off) <= max(0.02 * actual, MIB), (
        f"{what}: {expected / MIB:.2f} MiB expected, {actual / MIB:.2f} are what llama.cpp says, "
        f"{off / MIB:+.2f}"
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_run_takes_what_llama_cpp_says(name: str, tmp_path: Path, said: list[str]) -> None:
    """Within 2% or 1 MiB of it, for the compute buffer and the cache."""
    sizes = MODELS[name]
    spec = write_sparse(tmp_path / "model.gguf", sizes, tensors_of(sizes))
    with model_of(spec, no_alloc=True) as model:
        for context, batch, rows, type_k, type_v in RUNS:
            shape = RunShape(context, batch, rows, type_k, type_v)
            said.clear()
            context_of(model, shape)
            assert_close(f"compute, {shape}", compute_bytes(spec, shape), log("compute"))
            assert_close(f"cache, {shape}", kv_cache_bytes(spec, shape), cache_bytes(said))


def log(component: str) -> int:
    return LOG.buffer_bytes()[component]


@pytest.mark.parametrize("name", ["llama 1B", "qwen2 1.5B", "gemma3 1B"])
def test_every_layer_more_is_free_once_all_kinds_were_seen(name: str, tmp_path: Path) -> None:
    """Only a few layers of each kind are replayed; llama.cpp lays out all of them."""
    found = []
    for layers in (12, 18, 24):
        sizes = replace(MODELS[name], layers=layers)
        spec = write_sparse(tmp_path / f"{layers}.gguf", sizes, tensors_of(sizes))
        shape = RunShape(2048, 64, 16)
        with model_of(spec, no_alloc=True) as model:
            context_of(model, shape)
        found.append((compute_bytes(spec, shape), log("compute")))
    (expected, actual), *others = found
    assert expected == pytest.approx(actual, abs=0.01 * MIB)
    assert others == [(expected, actual)] * 2


def test_the_largest_step_may_decide_the_buffer(tmp_path: Path) -> None:
    """256 rows of 128,256 logits are 125 MiB; 8 of them leave the widest layer on top."""
    sizes = MODELS["llama 1B"]
    spec = write_sparse(tmp_path / "model.gguf", sizes, tensors_of(sizes))
    with model_of(spec, no_alloc=True) as model:
        for rows, floor, ceiling in ((8, 30, 35), (256, 125, 135)):
            shape = RunShape(1024, 256, rows)
            context_of(model, shape)
            assert floor * MIB < log("compute") < ceiling * MIB
            assert_close(f"{rows} rows", compute_bytes(spec, shape), log("compute"))


# ------------------------------------------------------------------------------ weights

# Types of the layers in turn, of the head, and whether the head is the table of embeddings.
MIXTURES: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "Q4_0": (("Q4_0",), "Q4_0", True),
    "Q4_0 with a head of its own": (("Q4_0",), "Q6_K", False),
    "Q4_K": (("Q4_K", "Q6_K"), "Q6_K", True),
    "Q8_0": (("Q8_0",), "Q8_0", True),
    "IQ4_NL": (("IQ4_NL", "Q5_K"), "Q4_K", False),
    "Q2_K": (("Q2_K", "Q3_K"), "Q2_K", True),
    "F16": (("F16", "BF16"), "F16", True),
}
Loaded = Callable[[str, int], tuple[dict[str, int], dict[str, int]]]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """Loads two layers for real: planned bytes and those of the log, by component."""

    def load(name: str, mode: int) -> tuple[dict[str, int], dict[str, int]]:
        kinds, head, tied = MIXTURES[name]
        sizes = replace(MODELS["llama 1B"], layers=2, vocabulary=8000, tied=tied)
        spec = write_sparse(tmp_path / "model.gguf", sizes, tensors_of(sizes, kinds, head))
        shape = RunShape(512, 64, 1, mapped=mode == MAPPED, features=host.cpu_features())
        planned = {part.name: part.nbytes for part in weights_bytes(spec, shape) if part.nbytes}
        with model_of(spec, no_alloc=False, mode=mode):
            return planned, {name: size for name, size in LOG.buffer_bytes().items() if size}

    return load


@pytest.mark.parametrize("name", MIXTURES)
def test_copied_weights_are_there_once(loaded: Loaded, name: str) -> None:
    """In the file's format or rewritten for this processor, whatever it is."""
    planned, actual = loaded(name, COPIED)
    assert set(planned) == set(actual)
    for component, size in actual.items():
        assert planned[component] == pytest.approx(size, abs=0.01 * MIB), component


@pytest.mark.parametrize("name", MIXTURES)
def test_mapped_weights_are_the_file_and_what_is_rewritten(loaded: Loaded, name: str) -> None:
    """llama.cpp's own number leaves out what lies before or behind the tensors it reads there."""
    planned, actual = loaded(name, MAPPED)
    assert set(planned) == set(actual)
    assert planned.get("weights_repacked", 0) == pytest.approx(
        actual.get("weights_repacked", 0), abs=0.01 * MIB
    )
    assert actual["weights"] <= planned["weights"] + 0.01 * MIB


def test_a_whole_model_takes_what_llama_cpp_says(tmp_path: Path, said: list[str]) -> None:
    """llama 1B with everything allocated: 0.6 GiB, rewritten where this processor does that."""
    sizes = MODELS["llama 1B"]
    spec = write_sparse(tmp_path / "model.gguf", sizes, tensors_of(sizes, head="Q4_0"))
    shape = RunShape(4096, 128, 32, mapped=False, features=host.cpu_features())
    planned = {part.name: part.nbytes for part in weights_bytes(spec, shape) if part.nbytes}
    with model_of(spec, no_alloc=False, mode=COPIED) as model:
        weights = {name: size for name, size in LOG.buffer_bytes().items() if size}
        said.clear()
        context_of(model, shape)
        assert_close("compute", compute_bytes(spec, shape), log("compute"))
        assert_close("cache", kv_cache_bytes(spec, shape), log("kv_cache"))
        assert_close("cache", cache_bytes(said), log("kv_cache"))
    assert set(weights) == set(planned)
    for name, size in weights.items():
        assert_close(name, planned[name], size)
