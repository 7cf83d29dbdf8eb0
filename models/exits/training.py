"""Trains the adapter block of an early exit on the target's own text.

Kangaroo's recipe (arXiv 2404.18911), but the adapter is a whole block with its feed-forward part
and begins as one of the target's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.models.exits.early_exit import ExitInfo
from edgespec.models.exits.network import (
    Tensor,
    Weights,
    causal_attention,
    import_torch,
    rms_norm,
    rotations,
    run_block,
)
from edgespec.models.exits.trainer import Batch, Trainer
from edgespec.models.exits.training_texts import TrainingText
from edgespec.models.spec import ModelSpec


class ExitTrainer(Trainer):
    """One exit in training: after `exit_layer` blocks, with the head's rows `token_ids`.

    `states` are those of `texts` after `exit_layer` blocks. The adapter begins as the target's next
    block, and the head as the target's after the lens that takes the adapter's states nearest to
    the target's last ones. Raises as Trainer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        exit_layer: int,
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Tensor],
    ) -> None:
        parameters = Weights(spec, import_torch().float32).block(exit_layer)
        super().__init__(spec, token_ids, texts, states, parameters)

    def go_on_from_file(self, drafter: ModelSpec, info: ExitInfo) -> None:
        """Begin with what a drafter's file was trained to be: of the same target and exit."""
        weights = Weights(drafter, self._torch.float32)
        values = weights.block(info.exit_layer)
        values["output_norm.weight"] = weights.tensor("output_norm.weight")
        self.go_on_from(values, weights.embedding(), info.token_ids)

    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        shape, states = self._hyperparameters, batch.states
        angles = rotations(shape, self._torch.arange(states.shape[1])[None])
        x = run_block(shape, self.parameters, states, angles, causal_attention)
        yield rms_norm(x, self.parameters["output_norm.weight"], shape.epsilon)
