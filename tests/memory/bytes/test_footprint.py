"""Footprint arithmetic on numbers worked out by hand; llama.cpp's own numbers are in test_graph."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from footprint_cases import (
    AVX2,
    HEAD,
    LAYERS,
    NORM,
    TABLE,
    TIED,
    UNTIED,
    model,
    shape,
    takes_up_to,
    tensor,
    weights,
)
from planning_cases import compute_bytes

from edgespec.backends.llama.ggml_products import MatrixProduct, quantized
from edgespec.backends.llama.library import ggml_function
from edgespec.memory.bytes.footprint import (
    GPU,
    HOST,
    RunShape,
    footprint,
    has_packed_weights,
    kv_cache_bytes,
    kv_type_fits,
    padded,
    product_bytes,
    runtime_bytes,
    state_bytes,
    window_cells,
    work_bytes,
)
from edgespec.memory.device.host import cpu_features
from edgespec.memory.device.kernels import missing_kernels, packed_bytes
from edgespec.memory.device.taking import Weight
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import ModelSpec

AVX512 = frozenset({"avx2", "avx512"})
NEON = frozenset({"neon", "dotprod"})


SPEC = model()


# ------------------------------------------------------------------------------ KV cache


def test_caches_are_made_of_blocks_of_256_cells() -> None:
    assert [padded(cells) for cells in (1, 256, 257, 1000, 4096)] == [256, 256, 512, 1024, 4096]


@pytest.mark.parametrize(
    ("type_k", "type_v", "per_layer_and_cell"),
    [
        ("f16", "f16", 2 * (16 + 16) * 2),
        ("f32", "f32", 2 * (16 + 16) * 4),
        ("bf16", "f16", 2 * (16 + 16) * 2),
        ("q8_0", "q8_0", 2 * (17 + 17)),  # 34 bytes per 32 values
        ("q4_0", "q4_0", 2 * (9 + 9)),  # 18 bytes per 32 values
    ],
)
def test_the_cache_by_hand(type_k: str, type_v: str, per_layer_and_cell: int) -> None:
    """1,000 tokens take 1,024 cells in each of two layers of two heads of 16 + 16 values."""
    run = shape(type_k=type_k, type_v=type_v)
    assert kv_cache_bytes(SPEC, run) == 2 * 1024 * per_layer_and_cell
    assert kv_cache_bytes(SPEC, run, range(1)) == 1024 * per_layer_and_cell
    assert kv_cache_bytes(SPEC, run, range(2, 2)) == 0


def test_layers_are_counted_as_they_are() -> None:
    """Layer 0 caches nothing; layer 1 has 3 heads of 32 + 8 values."""
    spec = replace(SPEC, num_kv_heads=(0, 3), key_length=(16, 32), value_length=(16, 8))
    assert kv_cache_bytes(spec, shape(512)) == 512 * 3 * (32 + 8) * 2


def test_a_sliding_layer_holds_its_window_and_a_batch() -> None:
    """300 + 256 tokens take 768 cells; a context that is shorter needs no more than itself."""
    spec = replace(SPEC, sliding_window=300, is_sliding=(True, False))
    assert window_cells(spec, shape(4096)) == 768
    assert kv_cache_bytes(spec, shape(4096)) == (768 + 4096) * 128
    assert kv_cache_bytes(spec, shape(4096), range(1)) == 768 * 128
    assert kv_cache_bytes(spec, shape(512)) == (512 + 512) * 128
    assert kv_cache_bytes(spec, shape(4096, 32)) == (512 + 4096) * 128


def test_recurrent_state_is_counted_once_whatever_the_context() -> None:
    spec = replace(SPEC, num_kv_heads=(0, 0), is_recurrent=True, state_values=5000)
    assert state_bytes(spec, shape(256)) == state_bytes(spec, shape(9999)) == 20_000
    assert state_bytes(spec, replace(shape(), snapshots=4)) == 5 * 20_000
    assert kv_cache_bytes(spec, shape()) == 0
    spec = replace(spec, is_recurrent_layer=(True, True))
    assert state_bytes(spec, shape(), range(1, 2)) == 10_000, "of the layers on a GPU"


def test_a_block_type_needs_heads_of_whole_blocks() -> None:
    assert not kv_type_fits(SPEC, "q8_0")
    assert all(kv_type_fits(SPEC, kind) for kind in ("f16", "bf16", "f32"))
    longer = replace(SPEC, key_length=(64, 64), value_length=(64, 64))
    assert kv_type_fits(longer, "q8_0") and kv_type_fits(longer, "q4_0")
    assert not kv_type_fits(replace(longer, value_length=(64, 80)), "q4_0"), "any layer counts"


# ------------------------------------------------------------------------------ weights


def test_the_examples_are_what_they_are_said_to_be() -> None:
    assert [one.data_bytes for one in (TABLE, HEAD, NORM, LAYERS[1])] == [36_000, 68_000, 256, 2304]
    assert UNTIED.weight_bytes == 36_000 + 68_000 + 256 + 2 * (256 + 2304)
    assert (UNTIED.tied_embeddings, TIED.tied_embeddings) == (False, True)


def test_copied_weights_are_rewritten_where_the_processor_wants_it() -> None:
    """The Q4_0 of the layers is; the table is only read by rows, and AVX has no use for Q8_0."""
    assert weights(UNTIED) == {
        (HOST, "weights"): 36_000 + 68_000 + 3 * 256,
        (HOST, "weights_repacked"): 2 * 2304,
    }
    assert weights(UNTIED, features=frozenset()) == {(HOST, "weights"): UNTIED.weight_bytes}


def test_neon_rewrites_q8_0_too() -> None:
    assert weights(UNTIED, features=NEON) == {
        (HOST, "weights"): 36_000 + 3 * 256,
        (HOST, "weights_repacked"): 68_000 + 2 * 2304,
    }


def test_mapped_weights_are_the_whole_file_and_what_is_rewritten() -> None:
    assert weights(UNTIED, mapped=True) == {
        (HOST, "weights"): UNTIED.weight_bytes,
        (HOST, "weights_repacked"): 2 * 2304,
    }


def test_a_tied_table_is_copied_for_the_head_where_that_is_rewritten() -> None:
    assert weights(TIED) == {
        (HOST, "weights"): 36_000 + 3 * 256,
        (HOST, "weights_repacked"): 36_000 + 2 * 2304,
    }
    assert weights(TIED, features=frozenset()) == {(HOST, "weights"): TIED.weight_bytes}


@pytest.mark.parametrize(
    ("kind", "on_avx2", "on_avx512", "on_neon"),
    [
        ("Q4_0", True, True, True),
        ("Q4_K", True, True, True),
        ("IQ4_NL", True, True, True),
        ("Q2_K", False, True, False),
        ("Q5_K", False, False, True),
        ("Q6_K", False, False, True),
        ("Q8_0", False, False, True),
        ("Q4_1", False, False, False),
        ("Q3_K", False, False, False),
        ("F16", False, False, False),
    ],
)
def test_what_is_rewritten_depends_on_the_processor(
    kind: str, on_avx2: bool, on_avx512: bool, on_neon: bool
) -> None:
    one = tensor("blk.0.ffn_up.weight", (256, 64), kind)
    for features, expected in ((AVX2, on_avx2), (AVX512, on_avx512), (NEON, on_neon)):
        found = weights(model(one), features=features)
        assert found == {(HOST, "weights_repacked" if expected else "weights"): one.data_bytes}
    assert (HOST, "weights") in weights(model(one), features=frozenset({"neon"}))


@pytest.mark.parametrize(
    "one",
    [
        tensor("blk.0.attn_q.weight", (64, 60), "Q4_0"),
        tensor("blk.0.attn_norm.weight", (64,), "Q4_0"),
        tensor("token_embd.weight", (64, 64), "Q4_0"),
        tensor("per_layer_token_embd.weight", (64, 64), "Q4_0"),
    ],
    ids=["rows that are no multiple of 8", "one row", "a table", "another table"],
)
def test_what_is_not_multiplied_by_stays_as_it_is(one: GgufTensor) -> None:
    assert weights(model(one, tied_embeddings=False)) == {(HOST, "weights"): one.data_bytes}


def test_a_gpu_takes_the_head_first_then_the_last_layers() -> None:
    """2 layers and the head make 3; norm and head go together, the table never goes."""
    on_gpu = [weights(UNTIED, gpu_layers=number).get((GPU, "weights"), 0) for number in range(4)]
    head, layer = 68_000 + 256, 2304 + 256
    assert on_gpu == [0, head, head + layer, head + 2 * layer]
    everything = weights(UNTIED, gpu_layers=-1)
    assert everything == {(HOST, "weights"): 36_000, (GPU, "weights"): head + 2 * layer}
    assert weights(UNTIED, gpu_layers=99) == everything
    assert weights(UNTIED, gpu_layers=2) == {
        (GPU, "weights"): head + layer,
        (HOST, "weights"): 36_000 + 256,
        (HOST, "weights_repacked"): 2304,
    }


def test_a_tied_table_is_copied_to_the_gpu() -> None:
    assert weights(TIED, gpu_layers=1) == {
        (GPU, "weights"): 256 + 36_000,
        (HOST, "weights"): 36_000 + 2 * 256,
        (HOST, "weights_repacked"): 2 * 2304,
    }


def test_of_a_head_that_stays_here_the_table_is_kept_twice() -> None:
    """As `LlamaContext` loads it: a table is packed as the head, too, where there is no device."""
    if missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {missing_kernels()}")
    spec = model(table := tensor("token_embd.weight", (64, 1024), "Q4_0"), tied_embeddings=True)
    packed = packed_bytes(2, 1024, 64)
    assert weights(spec, kernels=True) == {(HOST, "weights_repacked"): packed}
    beside = weights(spec, gpu_layers=1, kernels=True, takes=takes_up_to(64 * 64))
    assert beside == {(HOST, "weights"): table.data_bytes, (HOST, "weights_repacked"): packed}


def test_of_floats_only_matrices_that_steps_multiply_by_are_packed() -> None:
    """They take as many bytes as in the file; a file of nothing else is not packed at all."""
    if missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {missing_kernels()}")
    floats = (
        tensor("blk.0.ssm_alpha.weight", (64, 3), "F32"),
        tensor("blk.0.ffn_gate_inp_shexp.weight", (64,), "F32"),
    )
    others = (
        tensor("blk.0.ssm_conv1d.weight", (4, 64), "F32"),
        tensor("blk.0.ssm_norm.weight", (64, 2), "F32"),
        tensor("blk.0.attn_norm.weight", (64,), "F32"),
    )
    spec = model(*floats, *others, tensor("output.weight", (64, 16), "Q4_0"))
    assert weights(spec, kernels=True) == {
        (HOST, "weights"): sum(one.data_bytes for one in others),
        (HOST, "weights_repacked"): 4 * 64 * 4 + packed_bytes(2, 16, 64),
    }
    assert has_packed_weights(spec) and not has_packed_weights(model(*floats, *others))


def test_a_device_is_asked_about_the_experts_that_a_token_uses() -> None:
    asked: list[Weight] = []

    def takes(_label: str, weight: Weight) -> bool:
        asked.append(weight)
        return True

    experts = tensor("blk.0.ffn_up_exps.weight", (64, 96, 8), "Q4_0")
    weights(model(experts, num_experts=8, num_experts_used=2), gpu_layers=-1, takes=takes)
    assert set(asked) == {Weight(2, (64, 96, 8), 2)}


# ------------------------------------------------------------------------------ compute, work


def test_intermediate_results_by_hand() -> None:
    """One token at 256 cells: 4,000 bytes of logits are larger than anything before them.

    In front of them lie the token's id (32 bytes), the input for embeddings instead of ids (256),
    which is never freed because nobody reads it, and the hidden state they are computed from (256).
    """
    assert compute_bytes(SPEC, shape(256, 1, max_nodes=1)) == 32 + 256 + 256 + 4000


def test_rows_of_logits_count_once_they_are_the_largest() -> None:
    """From 8 to 16 rows: 8 x 1,000 more logits, norm, and nothing else."""
    few, many = (compute_bytes(SPEC, shape(256, 16, max_nodes=rows)) for rows in (8, 16))
    assert 8 * 1000 * 4 <= many - few <= 8 * (1000 + 2 * 64) * 4 + 64


def test_more_cells_make_a_larger_mask() -> None:
    """Two bytes a cell and token: 64 x 3,840 x 2."""
    small, large = (compute_bytes(SPEC, shape(cells, 64, max_nodes=1)) for cells in (256, 4096))
    assert large - small == 64 * 3840 * 2


def test_no_more_rows_than_tokens() -> None:
    assert compute_bytes(SPEC, shape(1024, 16, max_nodes=99)) == compute_bytes(
        SPEC, shape(1024, 16, max_nodes=16)
    )


def test_work_is_a_batch_in_the_widest_weights_number_format() -> None:
    """64 tokens of 4,096 numbers: F16 as they are, quantized ones 292 bytes for 256."""
    wide = tensor("blk.0.ffn_down.weight", (4096, 64), "Q4_0")
    narrow = tensor("blk.0.attn_q.weight", (1024, 64), "F16")
    assert work_bytes(model(wide, narrow), shape(512, 64)) == 64 * 4096 * 292 // 256
    half = tensor("blk.0.ffn_down.weight", (4096, 64), "F16")
    assert work_bytes(model(half, narrow), shape(512, 64)) == 64 * 4096 * 2
    full = tensor("blk.0.ffn_down.weight", (4096, 64), "F32")
    assert work_bytes(model(full, narrow), shape(512, 64)) == 64 * 4096 * 4


def test_tables_and_vectors_are_not_multiplied_by() -> None:
    """What is left are the tiles of attention: 64 x (4 x 16 + 2 x 64) numbers a thread."""
    table = tensor("token_embd.weight", (1 << 20, 64), "F32")
    spec = model(table, NORM, tied_embeddings=False)
    tiles = 4 * (4 * 64 * 16 + 2 * 64 * 64)
    assert work_bytes(spec, shape(512, 512)) == tiles
    assert work_bytes(spec, shape(512, 512, threads=4)) == 4 * tiles
    assert work_bytes(model(), shape(512, 64)) == tiles


def test_a_table_that_is_the_head_is_multiplied_by_rows_of_logits() -> None:
    spec = model(tensor("token_embd.weight", (1 << 20, 64), "F32"), tied_embeddings=True)
    assert work_bytes(spec, shape(512, 512, max_nodes=8)) == 8 * 4 << 20


class GraphPlan(ctypes.Structure):
    """`struct ggml_cplan`, whose first field is told here."""

    _fields_ = (("work_bytes", ctypes.c_size_t), ("others", ctypes.c_void_p * 6))


@pytest.mark.model
@pytest.mark.parametrize("threads", [1, 2, 32])
@pytest.mark.parametrize("used", [0, 2])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q3_K", "Q6_K", "IQ4_XS", "IQ3_S"])
def test_work_of_a_product_is_what_llama_cpp_asks_for(kind: str, used: int, threads: int) -> None:
    """In plain memory, where nothing is rearranged: K- and IQ-types are multiplied in tiles."""
    number, tokens, experts = GGML_NUMBERS[kind], 24, 6
    values = np.ones((16 * (experts if used else 1), 512), np.float32)
    dims = (512, 16, experts) if used else (512, 16)
    plan = ggml_function(
        "ggml_graph_plan", GraphPlan, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    )
    with MatrixProduct(
        number, quantized(number, values), dims, tokens=tokens, used=used
    ) as product:
        asked = plan(product._graph, threads, None).work_bytes
    run = RunShape(512, tokens, 1, threads=threads, features=cpu_features() - {"dotprod"})
    planned = product_bytes(tensor("blk.0.ffn_up_exps.weight", dims, kind), tokens, run, used)
    lines = 64 * (threads + 3)
    assert planned - lines <= asked * 1.08 and asked <= planned + lines


# ------------------------------------------------------------------------------ whole runs


def test_a_larger_vocabulary_needs_larger_tables() -> None:
    """345 bytes a token of a byte-level BPE, which has merges, 165 of another tokenizer."""
    larger = replace(SPEC, vocab_size=151_000)
    assert runtime_bytes(larger) - runtime_bytes(SPEC) == 150_000 * 345
    other, more = (replace(spec, tokenizer_model="llama") for spec in (SPEC, larger))
    assert runtime_bytes(more) - runtime_bytes(other) == 150_000 * 165
    # The interpreter and its libraries alone take more than 40 MiB.
    assert 40 << 20 < runtime_bytes(SPEC) < 200 << 20


def parts_of(spec: ModelSpec, run: RunShape, **options: int) -> dict[str, int]:
    parts = footprint(spec, run, **options)
    return {f"{part.device} {part.name}": part.nbytes for part in parts}


def test_a_run_is_its_parts() -> None:
    run = shape(features=AVX2, mapped=False)
    assert parts_of(UNTIED, run, drafter_bytes=7777) == {
        "host weights": 104_000 + 3 * 256,
        "host weights_repacked": 2 * 2304,
        "host kv_cache": 2 * 1024 * 128,
        "host compute": compute_bytes(UNTIED, run),
        "host work": work_bytes(UNTIED, run),
        "host logits": 32 * 1000 * 4,
        "host drafter_tables": 7777,
        "host runtime": runtime_bytes(UNTIED),
    }


def test_parts_of_nothing_are_left_out() -> None:
    names = set(parts_of(UNTIED, shape(features=frozenset())))
    assert names & {"host weights_repacked", "host drafter_tables", "gpu weights"} == set()


def test_ceilings_are_what_is_touched_as_it_is_used() -> None:
    def ceilings(run: RunShape) -> set[str]:
        parts = footprint(UNTIED, run, drafter_bytes=1)
        return {part.name for part in parts if part.is_ceiling}

    used = {"compute", "work", "logits", "drafter_tables", "runtime"}
    assert ceilings(shape(features=AVX2, mapped=False)) == used
    assert ceilings(shape(features=AVX2, mapped=True)) == {"weights", *used}


def test_the_cache_lies_where_its_layer_does() -> None:
    """Of the head and one layer on the GPU only the layer has a cache."""
    for layers, on_gpu in ((0, 0), (1, 0), (2, 1), (3, 2), (-1, 2), (99, 2)):
        parts = parts_of(UNTIED, shape(gpu_layers=layers, features=AVX2))
        assert parts.get("gpu kv_cache", 0) == on_gpu * 1024 * 128
        assert parts.get("host kv_cache", 0) == (2 - on_gpu) * 1024 * 128
        assert ("gpu compute" in parts) == (layers != 0), "the head has results of its own"
