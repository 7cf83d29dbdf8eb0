"""Models that leave out blocks while one looks which are missed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_gguf import Q4_0, Q8_0, write_model

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.skipping import SkippingBackend
from edgespec.backends.tree import DraftTree
from edgespec.models.spec import ModelSpec, read_model_spec

SETTINGS = LlamaSettings(context_size=256, batch_size=16, max_nodes=8, max_leaves=1)
TEXT = [3, 200, 7, 101, 55, 8]


@pytest.fixture(params=[("llama", Q4_0), ("qwen2", Q8_0)], ids=["llama", "qwen2"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "target.gguf", *request.param))


def test_nothing_left_out_is_the_model(target: ModelSpec) -> None:
    rows = []
    for backend in (LlamaBackend(target.path, SETTINGS), SkippingBackend(target.path, SETTINGS)):
        rows.append(backend.verify(DraftTree.chain(TEXT)).copy())
        if isinstance(backend, SkippingBackend):
            similar = backend.take_similarities()
            assert set(similar) == {1, 2, 3}
            assert all(-1.0 <= value <= 1.0 for value in similar.values())
            assert backend.take_similarities() == {}
        backend.close()
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ZeroDivisionError])
def test_what_goes_wrong_while_looking_is_raised(
    target: ModelSpec, monkeypatch: pytest.MonkeyPatch, problem: type[BaseException]
) -> None:
    def fails(*_arguments: Any) -> None:
        if problem is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        else:
            raise problem

    backend = SkippingBackend(target.path, SETTINGS)
    monkeypatch.setattr(backend, "_see", fails)
    with pytest.raises(problem):
        backend.verify(DraftTree.chain(TEXT))
    monkeypatch.undo()
    backend.truncate(0)
    assert np.isfinite(backend.verify(DraftTree.chain(TEXT))).all()
    backend.close()
