"""Training an early exit of a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exit_texts import written_texts
from random_gguf import Q4_0, VOCABULARY, write_model

from edgespec.models.exits.early_exit import read_exit
from edgespec.models.exits.writer import write_exit
from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))


def test_training_lowers_the_loss_and_goes_on(target: ModelSpec, tmp_path: Path) -> None:
    import torch

    from edgespec.models.exits.target_states import target_states
    from edgespec.models.exits.trainer import ExitTrainer
    from edgespec.models.exits.training_texts import load_training_texts, save_training_texts

    written = written_texts(target)
    save_training_texts(tmp_path / "texts-00000.npz", written, 1.0)
    texts = load_training_texts(tmp_path)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(texts, written, strict=True))
    states = target_states(target, [text.tokens for text in texts], [1, 2])[1]
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    trainer = ExitTrainer(target, 1, ids, texts, states)
    trainer.fit_lens()
    before = trainer.quality()
    checkpoint = tmp_path / "exit.pt"
    after = trainer.train(1.0, checkpoint=checkpoint)
    assert after.loss < before.loss
    again = ExitTrainer(target, 1, ids, texts, states)
    assert again.train(0.0, checkpoint=checkpoint).loss == after.loss
    state = torch.load(checkpoint)
    for name, value in state["values"].items():
        state["values"][name] = value + 1.0  # as if the last steps had gone wrong
    torch.save(state, checkpoint)
    assert again.train(0.0, checkpoint=checkpoint).loss == after.loss
    assert len(after.gains) == 8 and all(0.0 <= part <= 1.0 for part in after.gains)


def test_a_drafter_is_trained_further(target: ModelSpec, tmp_path: Path) -> None:
    """What is read back from its file is what was written, but for the rounding of its types."""
    from edgespec.models.exits.target_states import target_states
    from edgespec.models.exits.trainer import ExitTrainer

    texts = written_texts(target)
    states = target_states(target, [text.tokens for text in texts], [1])[1]
    ids = np.arange(0, VOCABULARY, 2, dtype=np.int32)
    trainer = ExitTrainer(target, 1, ids, texts, states)
    first = trainer.train(1.0)
    path = tmp_path / "first.gguf"
    write_exit(
        target,
        path,
        exit_layer=1,
        token_ids=ids,
        head=trainer.head(),
        adapter=trainer.block(),
        norm=trainer.norm(),
        report={},
    )
    drafter = read_model_spec(path)
    info = read_exit(drafter)
    assert info is not None
    more = np.arange(0, VOCABULARY, dtype=np.int32)  # another head
    again = ExitTrainer(target, 1, more, texts, states)
    untrained = again.quality(ids).loss
    again.go_on_from_file(drafter, info)
    assert again.quality(ids).loss == pytest.approx(first.loss, abs=0.1 * (untrained - first.loss))
    assert again.train(0.0).loss == again.quality().loss
