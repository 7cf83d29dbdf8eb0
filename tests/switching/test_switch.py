"""When one model hands over to the other, token by token."""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest
from switching_cases import always_switching

from edgespec.decode.stats import LARGE, SMALL
from edgespec.drafting.proposal import Proposal
from edgespec.memory.times.curve import CostCurve
from edgespec.switching.policy import SwitchPolicy, SwitchPrices
from edgespec.switching.switch import Switch, entropy_nats


def test_drafts_are_worth_what_their_model_gets_to_write() -> None:
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, min_stay=1))
    assert switch.goes_on == pytest.approx(1 - 1 / 8)
    # One that may be of no token at all is of n more with a chance of (8 / 9)^n.
    assert Switch(always_switching()).goes_on == pytest.approx(8 / 9)
    assert Switch(SwitchPolicy.always(SMALL)).goes_on == 1.0
    assert Switch(SwitchPolicy(up_nats=0.0)).goes_on == 1.0
    never_down = Switch(SwitchPolicy(), lambda *_: -1.0)
    assert (never_down.writer, never_down.goes_on) == (LARGE, 1.0)
    proposal = Proposal((1, 2, 3, 4), (-1, 0, 1, -1), (0.9, 0.8, 0.7, 0.5))
    cut = proposal.cut_off(0.5)
    assert list(cut.tokens) == [1, 4, 2, 3] and list(cut.parents) == [-1, -1, 0, 2]
    assert list(cut.probabilities) == pytest.approx([0.9, 0.5, 0.4, 0.175])


def test_means_begin_anew_and_stays_are_kept() -> None:
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, window=2, min_stay=2))
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


def test_a_way_down_that_costs_more_than_it_saves_is_not_made() -> None:
    curve = CostCurve([math.inf, *(float(n) for n in range(4, 20))])  # a step of n: n + 3 ms
    cheap, dear = (CostCurve([math.inf, ms, *[ms] * 15]) for ms in (0.5, 3.9))
    policy = SwitchPolicy(up_nats=1.0, down_nats=0.5, expected_stay=4.0)
    for small, pays in ((cheap, True), (dear, False)):
        prices = SwitchPrices(curve, small)
        # 4 tokens at 4 ms against a step and 4 tokens of the small one, and 4 more to read.
        assert prices.saved_ms(4.0, 2, 0) == pytest.approx(16 - 5 * small.base[1] - 4)
        switch = Switch(policy, prices.saved_ms)
        assert switch.writer == (SMALL if pays else LARGE)
        if pays:
            assert switch.sees(2.0)
            switch.change()
        switch.sees(0.0)
        assert switch.is_due == pays


def test_a_small_model_that_was_asked_in_vain_is_asked_again_later() -> None:
    """A stay of 3 pays; handed back five times none would, and 26 tokens later the average one."""
    policy = SwitchPolicy(up_nats=1.0, down_nats=math.inf, expected_stay=3.0)
    switch = Switch(policy, lambda stay, _missed, _depth: stay - 1.5)
    assert switch.writer == SMALL
    returns = 0
    while switch.writer == SMALL:
        assert switch.sees(9.0)
        switch.change()
        returns += 1
        switch.sees(0.0)
        if switch.is_due:
            switch.change()
    assert returns == 4  # 3.0, 2.4, 1.92, 1.54, 1.23
    waited = 1
    while not switch.is_due:
        switch.sees(0.0)
        waited += 1
    stay = 3.0 * 0.8**4
    expected = next(n for n in count(1) if 3.0 - (3.0 - stay) * 0.98**n > 1.5)
    assert waited == expected + 1


@pytest.mark.parametrize(("writer", "unseen"), [(LARGE, 2), (SMALL, 3)])
def test_entropies_that_no_decision_sees_are_not_asked_for(writer: str, unseen: int) -> None:
    """With a window of 2 and stays of 4, the first mean that counts is over the last two."""
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, window=2, min_stay=4))
    assert switch.looks  # an answer may begin with either model
    handing_over = {SMALL: 9.0, LARGE: 0.0}
    for _ in range(50):
        switch.sees(handing_over[switch.writer])
        if switch.is_due:
            switch.change()
            if switch.writer == writer:
                break
    for _ in range(unseen):
        assert not switch.looks
        switch.sees(handing_over[writer])
    assert switch.looks and not switch.is_due


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
