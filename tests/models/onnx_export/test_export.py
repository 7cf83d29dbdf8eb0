"""Export: what is refused, what is left behind, and what is done to an exporter's graph."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_folder import HEADS, LENGTHS, TinyModel, write_tokenizer

from edgespec.cli.main import main
from edgespec.errors import EdgespecError, MissingDependencyError, ModelFileError, UnsupportedError
from edgespec.models.onnx.folder import read_model
from edgespec.models.onnx_export import export as onnx_export
from edgespec.models.onnx_export.contract import (
    cache_shapes,
    halve_tables,
    split_linear,
    to_contract,
)
from edgespec.models.onnx_export.export import count_parameters, export_model
from edgespec.models.onnx_export.shapes import freeze_shapes

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")

import onnx
import onnxruntime

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


# --------------------------------------------------------------------------------- the graph


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


# ---------------------------------------------------------------------------------- refusals


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    entries = {name: {"dtype": "F16", "shape": shape} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face folder as far as is looked at before torch is."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny"}', encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json")
    write_safetensors(folder / "model.safetensors", {"a": [10, 20], "b": [7]})
    return folder


@pytest.fixture
def with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "_require_packages", lambda: None)


def test_parameters_are_counted_without_reading_weights(source: Path) -> None:
    write_safetensors(source / "more.safetensors", {"c": [3, 3]})
    assert count_parameters(source) == 10 * 20 + 7 + 9
    (source / "more.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelFileError, match="is not a safetensors file"):
        count_parameters(source)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("config.json"), "SOURCE has no config.json"),
        (without("tokenizer.json"), "SOURCE has no tokenizer.json"),
        (without("model.safetensors"), "SOURCE has no weights (*.safetensors)"),
        (shutil.rmtree, "SOURCE is not a folder"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    source: Path, change: Callable[[Path], None], message: str
) -> None:
    change(source)
    with pytest.raises(EdgespecError) as refused:
        export_model(source, source.parent / "out")
    assert str(refused.value).replace(str(source), "SOURCE") == message
    assert refused.value.hint


def test_a_missing_extra_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError) as refused:
        export_model(source, source.parent / "out")
    assert refused.value.hint == "pip install 'edgespec[export]'"


@pytest.mark.usefixtures("with_packages")
def test_an_existing_folder_is_not_written_over(source: Path) -> None:
    with pytest.raises(UnsupportedError, match="exists already"):
        export_model(source, source)


@pytest.mark.usefixtures("with_packages")
def test_a_full_disk_is_seen_before_anything_is_done(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=2000))
    with pytest.raises(UnsupportedError, match="MiB of disk for a moment"):
        export_model(source, source.parent / "new" / "out")
    assert list((source.parent / "new").iterdir()) == []


@pytest.mark.usefixtures("with_packages")
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_export_that_ends_early_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def stop(export: Any) -> None:
        (export.work / "exact").mkdir()
        raise problem

    monkeypatch.setattr("edgespec.models.onnx_export.export._Export.run", stop)
    target = source.parent / "new" / "out"
    with pytest.raises((KeyboardInterrupt, UnsupportedError)):
        export_model(source, target)
    assert list(target.parent.iterdir()) == []


def test_command_line(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["edgespec", "models", "export", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().err.replace(str(source), "SOURCE")

    status, told = call(str(source), "--bits", "5")
    assert status == 2
    assert "--bits 5 is neither 4 nor 8" in told
    (source / "config.json").unlink()
    assert call(str(source)) == (
        1,
        "error: SOURCE has no config.json\n\nhint: name the folder of a Hugging Face model\n",
    )


# ------------------------------------------------------------------------------- all of it


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "optimum")),
    reason="the export extra is not installed",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3", "gemma3_text"])
def test_a_model_of_transformers(kind: str, tmp_path: Path) -> None:
    """Random weights; the export itself compares with transformers, on a chain and on a tree."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 258,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
    }
    if kind != "gpt_neox":
        sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    if kind == "gemma3_text":
        sizes |= {"sliding_window": 8}
    layers = ["sliding_attention", "full_attention"] if kind == "gemma3_text" else None
    config = transformers.AutoConfig.for_model(
        kind, **sizes, **({"layer_types": layers} if layers else {})
    )
    torch.manual_seed(0)
    source = tmp_path / "source"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    write_tokenizer(source / "tokenizer.json")
    export_model(source, tmp_path / "out", bits=8)
    spec = read_model(tmp_path / "out")
    assert (spec.arch, spec.num_layers, spec.vocab_size, spec.file_type) == (kind, 2, 258, "INT8")
    assert spec.num_kv_heads == ((4, 4) if kind == "gpt_neox" else (2, 2))
    assert spec.is_sliding == ((True, False) if kind == "gemma3_text" else (False, False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
