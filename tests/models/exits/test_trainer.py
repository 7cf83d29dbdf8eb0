"""What drafts gain, counted on texts that were not learned from."""

from __future__ import annotations

import numpy as np
import pytest


def test_gains_are_those_of_rounds_that_follow_one_another() -> None:
    """Two right, two wrong and one right: rounds begin at places 0, 2, 3, 4 with one draft."""
    from edgespec.models.exits.trainer import gains_of

    hits = [np.array([True, True, False, False, True])]
    lengths = np.cumsum([1.0, *gains_of(hits)])
    assert lengths[:3].tolist() == pytest.approx([1.0, 5 / 4, 5 / 3])
    assert lengths[3:].tolist() == pytest.approx([5 / 3] * 6)


def test_gains_of_drafts_that_follow_their_own_are_by_their_place_in_a_round() -> None:
    """The first of a round is always right and the second never: each round of two is two long."""
    from edgespec.models.exits.trainer import agreement_of, gains_of

    hits = [np.array([[True] * 6, [False] * 6])]
    assert agreement_of(hits) == 1.0
    assert gains_of(hits) == pytest.approx([1.0, *[0.0] * 7])
