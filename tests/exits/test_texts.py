"""Texts that a model writes for training: how many at once, and where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_gguf import Q4_0, write_model

from edgespec.errors import DoesNotFitError
from edgespec.exits.texts import places_of
from edgespec.models.spec import read_model_spec


def test_a_model_that_does_not_fit_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_model_spec(write_model(tmp_path / "model.gguf", "llama", Q4_0))
    assert places_of(spec) == 128
    monkeypatch.setattr("edgespec.memory.device.host.available_bytes", lambda: 1 << 20)
    with pytest.raises(DoesNotFitError, match=r"the caches of 4 conversations"):
        places_of(spec)
