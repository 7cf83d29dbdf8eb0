"""The entropy of a row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.switching.entropy import entropy_nats


def test_entropy_of_known_rows() -> None:
    assert entropy_nats(np.zeros(8, np.float32)) == pytest.approx(math.log(8))
    certain = np.array([50.0, 0.0, -np.inf], np.float32)
    assert entropy_nats(certain) == pytest.approx(0.0, abs=1e-6)
    halves = np.array([3.0, 3.0, -np.inf], np.float32)
    assert entropy_nats(halves) == pytest.approx(math.log(2))
    assert entropy_nats(np.zeros(20_001, np.float32)) == pytest.approx(math.log(20_001))
    row = np.random.default_rng(0).normal(0.0, 3.0, 20_001).astype(np.float32)
    row[5000:15000] = -np.inf
    chances = np.exp(row.astype(np.float64))
    chances = chances[chances > 0] / chances.sum()
    expected = -(chances * np.log(chances)).sum()
    for shift in (0.0, 40.0, 200.0, -200.0):  # softmax does not see it; float32's exp does
        assert entropy_nats(row + np.float32(shift)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_rows_of_which_nothing_can_be_chosen_have_no_entropy(row: list[float]) -> None:
    assert math.isnan(entropy_nats(np.array(row, np.float32)))
