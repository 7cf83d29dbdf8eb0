"""Distributions over the vocabulary, as they are handed around."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Probabilities of all tokens [V], from which a draft's token was drawn; they sum to 1.
DraftDistribution = NDArray[np.float64] | NDArray[np.float32]
# Token ids [k], or None where every token has its place, and their probabilities [k] or [V].
TargetDistribution = tuple[NDArray[np.int64] | None, NDArray[np.float64]]


def without(distribution: DraftDistribution, token: int) -> DraftDistribution | None:
    """A distribution [V] given that `token` is not drawn again; None where nothing else can be."""
    others: DraftDistribution = distribution.copy()
    others[token] = 0.0
    total = float(others.sum())
    if total <= 0.0:
        return None
    others /= total
    return others
