"""The account of one drafter, by hand, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
from draft_model_cases import quick
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.constants import ALLOWANCE, FIRST_BALANCE, HIGHEST_BALANCE, MOST_ROUNDS
from edgespec.drafting.ledger import TIME, Ledger, StepTimes, dated, is_recent, recalled


def test_rounds_pay_the_allowance_up_to_the_cap() -> None:
    ledger = Ledger()
    ledger.add(100, 100.0)
    assert ledger.balance == pytest.approx(FIRST_BALANCE + 0.4)
    ledger.add(1, 9.0, gain=100.0)
    assert ledger.is_full and ledger.balance == HIGHEST_BALANCE
    ledger.pay(1.0)
    assert not ledger.is_full


@quick
@given(
    st.lists(
        st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 1.0), st.floats(-0.5, 9.0)), max_size=300
    )
)
def test_the_loss_is_bounded_for_whoever_asks_only_what_the_balance_covers(
    rounds: list[tuple[float, float, float]],
) -> None:
    """Prices, parts of them that are lost, and gains, in any order."""
    ledger, lost = Ledger(), 0.0
    for number, (price, part, gain) in enumerate(rounds, 1):
        net = gain if part > 0.5 else -price
        if ledger.balance >= price:
            ledger.add(1, 1.0, net)
            lost -= net
        else:
            ledger.add(1, 1.0)
        assert ledger.balance >= 0.0
        assert lost <= FIRST_BALANCE + ALLOWANCE * number + 1e-9


def test_the_cooldown_is_what_the_allowance_takes_to_cover_a_price() -> None:
    """From 0.5 to 0.7 steps in 0.2 / 0.004 rounds; what is beyond the cap never comes."""
    ledger = Ledger()
    ledger.balance = 0.5
    assert ledger.rounds_until(0.7) == 50
    assert ledger.rounds_until(0.4) == 0
    assert ledger.rounds_until(HIGHEST_BALANCE) == round((HIGHEST_BALANCE - 0.5) / ALLOWANCE)
    assert ledger.rounds_until(HIGHEST_BALANCE + 1.0) == float("inf")
    ledger.add(49, 49.0)
    assert ledger.balance < 0.7
    ledger.add(1, 1.0)
    assert ledger.balance == pytest.approx(0.7)


@pytest.mark.parametrize("is_needed", [False, True])
def test_reading_has_room_and_where_it_comes_first_money(is_needed: bool) -> None:
    ledger = Ledger()
    ledger.expect_reading(20.0, is_needed=is_needed)
    assert ledger.most == HIGHEST_BALANCE + 20.0
    assert ledger.balance == FIRST_BALANCE + 20.0 * is_needed


def test_old_savings_fade_and_keep_their_part() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.add(int(MOST_ROUNDS) // 2, 3000.0, gain=300.0)
    kept = ledger.savings()
    assert kept["rounds"] == 0.75 * MOST_ROUNDS
    assert kept["saved_steps"] / kept["usual_steps"] == pytest.approx(0.1)
    again = Ledger()
    again.load_savings(kept)
    assert again.savings() == kept


@pytest.mark.parametrize(("rounds", "taken"), [(-9.0, 0.0), (0.5, 0.5), (1e9, MOST_ROUNDS)])
def test_no_savings_are_of_more_rounds_than_are_kept(rounds: float, taken: float) -> None:
    ledger = Ledger()
    ledger.load_savings({"rounds": rounds, "usual_steps": 9.0, "saved_steps": 1.0})
    assert ledger.rounds == taken


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"rounds": 1.0},
        {"rounds": 1.0, "usual_steps": "x", "saved_steps": 0.0},
        {"rounds": 1.0, "usual_steps": float("inf"), "saved_steps": 0.0},
    ],
)
def test_savings_that_are_none_are_ignored(found: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.load_savings(found)
    assert ledger.savings() == {"rounds": 0.0, "usual_steps": 0.0, "saved_steps": 0.0}


def test_savings_of_long_ago_are_forgotten() -> None:
    savings = {"rounds": 400.0, "usual_steps": 900.0, "saved_steps": 9.0}
    now = dated(savings, {})
    assert is_recent(now[TIME]) and recalled(now) == now
    old = {**now, TIME: now[TIME] - 40 * 86400.0}
    assert recalled(old) == {TIME: old[TIME]}
    assert recalled(savings) == recalled(None) == {}, "nobody knows when"
    assert dated(savings, old | savings)[TIME] == old[TIME], "nothing was added"
    assert dated({**savings, "rounds": 401.0}, old)[TIME] > old[TIME]


def test_a_step_that_alone_took_long_was_disturbed() -> None:
    """What takes several times as long twice in a row does so; less teaches the curve."""
    steps = StepTimes()
    ratios = (0.9, 1.2, 8.0, 1.0, 2.9, 2.9, 8.0, 8.0, 3.5, 1.1)
    found = [steps.believed_ms(10.0 * ratio, 10.0) for ratio in ratios]
    assert found == [9.0, 12.0, 13.0, 10.0, 13.0, 13.0, 13.0, 30.0, 30.0, 11.0]
