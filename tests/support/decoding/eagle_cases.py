"""Heads of a tiny model while they are trained, and the files they are written to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from exit_texts import written_texts
from random_gguf import VOCABULARY

from edgespec.exits.files import HeadInfo, read_head
from edgespec.exits.target import layers_read
from edgespec.models.spec import ModelSpec

if TYPE_CHECKING:
    from edgespec.exits.texts import TrainingText
    from edgespec.exits.trainer import HeadTrainer


IDS = np.arange(0, VOCABULARY, 2, dtype=np.int32)
DRAFTED = 4  # of a chain


def texts_of(target: ModelSpec, count: int = 60) -> list[TrainingText]:
    return written_texts(target, count, layers=layers_read(target.num_layers))


def trainer_of(target: ModelSpec, folder: Path) -> HeadTrainer:
    from edgespec.exits.texts import load_training_texts, save_training_texts, text_files
    from edgespec.exits.trainer import HeadTrainer, stored_states

    if not text_files(folder):
        save_training_texts(folder / "texts-00000.npz", texts_of(target), 1.0)
    layers = layers_read(target.num_layers)
    states = stored_states(target, folder, layers)
    return HeadTrainer(target, layers, IDS, load_training_texts(folder), states)


def write(trainer: HeadTrainer, path: Path) -> HeadInfo:
    trainer.write(path, {})
    info = read_head(path)
    assert info is not None
    return info
