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
    path, plain = (write_adapter(tmp_path / f"{name}.gguf", model) for name in ("a=b", "c"))
    named = [str(path), f"{path}=0.5", f"{path}=-1", str(plain)]
    found = adapters_of(named, read_model_spec(model))
    assert found == ((path, 1.0), (path, 0.5), (path, -1.0), (plain, 1.0))


@pytest.mark.parametrize(
    ("changes", "asked", "kind", "problem"),
    [
        ({}, {"lora": "mine.gguf=nan"}, UnsupportedError, "the scale of mine.gguf must be -1000 "),
        ({}, {"lora": "nothing.gguf"}, ModelNotFoundError, "nothing.gguf"),
        ({}, {"lora": "model.gguf"}, ModelFileError, "model.gguf is no LoRA adapter"),
        ({"kind": "control_vector"}, {}, ModelFileError, "mine.gguf is no LoRA adapter"),
        ({"arch": "qwen2"}, {}, ModelFileError, "mine.gguf is an adapter of qwen2 models, and mo"),
        (
            {"leave": "blk.2.ffn_down.weight.lora_b"},
            {},
            ModelFileError,
            "one matrix of two for blk",
        ),
        ({"row": "blk.1.attn_q.weight"}, {}, ModelFileError, "for blk.1.attn_q.weight of 64 x 64"),
        ({"leave": ("lora_a", "lora_b")}, {}, ModelFileError, "mine.gguf changes nothing"),
        ({}, {"exact": True}, UnsupportedError, "exact is not possible with lora"),
        ({}, {"backend": "onnx"}, UnsupportedError, "lora is not possible: ONNX Runtime"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], asked: Any, kind: Any, problem: str
) -> None:
    """Each with a hint, but for a scale."""
    write_adapter(tmp_path / "mine.gguf", model, **changes)
    named = model if asked.get("lora") == model.name else tmp_path / asked.get("lora", "mine.gguf")
    with pytest.raises(kind) as caught:
        edgespec.plan(model, **{**asked, "lora": [str(named)]})
    assert problem in str(caught.value) and (caught.value.hint or "scale" in problem)
