"""How sure a model is of its next token."""

from __future__ import annotations

import math

import numpy as np

from edgespec.backends.base import Logits

_NOTHING = -80.0  # of a log-probability: exp of it adds nothing to an entropy
_LEAST, _MOST = 1e-3, 1e30  # sums of exponentials that are exact enough


def entropy_nats(row: Logits) -> float:
    """Entropy of the softmax of logits [V], in nats; minus infinity is a token without a chance.

    Logits are not shifted by their largest first, which would read them once more, unless their
    exponentials do not fit. No BLAS: its threads would wait beside those of the next step.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(row)
        total = float(weights.sum())
        weights *= row
        weighted = float(weights.sum())
    if _LEAST < total < _MOST and math.isfinite(weighted):
        return max(0.0, math.log(total) - weighted / total)
    most = row.max()
    if not math.isfinite(most):  # nothing can be chosen, which is for the sampler to say
        return math.nan
    return entropy_nats(np.maximum(row - most, _NOTHING))
