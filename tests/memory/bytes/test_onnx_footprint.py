"""Bytes of a model on ONNX Runtime, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folder import write_folder

from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.onnx_footprint import onnx_footprint
from edgespec.models.onnx.folder import read_folder_spec

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")


def test_footprint_of_a_folder(tmp_path: Path) -> None:
    """1,000 cells and steps of 32: scores 3 x 2 x 32 x 1,032, joined keys and values 2 x 2 x 16.

    Activations are 32 x (8 x 16 + 3 x 16); the arena takes 1.4 times all of it in float32.
    """
    larger = replace(read_folder_spec(write_folder(tmp_path)), weight_bytes=1_000_000)
    parts = {
        part.name: part.nbytes
        for part in onnx_footprint(larger, RunConfig(1000, 32, 4), drafter_bytes=77)
    }
    compute = 4 * 1.4 * (3 * 2 * 32 * 1032 + 1032 * 16 * 2 * 2 + 32 * (8 * 16 + 3 * 16))
    assert parts["weights"] == 1_200_000
    assert parts["embeddings"] == 4 * 258 * 16
    assert parts["kv_cache"] == 1000 * 48 * 4
    assert parts["compute"] == int(compute)
    assert parts["logits"] == 4 * 258 * 4
    assert parts["drafter_tables"] == 77
