"""Curves of which only some sizes were measured, as on slow devices: what decides from them."""

from __future__ import annotations

import math

import pytest
from fake_backend import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.bench.switch_calibration import Trace, choose, forecast
from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL
from edgespec.drafting import make_drafter
from edgespec.drafting.proposal import StepContext, choose_size
from edgespec.measure.timing import measure_curve
from edgespec.memory.times import CostCurve, SpeedModel, predicted_speedup
from edgespec.switching.planning import Calibrated, SwitchPolicy, switch_reason

INF = math.inf
quick = settings(max_examples=150)


@st.composite
def curves(draw: st.DrawFn, most: int = 32) -> CostCurve:
    """Any sizes up to `most` are measured, besides single tokens; times may fall with the size."""
    size = draw(st.integers(1, most))
    measured = draw(st.sets(st.integers(2, size), max_size=4)) if size > 1 else set()
    times = [INF] * (size + 1)
    for n in {1, *measured}:
        times[n] = draw(st.floats(0.5, 100.0)) * (1 + n / 8)
    return CostCurve(times, *(draw(st.floats(0.0, top)) for top in (0.01, 0.001, 5.0)))


def test_a_size_that_was_not_measured_takes_for_ever() -> None:
    """Between measured ones, behind the largest of them, and behind all that was ever asked for."""
    curve = CostCurve([INF, 1.0, INF, 2.0, INF], depth_ms=0.5)
    assert [curve.step_ms(n, 2) for n in range(1, 9)] == [2.0, INF, 3.0, *[INF] * 5]
    curve.observe(7, 0, 0, 3.0)
    assert curve.step_ms(7, 0) == INF, "nor is it learned from"


def test_a_step_that_is_made_anyway_is_estimated() -> None:
    curve = CostCurve([INF, 1.0, INF, 4.0, INF, INF], change_ms=0.25)
    assert [curve.estimated_ms(n, 0) for n in range(1, 8)] == [1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 10.0]
    assert curve.estimated_ms(2, 0, previous=1) == 2.75
    assert curve.estimated_ms(2, 0, previous=2) == 2.5
    falling = CostCurve([INF, 4.0, INF, 3.0])
    assert [falling.estimated_ms(n, 0) for n in (2, 3, 4, 9)] == pytest.approx(
        [3.5, 3.0, 3.02, 3.12]
    ), "no token is free"
    single = CostCurve([INF, 4.0, INF])
    assert [single.estimated_ms(n, 0) for n in (1, 2, 5)] == [4.0, 8.0, 20.0]
    deep = CostCurve([INF, 1.0, INF, 4.0], depth_ms=0.1, depth_node_ms=0.01)
    assert deep.estimated_ms(2, 100) == pytest.approx(2.5 + 10.0 + 2.0)
    assert deep.estimated_ms(5, 100) == pytest.approx(7.0 + 10.0 + 5.0)


def test_reading_is_priced_between_the_steps_that_were_measured() -> None:
    curve = CostCurve([INF, 1.0, INF, 2.0, 3.0, INF])
    assert [curve.read_ms(n, 0) for n in (0, 2, 4, 9)] == [0.0, 1.5, 3.0, 3.0 + 3.0 + 1.0]
    assert curve.read_ms(17, 0, 8) == pytest.approx(2 * (3.0 + 4 * 2 / 3) + 1.0)
    assert curve.read_ms(4, 0, 2) == 3.0, "no smaller ones"
    assert CostCurve([INF, 2.0, INF]).read_ms(5, 0) == 10.0


@quick
@given(curve=curves(), nodes=st.integers(1, 40), depth=st.integers(0, 4000))
def test_an_estimate_is_the_measurement_where_there_is_one(
    curve: CostCurve, nodes: int, depth: int
) -> None:
    """Elsewhere it is finite, and between those of its measured neighbours if it has two."""
    known, guess = curve.step_ms(nodes, depth), curve.estimated_ms(nodes, depth)
    assert math.isfinite(guess) and guess > 0.0
    assert guess == known or known == INF
    if nodes < curve.max_nodes:
        sides = [
            next(curve.step_ms(n, depth) for n in way if curve.step_ms(n, depth) != INF)
            for way in (range(nodes, 0, -1), range(nodes, curve.max_nodes + 1))
        ]
        assert min(sides) * (1 - 1e-9) <= guess <= max(sides) * (1 + 1e-9)
    assert curve.read_ms(nodes, depth) > 0.0


