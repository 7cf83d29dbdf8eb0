"""Heads of a tiny model while they are trained, and the files they are written to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from exit_texts import written_texts
from random_gguf import VOCABULARY

from edgespec.models.exits.eagle import HeadInfo, layers_read, read_head, write_head
from edgespec.models.spec import ModelSpec

if TYPE_CHECKING:
    from edgespec.models.exits.trainer import EagleTrainer
    from edgespec.models.exits.training_texts import TrainingText


IDS = np.arange(0, VOCABULARY, 2, dtype=np.int32)
DRAFTED = 4  # of a chain


def texts_of(target: ModelSpec, count: int = 60) -> list[TrainingText]:
    return written_texts(target, count, layers=layers_read(target.num_layers))


def trainer_of(target: ModelSpec, folder: Path) -> EagleTrainer:
    from edgespec.models.exits.target_states import StoredStates
    from edgespec.models.exits.trainer import EagleTrainer
    from edgespec.models.exits.training_texts import (
        load_training_texts,
        save_training_texts,
        text_files,
    )

    if not text_files(folder):
        save_training_texts(folder / "texts-00000.npz", texts_of(target), 1.0)
    states = StoredStates(target, folder, layers_read(target.num_layers))
    return EagleTrainer(target, IDS, load_training_texts(folder), states)


def write(trainer: EagleTrainer, target: ModelSpec, path: Path) -> HeadInfo:
    write_head(
        target,
        path,
        shape=trainer.shape,
        layers=layers_read(target.num_layers),
        token_ids=IDS,
        head=trainer.head(),
        block=trainer.block(),
        norm=trainer.norm(),
        report={},
    )
    info = read_head(path)
    assert info is not None
    return info
