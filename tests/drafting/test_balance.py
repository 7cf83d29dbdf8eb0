"""What an answer's drafts lost makes the next ones promise more, and what they gain pays for it."""

from __future__ import annotations

import pytest

from edgespec.drafting.balance import Balance, Balances
from edgespec.drafting.controller import choose_size
from edgespec.drafting.proposal import MARGIN, Stakes
from edgespec.memory.times.curve import CostCurve

INF = float("inf")


def test_nothing_lost_is_the_margin_of_every_draft() -> None:
    balance = Balance()
    assert balance.margin == MARGIN == Stakes(1, 0.0, CostCurve([INF, 4.0]), 0).margin
    balance.add(1, 1, 9.0, 4.0)
    assert balance.margin == MARGIN, "a plain step that was slow is not the drafts' loss"
    balance.add(4, 3, 6.0, 4.0)
    assert balance.margin == MARGIN


def test_a_loss_by_hand() -> None:
    """98 plain rounds of 4 ms, one of a draft that took 8 for a token: 1% of 396 ms is lost."""
    balance = Balance()
    for _ in range(98):
        balance.add(1, 1, 4.0, 4.0)
    balance.add(4, 1, 8.0, 4.0)
    assert balance.margin == pytest.approx(MARGIN + 2.0 * 4.0 / 396.0)
    balance.add(4, 2, 4.0, 4.0)
    assert balance.margin == MARGIN


def test_the_first_round_decides_nothing() -> None:
    """4 ms lost count as a twentieth of 20 rounds, not as all of the time there was."""
    balance = Balance()
    balance.add(4, 1, 8.0, 4.0)
    assert balance.margin == pytest.approx(MARGIN + 2.0 / 20.0)


def test_a_disturbed_round_counts_as_much_as_an_ordinary_bad_one() -> None:
    balance = Balance()
    balance.add(2, 1, 4000.0, 4.0)
    assert balance.margin == pytest.approx(MARGIN + 2.0 * (24.0 - 4.0) / 80.0)


def test_drafts_of_times_that_are_wrong_stop_by_themselves() -> None:
    """Steps of two seem to take 1.1 plain steps and take 2; each draft holds one time in four."""
    balance, curve, verified = Balance(), CostCurve([INF, 10.0, 11.0]), 0
    for step in range(200):
        stakes = Stakes(1, 0.0, curve, 0, margin=balance.margin)
        size, _ = choose_size([0.35], stakes)
        verified += size
        hit = size and step % 4 == 0
        balance.add(size + 1, 1 + bool(hit), 20.0 if size else 10.0, 10.0)
    assert 0 < verified < 20


def test_drafts_have_to_save_what_keeping_them_possible_costs() -> None:
    """Plain steps of 1 ms, 6% of it for that; a draft that is right saves a step."""
    none, some, few = Balances(1.06), Balances(1.06), Balances(1.06)
    for turn in range(400):
        none.add(1, 1, 1.0, 1.0)
        drafts = turn % 10 == 0
        some.add(1 + drafts, 1 + drafts, 1.0, 1.0)
        drafts = turn % 50 == 0
        few.add(1 + drafts, 1 + drafts, 1.0, 1.0)
    assert [one.are_worth_it for one in (none, some, few)] == [False, True, False]
    assert Balances(2.0).are_worth_it, "nothing is known yet"
    free = Balances(1.0)
    free.add(8, 400.0, 450.0, 1.0)
    assert free.are_worth_it, "whether to draft then is a matter of each round"


def test_what_models_take_to_draft_is_part_of_what_drafts_cost() -> None:
    """A draft that is right saves a step of 1 ms; a model that takes 0.9 of it leaves nothing."""
    cheap, dear, stalled = Balances(1.06), Balances(1.06), Balances(1.06)
    for turn in range(400):
        drafts = turn % 10 == 0
        cheap.add(1 + drafts, 1 + drafts, 1.0, 1.0, 0.1 * drafts)
        dear.add(1 + drafts, 1 + drafts, 1.0, 1.0, 0.9 * drafts)
        stalled.add(2, 2, 1.0, 1.0, 60_000.0 if turn == 0 else 0.1)
    assert [cheap.are_worth_it, dear.are_worth_it] == [True, False]
    assert stalled.are_worth_it, "one moment in which nothing ran decides nothing"
