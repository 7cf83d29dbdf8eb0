"""Trains a head on the target's own text, on what it would draft itself behind every place.

EAGLE-3's recipe (arXiv 2503.01840): the head learns from the first tokens of a chain that it drafts
from its own states (training-time test), by the target's distribution alone and not by its states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.models.exits.eagle import Unrolled, head_shape
from edgespec.models.exits.eagle_file import HeadInfo, values_of
from edgespec.models.exits.eagle_start import first_parameters, places_of
from edgespec.models.exits.network import (
    Tensor,
    Weights,
    hyperparameters_of,
    import_torch,
    rms_norm,
)
from edgespec.models.exits.trainer import Batch, Trainer
from edgespec.models.exits.training_texts import TrainingText, is_held_out
from edgespec.models.spec import ModelSpec

_FIRST_TEXTS = 100  # from which it is computed what a head begins as
_DRAFTED = 4  # tokens of a chain that it learns from at last,
_FIRST, _SECOND = 0.5, 0.8  # parts of the training before which it learns from one, and from two


class EagleTrainer(Trainer):
    """One head in training, with the head's rows `token_ids`.

    `states` are the target's of `texts`, those of its layers side by side. Raises as Trainer.
    """

    ahead = 1
    warm_up = 0.06  # its later drafts begin far off

    def __init__(
        self,
        spec: ModelSpec,
        token_ids: NDArray[np.int32],
        texts: Sequence[TrainingText],
        states: Sequence[Tensor],
    ) -> None:
        target = hyperparameters_of(spec)
        self.shape = head_shape(target)
        some = [number for number in range(len(texts)) if not is_held_out(number)][:_FIRST_TEXTS]
        places = places_of(spec, target, [texts[i] for i in some], [states[i] for i in some])
        parameters = first_parameters(spec, target, places)
        super().__init__(spec, token_ids, texts, states, parameters)
        self._embedding = Weights(spec, import_torch().bfloat16).embedding()

    def go_on_from_file(self, info: HeadInfo) -> None:
        """Begin with what a head's file was trained to be: of the same target and layers."""
        values = values_of(info)
        self.go_on_from(values, values["output.weight"], info.token_ids.tolist())

    def _learnt(self, part: float) -> int:
        """Each token of a chain costs as much as the first one, and is worth little before it."""
        return 1 if part < _FIRST else 2 if part < _SECOND else _DRAFTED

    def _drafted(self, batch: Batch) -> Iterator[Tensor]:
        embeddings = self._embedding[batch.tokens].float()
        unrolled = Unrolled(self.shape, self.parameters, embeddings, batch.states)
        for state in unrolled.states(_DRAFTED):
            yield rms_norm(state, self.parameters["output_norm.weight"], self.shape.epsilon)
