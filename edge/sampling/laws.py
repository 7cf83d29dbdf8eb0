"""Distributions over the vocabulary, as they are handed around."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Probabilities of all tokens [V], from which a draft's token was drawn; they sum to 1.
DraftLaw = NDArray[np.float64] | NDArray[np.float32]
# Token ids [k], or None where every token has its place, and their probabilities [k] or [V].
TargetLaw = tuple[NDArray[np.int64] | None, NDArray[np.float64]]
