"""A model of random weights, what it wrote, and its tensors in three types: made once a process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from quantize_cases import CHAT
from random_gguf import F32, VOCABULARY, write_model

from edgespec.quantize.imatrix import compute_imatrix
from edgespec.quantize.pieces import Pieces
from edgespec.quantize.quality import Reference, make_reference
from edgespec.quantize.texts import CountedText, write_texts


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32)


@pytest.fixture(scope="session")
def texts(source: Path) -> list[CountedText]:
    return write_texts(source, CHAT, 3, threads=1, seed=4, length=48)


@pytest.fixture(scope="session")
def reference(source: Path, texts: list[CountedText]) -> Reference:
    return make_reference(source, texts, threads=1)


@pytest.fixture(scope="session")
def pieces(source: Path) -> Pieces:
    found = Pieces(source, source.parent / "pieces", allowed=("Q4_0", "Q5_0", "Q8_0"))
    found.make(1, lambda _what, _part: None)
    return found


@pytest.fixture(scope="session")
def tokens() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(VOCABULARY - 1, size=64).tolist() for _ in range(2)]


@pytest.fixture(scope="session")
def matrix(source: Path, tokens: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix") / "imatrix.gguf"
    compute_imatrix(source, tokens, path, threads=1, dataset="random")
    return path
