"""What is no adapter of a model is refused by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_gguf import write_adapter
from random_gguf import F32, write_model

import edgespec
from edgespec.errors import ModelFileError, ModelNotFoundError, UnsupportedError
from edgespec.models.adapter import adapters_of
from edgespec.models.spec import read_model_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lora") / "model.gguf", "llama", F32)


def test_names_may_have_scales(model: Path, tmp_path: Path) -> None:
    spec, path = read_model_spec(model), write_adapter(tmp_path / "a=b.gguf", model)
    assert adapters_of([str(path), f"{path}=0.5", f"{path}=-1"], spec) == (
        (path, 1.0),
        (path, 0.5),
        (path, -1.0),
    )
    with pytest.raises(UnsupportedError, match=r"the scale of a=b\.gguf must be -1000 to 1000"):
        adapters_of([f"{path}=nan"], spec)
    with pytest.raises(ModelNotFoundError, match="nothing"):
        adapters_of([str(tmp_path / "nothing.gguf")], spec)
    with pytest.raises(ModelFileError, match=r"model\.gguf is no LoRA adapter"):
        adapters_of([str(model)], spec)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kind": "control_vector"}, "is no LoRA adapter"),
        ({"arch": "qwen2"}, "is an adapter of qwen2 models, and model.gguf is llama"),
        ({"leave": "blk.2.ffn_down.weight.lora_b"}, "has one matrix of two for blk.2.ffn_down.w"),
        ({"row": "blk.1.attn_q.weight"}, "for blk.1.attn_q.weight of 64 x 64"),
        ({"leave": ("lora_a", "lora_b")}, "changes nothing"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = write_adapter(tmp_path / "mine.gguf", model, **changes)
    with pytest.raises(ModelFileError, match=r"^mine\.gguf ") as caught:
        edgespec.plan(model, lora=[str(path)])
    assert problem in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("changes", "problem"), [({"exact": True}, "--exact"), ({"backend": "onnx"}, "ONNX")]
)
def test_settings_that_take_no_adapters_say_so(
    model: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = write_adapter(tmp_path / "mine.gguf", model)
    with pytest.raises(UnsupportedError, match="is not possible") as caught:
        edgespec.plan(model, lora=[str(path)], **changes)
    assert problem.removeprefix("--") in str(caught.value)
