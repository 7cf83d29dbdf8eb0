"""The best tokens of a row of logits, cheaply: what token recycling keeps of a verified node."""

from __future__ import annotations

import numpy as np

from edgespec.backends.base import Logits
from edgespec.drafting.constants import SPREAD, WIDTH
from edgespec.drafting.drafters.base import TopTokens


def top_tokens_of(row: Logits) -> TopTokens:
    """At most eight tokens of logits [V], best first, and their shares of their joint probability.

    Tokens far below the best one are left out. Two passes over the vocabulary: 30 us for 50,000.
    """
    best = row.max()
    ids = np.flatnonzero(row > best - np.float32(SPREAD))
    if len(ids) > WIDTH:
        ids = ids[np.argpartition(row[ids], len(ids) - WIDTH)[-WIDTH:]]
    logits = row[ids]
    order = np.argsort(-logits)
    weights = np.exp(logits[order] - best)
    return ids[order].tolist(), (weights / weights.sum()).tolist()
