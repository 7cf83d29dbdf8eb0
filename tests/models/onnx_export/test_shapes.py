"""Shapes of a graph for devices that want them fixed."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_folder import TinyModel

from edgespec.models.onnx_export.contract import (
    freeze_shapes,
    to_contract,
)

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")

from onnx_cases import WINDOWED, run, step


def test_shapes_are_frozen_and_nothing_else() -> None:
    pytest.importorskip("sympy", reason="comes with the export extra")
    model, inputs = TinyModel().graph(exported=True), step(5, 4)
    to_contract(model, WINDOWED)
    before = run(model, inputs)
    freeze_shapes(model)
    after = run(model, inputs)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    asked = [node for node in model.graph.node if node.op_type == "Shape"]
    assert asked == []
