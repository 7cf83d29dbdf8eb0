"""How well a drafter does along texts, from which of its drafts were right there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST_RUN = 8  # drafted tokens whose chance of being right is counted


def agreement_of(hits: Sequence[NDArray[np.bool_]]) -> float:
    """The part of all places whose first draft is right, over texts [n] or [drafts, n]."""
    first = [np.atleast_2d(row)[0] for row in hits]
    return sum(int(row.sum()) for row in first) / max(1, sum(map(len, first)))


def gains_of(hits: Sequence[NDArray[np.bool_]]) -> tuple[float, ...]:
    """What the 1st, 2nd, ... drafted token adds to the tokens of a round.

    Texts are walked in rounds as they are decoded, with so many drafts in each: hits[t] says
    whether the draft for place t is right where all before it were. Of a drafter that follows its
    own drafts, hits[i, t] says it of the i + 1st of a round; those after the last row are taken to
    be right as often as it. Counting every place alike would flatter: what was accepted is skipped,
    so rounds begin where the text is hard.
    """
    rows = [np.atleast_2d(row) for row in hits]
    tokens = sum(row.shape[1] for row in rows)
    lengths = [1.0]
    for most in range(1, LONGEST_RUN + 1):
        rounds = 0
        for row in rows:
            place, last = 0, len(row) - 1
            while place < row.shape[1]:
                behind = range(place, min(place + most, row.shape[1]))
                wrong = (t for t in behind if not row[min(t - place, last), t])
                place = 1 + next(wrong, place + most)
                rounds += 1
        lengths.append(tokens / max(1, rounds))
    return tuple(float(gain) for gain in np.diff(lengths))
