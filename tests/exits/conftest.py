"""Tiny models that heads and early exits are made for."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_gguf import F32, Q4_0, Q8_0, write_model, write_untrained

from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", F32))


@pytest.fixture(params=[("llama", Q4_0), ("qwen2", Q8_0)], ids=["llama", "qwen2"])
def llama_or_qwen2(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "target.gguf", *request.param))


@pytest.fixture
def drafter(llama_or_qwen2: ModelSpec, tmp_path: Path) -> ModelSpec:
    """An early exit that nobody trained."""
    return write_untrained(llama_or_qwen2, tmp_path / "exit.gguf", 2)
