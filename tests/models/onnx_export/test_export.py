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

import pytest
from tiny_folder import write_tokenizer

from edgespec.cli.main import main
from edgespec.errors import EdgespecError, MissingDependencyError, ModelFileError, UnsupportedError
from edgespec.models.onnx.folder import read_model
from edgespec.models.onnx_export import export as onnx_export
from edgespec.models.onnx_export.export import count_parameters, export_model

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")


# --------------------------------------------------------------------------------- the graph


# ---------------------------------------------------------------------------------- errors


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
