"""Graphs of the contract: running them, and inputs for a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_folder import HEADS, LENGTHS

onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")

WINDOWED = (False, True)
MAKE = onnx.helper


def run(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    values = session.run(names, {name: inputs[name] for name in wanted})
    return dict(zip(names, values, strict=True))


def step(past: int, count: int) -> dict[str, Any]:
    """Inputs of the contract, and of what an exporter writes, with random numbers."""
    random = np.random.default_rng(past)

    def normal(*shape: int) -> Any:
        return random.normal(0, 1, shape).astype(np.float32)

    biases = normal(1, 2, count, past + count)
    inputs = {
        "input_ids": random.integers(0, 258, (1, count)),
        "position_ids": np.arange(past, past + count)[None],
        "rows": np.array([count - 1, 0]),
        "attention_mask": biases,
        "attention_bias": biases[:, :1],
        "attention_bias_window": biases[:, 1:],
    }
    for layer, (heads, length) in enumerate(zip(HEADS, LENGTHS, strict=True)):
        for what in ("key", "value"):
            rows = normal(1, heads, past, length)
            inputs |= {f"past_{what}.{layer}": rows, f"past_key_values.{layer}.{what}": rows}
    return inputs
