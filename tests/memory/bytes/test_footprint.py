"""What is added to llama.cpp's own bytes, on numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from footprint_cases import SPEC, TIED, UNTIED, model, shape, tensor
from laid_out import sizes_by_hand

from edgespec.memory.bytes.config import Device, RunConfig, padded
from edgespec.memory.bytes.footprint import (
    TEXT_TOKEN_BYTES,
    footprint,
    has_packed_weights,
    kv_type_fits,
    loading_bytes,
    runtime_bytes,
    vocabulary_bytes,
)
from edgespec.memory.bytes.simulation import ContextRequest, DeviceBytes
from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.device.track import MOST_FREED_BYTES


def test_caches_are_made_of_blocks_of_256_cells() -> None:
    assert [padded(cells) for cells in (1, 256, 257, 1000, 4096)] == [256, 256, 512, 1024, 4096]


def test_a_block_type_needs_heads_of_whole_blocks() -> None:
    assert not kv_type_fits(SPEC, "q8_0")
    assert all(kv_type_fits(SPEC, kind) for kind in ("f16", "bf16", "f32"))
    longer = replace(SPEC, key_length=(64, 64), value_length=(64, 64))
    assert kv_type_fits(longer, "q8_0") and kv_type_fits(longer, "q4_0")
    assert not kv_type_fits(replace(longer, value_length=(64, 80)), "q4_0"), "any layer counts"


def test_of_floats_only_matrices_that_steps_multiply_by_are_packed() -> None:
    """A file of nothing else is not packed at all."""
    if missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {missing_kernels()}")
    floats = (
        tensor("blk.0.ssm_alpha.weight", (64, 3), "F32"),
        tensor("blk.0.ffn_gate_inp_shexp.weight", (64,), "F32"),
    )
    assert has_packed_weights(model(*floats, tensor("output.weight", (64, 16), "Q4_0")))
    assert not has_packed_weights(model(*floats))


# ------------------------------------------------------------------------------ loading


def test_a_table_lies_beside_its_packed_copy_while_it_is_loaded() -> None:
    """The C library keeps a freed buffer of 68,000 bytes, as it is a small one.

    The header stays: 40 bytes for each of 1,000 tokens.
    """
    plain, packed = shape(512, 64, mapped=False), DeviceBytes(500, 72_608, 0, 0)
    assert loading_bytes(UNTIED, plain, packed) == 40_000 + 500 + 72_608 + 68_000
    many = DeviceBytes(200_000, 60_000, 0, 0)
    assert loading_bytes(UNTIED, plain, many) == 40_000 + 200_000 + 60_000 + 68_000
    late = 40_000 + 500 + 72_608 + 2_304
    assert loading_bytes(TIED, plain, packed) == late, "llama.cpp keeps the table"
    assert loading_bytes(UNTIED, replace(plain, mapped=True), packed) == 0
    assert loading_bytes(UNTIED, plain, DeviceBytes(140_000, 0, 0, 0)) == 0, (
        "read to where it stays"
    )


def test_the_largest_table_is_packed_first_and_its_buffer_is_given_back() -> None:
    """68 MB, then two matrices of 36 MB. Until now 68 MB were planned beside all of them."""
    plain = shape(512, 64, mapped=False)
    spec = model(
        tensor("output.weight", (64, 1_000_000), "Q8_0"),
        tensor("blk.0.attn_q.weight", (64, 1_000_000), "Q4_0"),
        tensor("blk.1.attn_q.weight", (64, 1_000_000), "Q4_0"),
    )
    answer = DeviceBytes(0, 140_000_000, 0, 0)
    assert loading_bytes(spec, plain, answer) == 40_000 + 140_000_000 + 36_000_000
    small = replace(spec, tensors={"output.weight": spec.tensors["output.weight"]})
    assert loading_bytes(small, plain, DeviceBytes(0, 68_000_000, 0, 0)) == 40_000 + 2 * 68_000_000
    many = DeviceBytes(0, 400_000_000, 0, 0)  # of matrices that are smaller
    assert loading_bytes(small, plain, many) == 40_000 + 400_000_000 + MOST_FREED_BYTES


def test_what_goes_to_a_worker_is_read_here_behind_all_else() -> None:
    away = (Device("worker", 1, "worker", "host:1"),)
    shape_ = shape(512, 64, mapped=False, devices=away)
    assert loading_bytes(UNTIED, shape_, DeviceBytes(500, 0, 0, 0)) == 40_000 + 500 + 68_000


def test_loading_counts_as_far_as_the_rest_is_smaller() -> None:
    one = shape(512, 64, mapped=False, max_nodes=1)
    answer = {"host": DeviceBytes(500, 72_608, 10_000, 5_000)}
    parts = {part.name: part.nbytes for part in footprint(UNTIED, one, answer)}
    before = sum(size for name, size in parts.items() if name not in ("loading", "runtime"))
    assert parts.get("loading", 0) == max(0, 40_000 + 500 + 72_608 + 68_000 - before)
    large = {"host": DeviceBytes(500, 72_608, 100_000, 5_000)}
    assert "loading" not in {part.name for part in footprint(UNTIED, one, large)}


# ------------------------------------------------------------------------------ whole runs


# Tokenizer, tokens, merges, bytes of texts, and MiB that llama.cpp allocated for them.
VOCABULARIES = {
    "SmolLM2": ("gpt2", 49_152, 48_900, 365_000, 14.42),
    "Qwen2.5": ("gpt2", 151_936, 151_387, 1_374_000, 39.83),
    "Llama 3": ("gpt2", 128_256, 280_147, 1_070_000, 50.01),
    "Command R": ("gpt2", 256_000, 253_333, 2_768_000, 68.12),
    "Gemma 3": ("llama", 262_144, 0, 2_317_000, 38.68),
    "Gemma 4": ("gemma4", 262_144, 514_906, 2_317_000, 91.5),
    "Llama 2": ("llama", 32_000, 0, 210_000, 4.53),
    "XLM-R": ("t5", 250_048, 0, 2_579_000, 122.62),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tables_of_tokens_are_never_larger_than_planned(name: str) -> None:
    """Merges count: Gemma 4's took 50 MiB more than a plan by tokens alone had for them."""
    tokenizer, tokens, merges, texts, measured = VOCABULARIES[name]
    spec = replace(
        SPEC,
        tokenizer_model=tokenizer,
        vocab_size=tokens,
        num_merges=merges,
        token_text_bytes=texts,
    )
    assert measured <= vocabulary_bytes(spec) / 2**20 <= measured + 5.5
    # The interpreter and its libraries alone take more than 40 MiB.
    assert 40 << 20 < runtime_bytes(spec) - vocabulary_bytes(spec) < 100 << 20


