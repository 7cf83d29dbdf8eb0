"""Training a head of a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from eagle_cases import DRAFTED, trainer_of, write

from edgespec.models.spec import ModelSpec


def test_training_lowers_the_loss_and_goes_on(target: ModelSpec, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path)
    trainer.fit_lens()
    before = trainer.quality()
    checkpoint = tmp_path / "head.pt"
    after = trainer.train(2.0, checkpoint=checkpoint)
    assert after.loss < before.loss
    again = trainer_of(target, tmp_path)
    assert again.train(0.0, checkpoint=checkpoint).loss == pytest.approx(after.loss)
    assert len(after.gains) == 8 and all(0.0 <= part <= 1.0 for part in after.gains)
    info = write(trainer, target, tmp_path / "first.gguf")
    further = trainer_of(target, tmp_path)
    untrained = further.quality().loss
    further.go_on_from_file(info)
    rounded = further.quality().loss
    assert rounded == pytest.approx(after.loss, abs=0.1 * (untrained - after.loss))


def test_bfloat16_learns_as_float32_does(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps of the same texts from the same start: losses fall alike."""
    import torch

    from edgespec.models.exits import trainer as module

    falls = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(module, "fast_dtype", lambda dtype=dtype: dtype)
        trainer = trainer_of(target, tmp_path)
        trainer.fit_lens()
        before, random = trainer.quality().loss, np.random.default_rng(1)
        optimizer = torch.optim.AdamW(list(trainer.parameters.values()))
        for _ in range(20):
            trainer._step(optimizer, 1e-3, random, DRAFTED)
        falls.append(before - trainer.quality().loss)
        assert all(value.dtype == torch.float32 for value in trainer.parameters.values())
    assert min(falls) > 0.0
    assert falls[1] == pytest.approx(falls[0], rel=0.4)
