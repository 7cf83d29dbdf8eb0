"""A model of random weights, and as much measuring as a test can afford."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantize_cases import little_work
from random_gguf import F32, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    little_work(monkeypatch, tmp_path)
