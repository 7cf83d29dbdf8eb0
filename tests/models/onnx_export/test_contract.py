"""What is done to an exporter's graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_cases import MAKE, WINDOWED, run, step
from tiny_folder import TinyModel

from edgespec.errors import UnsupportedError
from edgespec.models.onnx_export.contract import (
    cache_shapes,
    halve_tables,
    split_linear,
    to_contract,
)

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")

import onnx


@pytest.mark.parametrize("past", [0, 5])
def test_an_exported_graph_becomes_one_of_the_contract(past: int) -> None:
    tiny, inputs = TinyModel(), step(past, 4)
    model = tiny.graph(exported=True)
    exported = run(model, inputs)
    to_contract(model, WINDOWED)
    onnx.checker.check_model(model)
    cut = run(model, inputs)
    np.testing.assert_allclose(cut["logits"], exported["logits"][0, [3, 0]], atol=1e-5)
    for layer in range(2):
        for what in ("key", "value"):
            new = exported[f"present.{layer}.{what}"][:, :, past:]
            np.testing.assert_array_equal(cut[f"new_{what}.{layer}"], new)
    expected = run(tiny.graph(), inputs)
    assert cut.keys() == expected.keys()
    np.testing.assert_allclose(cut["logits"], expected["logits"], atol=1e-5)
    assert cache_shapes(model) == [(2, 8, 8), (2, 4, 4)]


def test_presents_that_are_no_concatenation_are_sliced() -> None:
    """Some exporters join the past in another layout."""
    model, inputs = TinyModel().graph(exported=True), step(5, 4)
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name.startswith("present."):
                node.output[place] = f"{name}.joined"
        for place, name in enumerate(node.input):
            if name.startswith("present."):
                node.input[place] = f"{name}.joined"
    for value in model.graph.output:
        if value.name.startswith("present."):
            copy = MAKE.make_node("Identity", [f"{value.name}.joined"], [value.name])
            model.graph.node.append(copy)
    exported = run(model, inputs)
    to_contract(model, WINDOWED)
    np.testing.assert_array_equal(
        run(model, inputs)["new_key.1"], exported["present.1.key"][:, :, 5:]
    )


def test_only_the_wanted_rows_pass_the_head() -> None:
    model = TinyModel().graph(exported=True)
    to_contract(model, WINDOWED)
    head = next(node for node in model.graph.node if "head" in node.input)
    assert head.input[0] == "hidden_of_rows"


def test_a_graph_that_is_no_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"other inputs or outputs than a decoder's \(atten"):
        to_contract(TinyModel().graph(), WINDOWED)


def small_graph(nodes: list[Any], constants: dict[str, Any], integer: bool = False) -> Any:
    kind = onnx.TensorProto.INT64 if integer else onnx.TensorProto.FLOAT
    graph = MAKE.make_graph(
        nodes,
        "small",
        [MAKE.make_tensor_value_info("x", kind, None)],
        [MAKE.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return MAKE.make_model(graph, opset_imports=[MAKE.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("transposed", [0, 1])
def test_linear_layers_are_products_and_sums(transposed: int) -> None:
    random = np.random.default_rng(1)
    weight = random.normal(0, 1, (3, 5) if transposed else (5, 3)).astype(np.float32)
    constants = {"w": weight, "b": np.arange(3, dtype=np.float32)}
    model = small_graph(
        [MAKE.make_node("Gemm", ["x", "w", "b"], ["y"], transB=transposed)], constants
    )
    inputs = {"x": random.normal(0, 1, (2, 5)).astype(np.float32)}
    before = run(model, inputs)["y"]
    split_linear(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Add"]
    np.testing.assert_allclose(run(model, inputs)["y"], before, rtol=1e-5)


def test_large_tables_are_kept_in_half_precision() -> None:
    table = np.random.default_rng(1).normal(0, 1, (1 << 15, 32)).astype(np.float32)
    model = small_graph([MAKE.make_node("Gather", ["t", "x"], ["y"])], {"t": table}, integer=True)
    halve_tables(model)
    assert model.graph.initializer[0].data_type == onnx.TensorProto.FLOAT16
    found = run(model, {"x": np.array([3, 9])})["y"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, table[[3, 9]], rtol=1e-3)
