"""Training exits and heads of a tiny model, and what drafts are counted to gain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from eagle_cases import DRAFTED, trainer_of, write
from exit_texts import written_texts
from random_gguf import Q4_0, VOCABULARY, write_model

from edgespec.exits.texts import load_training_texts, save_training_texts
from edgespec.exits.trainer import agreement_of, gains_of
from edgespec.models.spec import ModelSpec, read_model_spec


def test_gains_are_those_of_rounds_that_follow_one_another() -> None:
    """Two right, two wrong and one right: rounds begin at places 0, 2, 3, 4 with one draft."""
    hits = [np.array([True, True, False, False, True])]
    lengths = np.cumsum([1.0, *gains_of(hits)])
    assert lengths[:3].tolist() == pytest.approx([1.0, 5 / 4, 5 / 3])
    assert lengths[3:].tolist() == pytest.approx([5 / 3] * 6)


def test_gains_of_drafts_that_follow_their_own_are_by_their_place_in_a_round() -> None:
    """The first of a round is always right and the second never: each round of two is two long."""
    hits = [np.array([[True] * 6, [False] * 6])]
    assert agreement_of(hits) == 1.0
    assert gains_of(hits) == pytest.approx([1.0, *[0.0] * 7])


@pytest.fixture
def small(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))


def test_training_an_exit_lowers_the_loss_and_goes_on(small: ModelSpec, tmp_path: Path) -> None:
    import torch

    from edgespec.exits.network import target_states
    from edgespec.exits.trainer import ExitTrainer

    written = written_texts(small)
    save_training_texts(tmp_path / "texts-00000.npz", written, 1.0)
    texts = load_training_texts(tmp_path)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(texts, written, strict=True))
    found = target_states(small, [text.tokens for text in texts], [1, 2])[1]
    states = [[rows] for rows in found]
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    trainer = ExitTrainer(small, [1], ids, texts, states)
    trainer.fit_lens()
    before = trainer.quality()
    checkpoint = tmp_path / "exit.pt"
    after = trainer.train(1.0, checkpoint)
    assert after.loss < before.loss
    again = ExitTrainer(small, [1], ids, texts, states)
    assert again.train(0.0, checkpoint).loss == after.loss
    state = torch.load(checkpoint)
    for name, value in state["values"].items():
        state["values"][name] = value + 1.0  # as if the last steps had gone wrong
    torch.save(state, checkpoint)
    assert again.train(0.0, checkpoint).loss == after.loss
    assert len(after.gains) == 8 and all(0.0 <= part <= 1.0 for part in after.gains)


def test_a_drafter_is_trained_further(small: ModelSpec, tmp_path: Path) -> None:
    """What is read back from its file is what was written, but for the rounding of its types."""
    from edgespec.exits.network import target_states
    from edgespec.exits.trainer import ExitTrainer

    texts = written_texts(small)
    found = target_states(small, [text.tokens for text in texts], [1])[1]
    states = [[rows] for rows in found]
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    trainer = ExitTrainer(small, [1], ids, texts, states)
    first = trainer.train(1.0, tmp_path / "first.pt")
    trainer.write(tmp_path / "first.gguf", {})
    again = ExitTrainer(small, [1], ids, texts, states)
    untrained = again.quality().loss
    again.go_on_from_file(tmp_path / "first.gguf")
    assert again.quality().loss == pytest.approx(first.loss, abs=0.1 * (untrained - first.loss))
    assert again.train(0.0, tmp_path / "again.pt").loss == again.quality().loss


def test_training_a_head_lowers_the_loss_and_goes_on(target: ModelSpec, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path)
    trainer.fit_lens()
    before = trainer.quality()
    checkpoint = tmp_path / "head.pt"
    after = trainer.train(2.0, checkpoint)
    assert after.loss < before.loss
    again = trainer_of(target, tmp_path)
    assert again.train(0.0, checkpoint).loss == pytest.approx(after.loss)
    assert len(after.gains) == 8 and all(0.0 <= part <= 1.0 for part in after.gains)
    info = write(trainer, tmp_path / "first.gguf")
    further = trainer_of(target, tmp_path)
    untrained = further.quality().loss
    further.go_on_from_file(info.file.path)
    rounded = further.quality().loss
    assert rounded == pytest.approx(after.loss, abs=0.1 * (untrained - after.loss))


def test_bfloat16_learns_as_float32_does(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty steps of the same texts from the same start: both losses fall by 0.042 of 0.08.

    After twenty the one of float32 was as high as before: rates are those of a start.
    """
    import torch

    from edgespec.exits import trainer as module

    falls = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(module, "fast_dtype", lambda dtype=dtype: dtype)
        trainer = trainer_of(target, tmp_path)
        trainer.fit_lens()
        before, random = trainer.quality().loss, np.random.default_rng(1)
        optimizer = torch.optim.AdamW(list(trainer.parameters.values()))
        for _ in range(40):
            trainer._step(optimizer, 1e-3, random, DRAFTED)
        falls.append(before - trainer.quality().loss)
        assert all(value.dtype == torch.float32 for value in trainer.parameters.values())
    assert min(falls) > 0.0
    assert falls[1] == pytest.approx(falls[0], rel=0.4)
