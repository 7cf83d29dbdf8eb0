"""Weights of a file as ONNX Runtime multiplies by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from random_gguf import F32, Q4_0, Q8_0, write_model

from edgespec.models.onnx.facts import packed_bits
from edgespec.models.onnx.weights import dequantize, packed_rows, raw_rows
from edgespec.models.spec import ModelSpec, read_model_spec

pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("onnx", reason="the onnx extra is not installed")


pytestmark = pytest.mark.model


def unpacked(spec: ModelSpec, name: str) -> NDArray[np.float32]:
    """What MatMulNBits computes with."""
    tensor = spec.tensors[name]
    parts = []
    for part in packed_rows(spec.path, tensor):
        blocks = part.blocks
        if packed_bits(tensor) == 4:
            blocks = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:2], 32)
        middle = 1 << (packed_bits(tensor) - 1)
        values = (blocks.astype(np.float32) - middle) * part.scales[..., None]
        parts.append(values.reshape(len(values), -1))
    return np.concatenate(parts)


@pytest.mark.parametrize("kind", [Q4_0, Q8_0])
def test_blocks_of_four_and_eight_bits_are_repacked_exactly(tmp_path: Path, kind: Any) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "llama", kind))
    for name in ("blk.0.attn_q.weight", "blk.3.ffn_down.weight", "output.weight"):
        tensor = spec.tensors[name]
        expected = dequantize(tensor, raw_rows(spec.path, tensor))
        assert packed_bits(tensor) == (4 if kind == Q4_0 else 8)
        np.testing.assert_array_equal(unpacked(spec, name), expected)


def test_other_types_lose_less_than_half_of_a_255th_of_their_range(tmp_path: Path) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "llama", F32))
    tensor = spec.tensors["blk.1.ffn_up.weight"]
    expected = dequantize(tensor, raw_rows(spec.path, tensor))
    largest = np.abs(expected.reshape(-1, 32)).max(axis=1, keepdims=True)
    error = np.abs(unpacked(spec, tensor.name) - expected).reshape(-1, 32)
    assert (error <= largest / 127 * 0.5001).all() and error.max() > 0
