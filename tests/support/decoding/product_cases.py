"""Numbers of ggml's types, and how far two products are apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32, Q4_0, Q4_K, IQ3_S = 0, 2, 12, 21
FAR = 0.02  # root mean square of the difference, over that of the product


def distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))
