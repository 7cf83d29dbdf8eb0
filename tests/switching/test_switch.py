"""When one model hands over to the other, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.decode.generation import LARGE
from edgespec.switching.engine import Switch, entropy_nats
from edgespec.switching.planning import SwitchPolicy


def test_means_begin_anew_and_stays_are_kept() -> None:
    switch = Switch(SwitchPolicy(up_nats=1.0, down_nats=0.5, window=2, min_stay=2))
    assert not switch.sees(0.9)
    assert not switch.sees(1.0)  # mean 0.95
    assert switch.sees(1.1)  # mean 1.05, after two tokens
    switch.change()
    assert switch.writer == LARGE
    assert not switch.sees(0.1)
    assert not switch.is_due  # a stay of one token
    assert not switch.sees(0.2)
    assert switch.is_due  # mean 0.15; its token is kept
    assert switch.sees(0.0)  # and the next one is not its own
    switch.change()
    assert not switch.sees(9.0)
    assert not switch.sees(9.0)
    assert switch.sees(9.0)


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
