"""Layers: which slide, which recur, and what each keeps of a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spec_cases import SSM, read


def test_numbers_by_layer(tmp_path: Path) -> None:
    """As in OpenELM, whose layers differ in heads and width."""
    spec = read(
        tmp_path,
        "openelm",
        attention__head_count=[4, 8],
        attention__head_count_kv=[1, 2],
        feed_forward_length=[32, 64],
        attention__key_length=8,
        attention__value_length=4,
    )
    assert (spec.num_heads, spec.num_kv_heads) == ((4, 8), (1, 2))
    assert spec.feed_forward_size == (32, 64)
    assert spec.kv_values_per_token == (1 + 2) * (8 + 4)


def sliding(folder: Path, arch: str, /, num_layers: int, window: int | None, **changes: Any) -> str:
    """The layers as a word, `l` for local (sliding) and `g` for global, and the window."""
    spec = read(folder, arch, block_count=num_layers, attention__sliding_window=window, **changes)
    return "".join("l" if slides else "g" for slides in spec.is_sliding) + f" {spec.sliding_window}"


@pytest.mark.parametrize(
    ("arch", "num_layers", "window", "expected"),
    [
        ("gemma3", 8, 512, "lllllgll 512"),
        ("gemma3", 8, None, "gggggggg 0"),
        ("gemma2", 4, None, "lglg 4096"),
        ("gemma2", 4, 64, "lglg 64"),
        ("gpt-oss", 4, 128, "lglg 128"),
        ("cohere2", 5, 64, "lllgl 64"),
        ("cohere2moe", 5, 64, "glllg 64"),
        ("gemma3n", 6, 64, "llllgl 64"),
        ("llama4", 5, None, "lllgl 8192"),
        ("llama4", 5, 64, "lllgl 8192"),
        ("llama4", 5, 0, "ggggg 0"),
        ("smallthinker", 5, 64, "glllg 4096"),
        ("smallthinker", 5, None, "ggggg 0"),
        ("exaone4", 5, None, "ggggg 0"),
        ("exaone4", 5, 64, "ggggg 64"),  # none slides, and llama.cpp says so nevertheless
        ("exaone4", 64, None, "lllg" * 16 + " 4096"),
        # llama.cpp does not slide here, whatever the file says.
        ("llama", 3, 64, "ggg 0"),
        ("qwen2", 3, 64, "ggg 0"),
        ("phi3", 3, 64, "ggg 0"),
        ("unheard-of", 3, 64, "ggg 0"),
        # These need a pattern in the file.
        ("mimo2", 3, 64, "ggg 0"),
    ],
)
def test_sliding_layers(
    tmp_path: Path, arch: str, num_layers: int, window: int | None, expected: str
) -> None:
    assert sliding(tmp_path, arch, num_layers, window) == expected


@pytest.mark.parametrize(
    ("arch", "pattern", "expected"),
    [
        ("gemma3", 2, "lglg 64"),
        ("gemma3", 0, "llll 64"),
        ("gemma3", [True, True, False, True], "llgl 64"),
        ("mimo2", [False, True, False, True], "glgl 64"),
        ("mimo2", [1, 0, 0, 1], "lggl 64"),
        ("mimo2", [True], "lggg 64"),
        ("mimo2", [True] * 2000, "gggg 0"),
        ("mimo2", [False] * 4, "gggg 0"),
    ],
)
def test_sliding_pattern_of_the_file(
    tmp_path: Path, arch: str, pattern: Any, expected: str
) -> None:
    found = sliding(tmp_path, arch, 4, 64, attention__sliding_window_pattern=pattern)
    assert found == expected


def test_sliding_layers_have_heads_of_their_own_size(tmp_path: Path) -> None:
    """As in Gemma 4, whose last layers also reuse the cache of earlier ones."""
    spec = read(
        tmp_path,
        "gemma4",
        block_count=4,
        attention__sliding_window=64,
        attention__sliding_window_pattern=[True, False, True, False],
        attention__key_length=32,
        attention__value_length=32,
        attention__key_length_swa=8,
        attention__value_length_swa=4,
        attention__shared_kv_layers=2,
    )
    assert (spec.key_length, spec.value_length) == ((8, 32, 8, 32), (4, 32, 4, 32))
    assert spec.num_kv_heads == (2, 2, 0, 0)
    assert spec.kv_values_per_token == 2 * (8 + 4) + 2 * (32 + 32)


def test_gemma3n_caches_twenty_layers(tmp_path: Path) -> None:
    spec = read(tmp_path, "gemma3n", block_count=30, attention__sliding_window=64)
    assert spec.num_kv_heads == (2,) * 20 + (0,) * 10


def test_latent_attention_caches_no_values(tmp_path: Path) -> None:
    """DeepSeek V2: one head of 576 latent values a layer."""
    spec = read(
        tmp_path,
        "deepseek2",
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    assert spec.kv_values_per_token == 2 * 576


def test_prediction_layers_are_not_cached(tmp_path: Path) -> None:
    spec = read(tmp_path, "glm4moe", block_count=3, nextn_predict_layers=1)
    assert (spec.num_layers, spec.num_prediction_layers) == (3, 1)
    assert spec.num_kv_heads == (2, 2, 0)
    assert "the last layer predicts further tokens" in spec.notes[0]


def tensors_of(name: str, layers: str) -> dict[str, Any]:
    """A tensor in those layers that have a 1."""
    return {f"blk.{i}.{name}.weight": (1, None) for i, one in enumerate(layers) if one == "1"}


@pytest.mark.parametrize("arch", ["mamba2", "a-new-ssm"])
def test_recurrent_models_cache_nothing(tmp_path: Path, arch: str) -> None:
    no_heads = {"attention__head_count": None, "attention__head_count_kv": None}
    spec = read(tmp_path, arch, tensors=tensors_of("ssm_in", "11"), **no_heads)
    assert spec.keeps_state and spec.is_recurrent_layer == (True, True)
    assert spec.kv_values_per_token == 0


@pytest.mark.parametrize(
    ("arch", "state", "recurrent", "heads", "cached"),
    [
        ("jamba", "ssm_in", "1010", [0, 2, 0, 2], (0, 2, 0, 2)),
        ("a-new-hybrid", "ssm_out", "1010", 2, (0, 2, 0, 2)),
        ("rwkv-and-more", "time_mix_key", "1110", 2, (0, 0, 0, 2)),
        ("falcon-h1", "ssm_in", "1111", 2, (2, 2, 2, 2)),
        ("qwen3next", "ssm_conv1d", "1110", 2, (0, 0, 0, 2)),
        ("nemotron_h", "ssm_in", "1001", [0, 0, 2, 0], (0, 0, 2, 0)),
    ],
)
def test_hybrid_layers(
    tmp_path: Path,
    arch: str,
    state: str,
    recurrent: str,
    heads: int | list[int],
    cached: tuple[int, ...],
) -> None:
    spec = read(
        tmp_path,
        arch,
        block_count=4,
        attention__head_count_kv=heads,
        tensors=tensors_of(state, recurrent),
    )
    assert spec.keeps_state
    assert "".join(str(int(one)) for one in spec.is_recurrent_layer) == recurrent
    assert spec.num_kv_heads == cached


def test_lightning_attention_keeps_a_state(tmp_path: Path) -> None:
    """Of MiniMax-01: a gate beside one matrix for queries, keys and values."""
    tensors = tensors_of("attn_qkv", "10") | tensors_of("attn_gate", "11")
    spec = read(tmp_path, "minimax-01", tensors=tensors)
    assert spec.is_recurrent_layer == (True, False)
    assert spec.num_kv_heads == (0, 2)


def test_keys_alone_make_no_state(tmp_path: Path) -> None:
    """Converters may write them for any model; llama.cpp's test program does."""
    spec = read(tmp_path, "llama", **SSM)
    assert not spec.keeps_state and spec.num_kv_heads == (2, 2)


def test_lfm2_convolution_layers(tmp_path: Path) -> None:
    """Only the attention layers slide."""
    changes = {"attention__head_count_kv": [0, 2], "tensors": tensors_of("shortconv.conv", "10")}
    spec = read(tmp_path, "lfm2", attention__sliding_window=64, **changes)
    assert spec.is_sliding == (False, True)
