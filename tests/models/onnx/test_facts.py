"""What a graph has to know of a model, and which models it cannot be made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_gguf import Q8_0, write_model

from edgespec.errors import UnsupportedError
from edgespec.models.onnx.facts import read_facts
from edgespec.models.spec import read_model_spec

pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("onnx", reason="the onnx extra is not installed")


pytestmark = pytest.mark.model


def test_other_architectures_are_refused_with_the_alternative(tmp_path: Path) -> None:
    path = write_model(tmp_path / "gemma2.gguf", "gemma2", Q8_0)
    with pytest.raises(UnsupportedError, match="not gemma2") as caught:
        read_facts(read_model_spec(path))
    assert "llama.cpp" in caught.value.hint
