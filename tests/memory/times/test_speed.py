"""Predicted speed by hand: histories of rounds, curves with holes, drafts that do not pay."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.combined import RoundHistory
from edgespec.memory.times import (
    DEFAULT_ROUNDS,
    CostCurve,
    Round,
    SpeedModel,
    estimated_curve,
    predicted_speedup,
)

INF = float("inf")
quick = settings(max_examples=200)


def model(curve: CostCurve, *rounds: Round) -> SpeedModel:
    return SpeedModel(curve, is_measured=True, rounds=rounds or DEFAULT_ROUNDS)


# ------------------------------------------------------------------------------ history


def test_a_history_goes_on_where_it_stopped() -> None:
    history = RoundHistory([(4, 2, 2.0), (1, 1, 5.0)])
    history.observe(4, 2)
    assert history.rounds() == [(1, 1, 5.0), (4, 2, 3.0)]
    assert len(history) == 8


def test_old_rounds_fade() -> None:
    """The 5,001st halves all counts, so what comes after it weighs twice as much."""
    history = RoundHistory([(1, 1, 4_999.0)])
    history.observe(4, 2)
    assert history.rounds() == [(1, 1, 4_999.0), (4, 2, 1.0)]
    history.observe(4, 2)
    assert history.rounds() == [(1, 1, 2499.5), (4, 2, 1.0)]
    assert len(history) == 2_500


def test_what_was_seen_once_long_ago_is_forgotten() -> None:
    """2 halves to 1 and 0.5, and is then dropped; the counts never exceed 5,000."""
    history = RoundHistory([(1, 1, 2_498.0), (9, 9, 2.0)])
    for kept in (1.0, 0.5, None):
        for _ in range(2_501):
            history.observe(1, 1)
            assert len(history) <= 5_000
        assert {nodes: times for nodes, _, times in history.rounds()}.get(9) == kept


def test_a_history_survives_a_restart() -> None:
    history = RoundHistory([(1, 1, 7.0), (4, 2, 2.5), (32, 32, 1.0)])
    again = RoundHistory.from_json(json.loads(json.dumps(history.rounds())))
    assert again.rounds() == history.rounds()


@pytest.mark.parametrize(
    "document",
    [None, {}, "rounds", 7, [7], [[4, 2]], [[4, 2, 1.0, 9]], [[4, None, 1.0]], [["a", 2, 1.0]],
     [{}], [[4, 2, "x"]], [[4, 2, 1.0], None]],
    ids=str,
)  # fmt: skip
def test_a_damaged_history_is_none(document: Any) -> None:
    history = RoundHistory.from_json(document)
    assert (len(history), history.rounds()) == (0, [])


def test_rounds_that_cannot_be_are_left_out() -> None:
    """More tokens than nodes, none, no times, endless times."""
    good = [4, 2, 3.0]
    bad = [[2, 3, 1.0], [4, 0, 1.0], [4, 2, -1.0], [4, 1, 0.0], [5, 1, float("inf")]]
    bad += [[5, 1, float("nan")]]
    assert RoundHistory.from_json([*bad, good]).rounds() == [(4, 2, 3.0)]


def test_the_usual_history_is_one() -> None:
    """A thousand rounds, each of which emitted something and no more than it had nodes."""
    assert 990 <= sum(times for _, _, times in DEFAULT_ROUNDS) <= 1010
    assert all(1 <= emitted <= nodes for nodes, emitted, _ in DEFAULT_ROUNDS)


# ------------------------------------------------------------------------------ prediction


def test_plain_decoding_is_one_token_a_step() -> None:
    """4 ms at depth 0; 4 + 0.01 * 100 at depth 100."""
    curve = CostCurve([INF, 4.0, 5.0, 6.0, 7.0], depth_ms=0.01)
    assert model(curve).tokens_per_s(0, 0) == pytest.approx(250.0)
    assert model(curve).tokens_per_s(0, 100) == pytest.approx(200.0)
    assert model(curve, (1, 1, 9.0)).tokens_per_s(3, 0) == pytest.approx(250.0)


def test_a_prediction_by_hand() -> None:
    """6 plain rounds of 4 ms; of 4 nodes at 7 ms, 2 rounds of one token and 2 of four.

    16 tokens in 6 * 4 + 4 * 7 = 52 ms. Plain decoding would take 64.
    """
    curve = CostCurve([INF, 4.0, 5.0, 6.0, 7.0])
    predicted = model(curve, (1, 1, 6.0), (4, 1, 2.0), (4, 4, 2.0))
    assert predicted.tokens_per_s(3, 0) == pytest.approx(16 / 0.052)


def test_short_drafts_emit_a_long_one_in_pieces() -> None:
    """Drafts of one: of four tokens two steps of 5 ms, of three two as well, of one one.

    8 tokens in (2 + 2 + 1) * 5 = 25 ms.
    """
    curve = CostCurve([INF, 4.0, 5.0, 6.0, 7.0])
    predicted = model(curve, (4, 4, 1.0), (4, 3, 1.0), (4, 1, 1.0))
    assert predicted.tokens_per_s(1, 0) == pytest.approx(8 / 0.025)


def test_sizes_that_were_not_measured_are_not_used() -> None:
    """A draft of three would be four nodes: the step has three, at 6 ms, and two pieces."""
    curve = CostCurve([INF, 4.0, 5.0, 6.0, INF, INF])
    predicted = model(curve, (4, 4, 1.0))
    assert predicted.tokens_per_s(3, 0) == pytest.approx(4 / 0.012)
    assert predicted.tokens_per_s(9, 0) == pytest.approx(4 / 0.012), "nor sizes beyond the curve"
    only_one = model(CostCurve([INF, 4.0, INF, INF]), (4, 4, 1.0))
    assert only_one.tokens_per_s(3, 0) == pytest.approx(250.0)


def test_sizes_no_plan_had_room_for_are_taken_to_go_on_as_the_measured_ones_do() -> None:
    """t(4) = 1.6 ms, 0.2 a node: eight tokens in a step of eight take 2.4 ms."""
    curve = CostCurve([INF, 1.0, 1.2, 1.4, 1.6])
    predicted = SpeedModel(curve, is_measured=True, rounds=((8, 8, 1.0),))
    assert predicted.tokens_per_s(7, 0) == pytest.approx(8e3 / 2.4)
    assert predicted.tokens_per_s(3, 0) == pytest.approx(8e3 / 3.2)
    single = SpeedModel(CostCurve([INF, 1.0]), is_measured=True, rounds=((8, 8, 1.0),))
    assert single.tokens_per_s(7, 0) == pytest.approx(1e3)


def test_drafts_that_do_not_pay_give_exactly_plain_speed() -> None:
    """Two tokens for 9 ms instead of 8: the controller would not draft."""
    curve = CostCurve([INF, 4.0, 9.0])
    predicted = model(curve, (2, 2, 7.0), (2, 1, 3.0), (1, 1, 20.0))
    assert predicted.tokens_per_s(1, 50) == pytest.approx(predicted.tokens_per_s(0, 50))


def test_sizes_that_do_not_pay_do_not_spoil_those_that_do() -> None:
    """Two nodes gain: 2 tokens in 5 ms. Four nodes lose, and take plain steps: 4 in 16 ms."""
    curve = CostCurve([INF, 4.0, 5.0, INF, 40.0])
    predicted = model(curve, (2, 2, 1.0), (4, 4, 1.0))
    assert predicted.tokens_per_s(3, 0) == pytest.approx(6 / 0.021)


def test_depth_counts_for_every_node() -> None:
    """At 1,000 tokens a step of two takes 5 + 1 + 2 ms, and a plain one 4 + 1 + 1."""
    curve = CostCurve([INF, 4.0, 5.0], depth_ms=0.001, depth_node_ms=0.001)
    assert model(curve, (2, 2, 1.0)).tokens_per_s(1, 1000) == pytest.approx(2 / 0.008)
    assert model(curve, (2, 2, 1.0)).tokens_per_s(0, 1000) == pytest.approx(1 / 0.006)


def test_without_any_round_speed_is_plain() -> None:
    predicted = SpeedModel(CostCurve([INF, 4.0, 5.0]), is_measured=True, rounds=())
    assert predicted.tokens_per_s(1, 0) == pytest.approx(250.0)


def test_a_model_says_what_it_rests_on() -> None:
    noon = datetime(2026, 11, 24, 12).timestamp()
    curve, dated = CostCurve([INF, 4.0]), CostCurve([INF, 4.0], measured_s=noon)
    busy = CostCurve([INF, 4.0], contention=2.0, measured_s=noon)
    day = "measured on 24 November 2026"
    assert SpeedModel(curve, is_measured=True).source == "measured on this device"
    assert SpeedModel(dated, is_measured=True).source == day
    beside = f"{day} with 50% of its threads, as other programs computed"
    assert SpeedModel(busy, is_measured=True).source == beside
    assert SpeedModel(curve, is_measured=False).source == "estimated from memory bandwidth"
    copies = "estimated from memory bandwidth, measured while other programs computed"
    assert SpeedModel(curve, is_measured=False, is_from_busy_moment=True).source == copies
    plain = estimated_curve(10**8, 10**10, 4, CostCurve([INF, 4.0], measured_s=noon))
    assert SpeedModel(plain, is_measured=False).source == f"{day}, drafts estimated"
    assert plain.base[1] == 4.0 and plain.base[2] == pytest.approx(4.0 * 1.35)


def test_a_prediction_is_a_range_that_is_as_wide_as_what_it_rests_on() -> None:
    """Nine of ten processes lie within 28% of what a quiet machine measured."""
    curve = CostCurve([INF, 4.0, 5.0, 6.0, 7.0])
    quiet = SpeedModel(curve, is_measured=True)
    low, high = quiet.range_of(0, 0)
    assert (low, high) == pytest.approx((250.0 / 1.279, 250.0 * 1.279), rel=1e-3)
    drafted_low, drafted_high = quiet.range_of(3, 0)
    assert low <= drafted_low < low * quiet.tokens_per_s(3, 0) / 250.0
    assert drafted_high > high * quiet.tokens_per_s(3, 0) / 250.0
    busy = SpeedModel(replace(curve, contention=2.0), is_measured=True)
    estimated = SpeedModel(curve, is_measured=False)
    beside = SpeedModel(curve, is_measured=False, is_from_busy_moment=True)
    widths = [most / least for least, most in (one.range_of(0, 0) for one in (quiet, busy))]
    widths += [most / least for least, most in (one.range_of(0, 0) for one in (estimated, beside))]
    assert widths == sorted(widths) and len(set(widths)) == 4


rounds = st.integers(1, 40).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.integers(1, nodes), st.floats(0.1, 1000.0))
)
step_times = st.lists(st.floats(0.1, 100.0) | st.just(INF), max_size=40)


@quick
@given(
    st.floats(0.1, 100.0),
    step_times,
    st.lists(rounds, max_size=8),
    st.integers(0, 255),
    st.integers(0, 10_000),
)
def test_speed_is_never_below_plain_and_never_above_one_step_for_everything(
    plain_ms: float, others: list[float], counted: list[Round], draft_max: int, depth: int
) -> None:
    curve = CostCurve([INF, plain_ms, *others], depth_ms=0.001, depth_node_ms=0.0001)
    predicted = SpeedModel(curve, is_measured=True, rounds=tuple(counted))
    speed, plain = (predicted.tokens_per_s(draft, depth) for draft in (draft_max, 0))
    assert plain == pytest.approx(1e3 / curve.step_ms(1, depth))
    assert speed >= plain * (1 - 1e-9)
    cheapest = min(curve.step_ms(n, depth) for n in range(1, len(curve.base)))
    assert speed <= (1 + draft_max) * 1e3 / cheapest * (1 + 1e-9)


# ------------------------------------------------------------------------------ no measurement


def test_an_estimate_reads_all_weights_in_every_step() -> None:
    """2 GB at 20 GB/s: 100 ms, and 35 more for each further node."""
    curve = estimated_curve(2 * 10**9, 20e9, 3)
    assert curve.base == [INF, *map(pytest.approx, (100.0, 135.0, 170.0))]
    assert (curve.max_nodes, curve.depth_ms, curve.change_ms) == (3, 0.0, 0.0)


def test_the_smallest_model_still_takes_time() -> None:
    assert estimated_curve(1, 1e12, 2).base[1] == pytest.approx(0.05)
    assert 0 < SpeedModel(estimated_curve(0, 1e12, 2), is_measured=False).tokens_per_s(1, 0) < INF


def test_the_best_draft_length_is_found() -> None:
    """Two tokens: (1 + .5 + .25) x 10 / (14 + 2 x 1); one: 1.5 x 10 / 13; three: 1.85 x 10 / 23."""
    times = [0.0, 10.0, 12.0, 14.0, 20.0]
    speed, length = predicted_speedup([0.5, 0.25, 0.1], times, 1.0)
    assert (round(speed, 4), length) == (round(15.0 / 13.0, 4), 1.5)
    speed, length = predicted_speedup([0.8, 0.6, 0.1], times, 1.0)
    assert (round(speed, 4), round(length, 4)) == (1.5, 2.4)


def test_an_exit_that_does_not_pay_is_below_one() -> None:
    speed, _ = predicted_speedup([0.1], [0.0, 10.0, 20.0, 30.0], 5.0)
    assert speed == pytest.approx(1.1 * 10 / 25)