SAID = {"host": DeviceBytes(1000, 200, 300, 40, 55), "gpu": DeviceBytes(5000, 0, 600, 70)}


def test_a_run_is_its_parts() -> None:
    run = shape(mapped=False)
    parts = footprint(UNTIED, run, SAID, drafter_bytes=7777)
    assert {f"{part.device} {part.name}": part.nbytes for part in parts} == {
        "host weights": 1000,
        "host weights_repacked": 200,
        "gpu weights": 5000,
        "host kv_cache": 300,
        "host compute": 40,
        "gpu kv_cache": 600,
        "gpu compute": 70,
        "host work": 55,
        "host logits": 32 * 1000 * 4,
        "host drafter_tables": 7777,
        "host text": TEXT_TOKEN_BYTES * run.cache_cells,
        "host runtime": runtime_bytes(UNTIED),
    }


def test_mapped_weights_are_the_whole_file_but_what_lies_on_devices() -> None:
    parts = footprint(UNTIED, shape(mapped=True), SAID)
    assert parts[0].nbytes == UNTIED.weight_bytes - 5000


def test_parts_of_nothing_are_left_out() -> None:
    names = {part.name for part in footprint(UNTIED, shape(), {"host": DeviceBytes(1, 0, 0, 1)})}
    assert names & {"weights_repacked", "drafter_tables", "kv_cache"} == set()


def test_ceilings_are_what_is_touched_as_it_is_used() -> None:
    def ceilings(run: RunConfig) -> set[str]:
        parts = footprint(UNTIED, run, SAID, drafter_bytes=1)
        return {part.name for part in parts if part.is_ceiling}

    used = {"compute", "work", "logits", "drafter_tables", "text", "runtime"}
    assert ceilings(shape(mapped=False)) == used
    assert ceilings(shape(mapped=True)) == {"weights", *used}


def test_the_cases_of_other_tests_lie_where_their_layers_do() -> None:
    """Of the head and one layer on the GPU only the layer has a cache; a tied table is copied."""
    for layers, on_gpu in ((1, 0), (2, 1), (3, 2)):
        run = shape(devices=(Device("gpu", layers, "GPU0"),))
        (found,) = sizes_by_hand([ContextRequest(TIED, run)])
        assert found["gpu"].cache == on_gpu * 1024 * 128
        assert found["host"].cache == (2 - on_gpu) * 1024 * 128
        assert found["gpu"].weights == 256 + 36_000 + on_gpu * (2304 + 256)
