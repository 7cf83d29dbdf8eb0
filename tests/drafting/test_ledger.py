"""The account of one drafter, by hand, and what is kept of it."""

from __future__ import annotations

from time import time
from typing import Any

import pytest
from draft_model_cases import quick
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.combined import (
    SAVINGS,
    SINCE,
    TIME,
    BelievedTimes,
    Ledger,
    UsualTime,
    dated,
    is_recent,
    part_saved,
)
from edgespec.drafting.constants import (
    ALLOWANCE,
    FIRST_BALANCE,
    HIGHEST_BALANCE,
    MOST_ROUNDS,
    TELLING_ROUNDS,
)


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
    """Prices, whether they were lost, and gains, in any order; a price is the most that is lost."""
    ledger, lost = Ledger(), 0.0
    for number, (price, part, gain) in enumerate(rounds, 1):
        net = max(gain, -price) if part > 0.5 else -price
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


def test_earlier_runs_count_as_a_few_hundred_rounds() -> None:
    """So that as many of this run say as much, whatever was stored."""
    ledger = Ledger()
    ledger.load_savings({"rounds": 1e9, "usual_steps": 2e9, "saved_steps": -4e8, "squares": 1e9})
    assert ledger.rounds == pytest.approx(TELLING_ROUNDS)
    assert ledger.saved_steps / ledger.usual_steps == pytest.approx(-0.2)
    assert ledger.balance == FIRST_BALANCE, "it is asked as one that is new"
    for rounds, taken in ((-9.0, 0.0), (0.5, 0.5)):
        ledger.load_savings({**ledger.savings(), "rounds": rounds})
        assert ledger.rounds == taken


def test_savings_have_a_standard_error() -> None:
    """Of 0.9 steps and -0.1 in turns, the payments included: 0.4 of 2 tokens, 20 times."""
    ledger = Ledger()
    for _ in range(10):
        ledger.pay(0.1)
        ledger.add(1, 2.0, gain=1.0)
        ledger.pay(0.1)
        ledger.add(1, 2.0)
    rounds, part, error = part_saved(ledger.savings())
    assert rounds == 20.0 and part == pytest.approx(0.2)
    assert error == pytest.approx((10 * 0.81 + 10 * 0.01) ** 0.5 / 40.0)
    assert part_saved({}) == part_saved({**ledger.savings(), "usual_steps": 0.0}) == (0.0,) * 3
    for name in SAVINGS:
        assert part_saved({**ledger.savings(), name: float("nan")}) == (0.0,) * 3


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"rounds": 1.0},
        {"rounds": 1.0, "usual_steps": "x", "saved_steps": 0.0},
        {"rounds": 1.0, "usual_steps": float("inf"), "saved_steps": 0.0, "squares": 0.0},
        {"rounds": 1.0, "usual_steps": 1, "saved_steps": 0.0, "squares": 0.0},
    ],
)
def test_savings_that_are_none_are_ignored(found: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.load_savings(found)
    assert ledger.savings() == dict.fromkeys(SAVINGS, 0.0)


def test_what_is_stored_has_its_age() -> None:
    """That of the last run that added a round, and of the first one."""
    savings = {"rounds": 400.0, "usual_steps": 900.0, "saved_steps": 9.0, "squares": 4.0}
    now = dated(savings, None, time() - 60.0)
    assert is_recent(now[TIME]) and now[TIME] - now[SINCE] == pytest.approx(60.0, abs=5.0)
    old = {**now, TIME: now[TIME] - 90_000.0, SINCE: now[SINCE] - 90_000.0}
    assert not is_recent(old[TIME]) and not is_recent(None)
    again = Ledger()
    again.load_savings(old)
    assert dated({"cells": 1, **again.savings()}, old, time()) == {"cells": 1, **old}, "none added"
    again.add(1, 1.0)
    later = dated(again.savings(), old, time())
    assert later[TIME] > old[TIME] and later[SINCE] == old[SINCE]


def test_a_step_that_alone_took_long_was_disturbed() -> None:
    """What takes several times as long twice in a row does so; less teaches the curve."""
    steps = BelievedTimes()
    ratios = (0.9, 1.2, 8.0, 1.0, 2.9, 2.9, 8.0, 8.0, 3.5, 1.1)
    found = [steps.believed_ms(10.0 * ratio, 10.0) for ratio in ratios]
    assert found == [9.0, 12.0, 13.0, 10.0, 13.0, 13.0, 13.0, 30.0, 30.0, 11.0]


def test_what_lookups_usually_take_is_learned_and_no_outlier_counts() -> None:
    usual = UsualTime()
    assert usual.believed_ms(1.0) == 0.0, "the first one, in cold caches"
    assert [usual.believed_ms(1.0) for _ in range(30)] == [1.0] * 30
    assert usual.believed_ms(100.0) == 3.0 and usual.ms < 1.3
    assert usual.believed_ms(1.0) == 1.0
    for _ in range(60):
        usual.believed_ms(100.0)
    assert usual.believed_ms(100.0) == 100.0 and usual.ms > 90.0, "it does take that long"