# ------------------------------------------------------------------------------ drafts


def test_the_root_is_priced_with_the_tokens_that_are_fed_again() -> None:
    """With one of them plain decoding is a step of two, which was not measured: about 12 ms.

    1 / 12 against 1.1 / 20. If it took for ever, the least likely draft would pay.
    """
    curve = CostCurve([INF, 10.0, INF, INF, 16.0, 20.0])
    context = StepContext(31, 0.0, curve, depth=0, extra=1)
    size, rate = choose_size([0.04, 0.03, 0.03], context)
    assert (size, rate) == (0, 1 / 12)
    assert choose_size([0.9, 0.9, 0.9], context)[0] == 3
    assert choose_size([0.9, 0.03, 0.03], context)[0] == 2


def test_nodes_that_stay_are_no_reason_for_more() -> None:
    """Two drawn nodes are a step of three: 14 ms by their neighbours, and 16 ms with a third."""
    context = StepContext(31, 0.0, CostCurve([INF, 10.0, INF, INF, 16.0]), depth=0)
    assert choose_size([0.5, 0.4, 0.01], context, kept=2) == (2, 1.9 / 14)
    assert choose_size([0.5, 0.4, 0.4], context, kept=2) == (3, 2.3 / 16)


@quick
@given(
    curve=curves(),
    probabilities=st.lists(st.floats(0.0, 1.0), max_size=34),
    kept=st.integers(0, 8),
    extra=st.integers(0, 34),
)
def test_only_what_was_measured_is_chosen(
    curve: CostCurve, probabilities: list[float], kept: int, extra: int
) -> None:
    kept = min(kept, len(probabilities))
    size, rate = choose_size(
        sorted(probabilities, reverse=True),
        StepContext(32, 0.0, curve, depth=7, extra=extra),
        kept=kept,
    )
    assert math.isfinite(rate) and rate > 0.0
    assert size == kept or curve.step_ms(1 + size + extra, 7) != INF


@quick
@given(curve=curves(), draft_max=st.integers(0, 40), depth=st.integers(0, 4000))
def test_speed_is_predicted_from_any_curve(curve: CostCurve, draft_max: int, depth: int) -> None:
    plain = 1e3 / curve.step_ms(1, depth)
    predicted = SpeedModel(curve, is_measured=True).tokens_per_s(draft_max, depth)
    assert plain * (1 - 1e-9) <= predicted < INF


def test_an_exit_is_worth_what_measured_steps_make_of_it() -> None:
    """Two tokens were not measured, and at first nothing but one was."""
    gains = [0.5, 0.25, 0.25]
    assert predicted_speedup(gains, [INF, 10.0, INF, INF, 16.0], 1.0) == (20.0 / 19.0, 2.0)
    assert predicted_speedup(gains, [INF, 10.0, INF, INF, INF], 1.0) == (1.0, 1.0)


# ------------------------------------------------------------------------------ switching


def test_a_draft_larger_than_any_step_is_no_use_of_a_pair() -> None:
    """Of 32 nodes 1, 4 and 8 were measured, as on a device with 10 tokens/s."""
    large = CostCurve([INF, 100.0, INF, INF, 160.0, INF, INF, INF, 240.0, *[INF] * 24])
    turns = [[(SMALL, 30), (LARGE, 4), (SMALL, 30)]]
    found = Calibrated(SwitchPolicy(), 0.1, 0.5, turns, [0.9] * 7 + [20.0] * 8)
    curves = {LARGE: large, SMALL: CostCurve([INF, 10.0, *[INF] * 31])}
    assert found.drafting_tokens_per_s(curves, 0) == pytest.approx(1.9e3 / 130.0)
    why, speed = switch_reason(found, curves, 0, alone=10.0)
    assert speed > 0.0 and "tokens/s predicted" in why


@quick
@given(
    pair=st.tuples(curves(), curves()),
    stays=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    depth=st.integers(0, 3000),
)
def test_turns_have_a_time_whatever_was_measured(
    pair: tuple[CostCurve, CostCurve], stays: list[int], depth: int
) -> None:
    both = {LARGE: pair[0], SMALL: pair[1]}
    turns = [((LARGE, SMALL)[i % 2], tokens) for i, tokens in enumerate(stays)]
    found = Calibrated(SwitchPolicy(), 0.5, 0.5, [turns], [0.5] * 40)
    plain = 1e3 / pair[0].step_ms(1, depth)
    assert plain * (1 - 1e-9) <= found.drafting_tokens_per_s(both, depth) < INF
    assert 0.0 <= found.switching_tokens_per_s(both, depth) < INF


@settings(max_examples=20)
@given(pair=st.tuples(curves(), curves()), data=st.data())
def test_a_policy_is_found_whatever_was_measured(
    pair: tuple[CostCurve, CostCurve], data: st.DataObject
) -> None:
    nats = st.lists(st.floats(0.0, 5.0), min_size=12, max_size=12)
    agrees = st.lists(st.booleans(), min_size=12, max_size=12)
    traces = [Trace(data.draw(nats), data.draw(nats), data.draw(agrees), 40) for _ in range(2)]
    both = {LARGE: pair[0], SMALL: pair[1]}
    found = choose(traces, both)
    assert forecast(found.policy, traces, both) == found
    assert 0.0 <= found.large_share <= 1.0
    assert 0.0 < found.ms_per_token < INF


# --------------------------------------------------------------------------- sizes tried in answers


def test_a_size_is_tried_where_its_estimate_is_the_best_and_asked_for() -> None:
    """Four tokens of a sure chain: three of them in 12 ms, by the line from 10 to 14."""
    curve = CostCurve([INF, 10.0, INF, INF, 14.0])
    context = StepContext(max_nodes=2, min_probability=0.01, curve=curve, depth=0)
    assert choose_size([0.9, 0.9, 0.9], context) == (0, 0.1)
    size, rate = choose_size([0.9, 0.9, 0.9], context, tries=True)
    assert size == 2 and rate == pytest.approx(2.8 / (10 + 8 / 3))


def test_a_step_measures_a_size_and_the_next_load_knows_it() -> None:
    """What is far off counts as far as is likely; times are brought to the speed of the curve."""
    curve = CostCurve([INF, 10.0, INF, INF, 14.0], depth_node_ms=0.001, level=1.2)
    curve.observe(3, 1000, 3, 1.2 * (60.0 + 3.0))
    assert curve.step_ms(3, 0) == INF, "several times as long is another program's doing"
    for _ in range(3):
        curve.observe(3, 1000, 3, 1.2 * (12.0 + 3.0))
        assert curve.step_ms(3, 1000) == pytest.approx(12.0 + 3.0, rel=0.1)
    stored = CostCurve([INF, 20.0, INF, INF, 28.0]).updated(curve)
    assert stored.base[3] / stored.base[1] == curve.base[3] / curve.base[1]
    assert stored.base[2] == INF
    assert CostCurve.from_json(stored.as_json()).base[3] == stored.base[3]


def test_an_engine_fills_the_sizes_that_a_slow_device_left_out() -> None:
    """Of 32 sizes 1, 4 and 8 were measured; text that repeats itself would use many."""
    curve = CostCurve([INF, *[10.0 if n in (1, 4, 8) else INF for n in range(1, 33)]])
    backend = FakeBackend(
        lambda context: [float(t == (context[-1] + 1) % 9) for t in range(16)], 16
    )
    with Engine(backend, curve=curve, drafter=make_drafter("suffix")) as engine:
        result = engine.generate([1, 2, 3], max_tokens=600)
        assert result.token_ids == tuple((4 + i) % 9 for i in range(600))
    tried = [n for n in range(1, 33) if curve.base[n] != INF and n not in (1, 4, 8)]
    assert tried, "sizes were filled"
    assert max(backend.steps) > 8


def test_a_device_that_is_very_slow_still_knows_more_than_one_size() -> None:
    """0.4 s a token: after single tokens the time is over, and without another size no draft."""
    now = 0.0

    def run(nodes: int) -> None:
        nonlocal now
        now += 0.4 + 0.02 * nodes

    curve = measure_curve(run, 16, seconds=1.1, clock=lambda: now)
    assert [n for n in range(1, 17) if curve.base[n] != INF] == [1, 4]
