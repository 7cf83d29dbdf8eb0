"""Step-time curves: predictions, what real answers teach them, and what other loads take over."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.measure.timing import measure_curve
from edgespec.memory.times import Chunk, CostCurve

INF = float("inf")


# ------------------------------------------------------------------------------ learning


def feed(curve: CostCurve, times: dict[int, float], rounds: int, depth: int = 0) -> None:
    """Observe steps of all sizes in `times` in turn, without any change between them."""
    for _ in range(rounds):
        for n, ms in times.items():
            curve.observe(n, depth, n, ms)


def test_steps_that_fit_change_nothing() -> None:
    curve = CostCurve([INF, 4.0, 6.0], depth_ms=0.01, depth_node_ms=0.001, change_ms=2.0)
    for previous in (1, 2):
        for depth in (0, 300):
            for n in (1, 2):
                curve.observe(n, depth, previous, curve.step_ms(n, depth, previous))
    assert curve.base == pytest.approx([INF, 4.0, 6.0])
    assert [curve.scale, curve.misfit] == pytest.approx([1.0, 0.0])


def test_observing_converges_to_the_new_shape() -> None:
    """t(2) is a quarter less than measured and t(4) a quarter more; three was never measured."""
    curve = CostCurve([INF, 10.0, 16.0, INF, 20.0])
    feed(curve, {1: 10.0, 2: 12.0, 4: 25.0}, rounds=500)
    assert curve.base == pytest.approx([INF, 10.0, 12.0, INF, 25.0], rel=0.01)
    assert curve.scale == pytest.approx(1.0, rel=0.01)
    assert not curve.stopped_fitting


def test_a_machine_that_is_slower_now_does_not_make_drafts_dear() -> None:
    """Everything takes a quarter longer than measured, in the very first steps of a run."""
    curve = CostCurve([INF, 10.0, 14.0, INF, 20.0])
    feed(curve, {1: 12.5, 4: 25.0}, rounds=16)
    assert curve.scale == pytest.approx(1.25, rel=0.07)
    assert curve.base[4] == pytest.approx(20.0, rel=0.08)
    curve.scale = 1.25  # as at the next load
    feed(curve, {4: 25.0}, rounds=50)
    assert curve.base[4] == pytest.approx(20.0, rel=0.03)


def test_the_first_steps_of_a_size_count_for_much() -> None:
    """Eight steps say more than one measurement; a single one is no reason to give a size up."""
    curve = CostCurve([INF, 10.0, 16.0])
    feed(curve, {1: 10.0, 2: 20.0}, rounds=1)
    assert 16.0 < curve.base[2] < 18.0
    feed(curve, {1: 10.0, 2: 20.0}, rounds=7)
    assert 18.5 < curve.base[2] < 20.5


def test_observing_takes_depth_and_changes_into_account() -> None:
    """At 1,000 tokens a step of two takes 6 + 14 ms, and 2 more after another size."""
    curve = CostCurve([INF, 4.0, 6.0], depth_ms=0.01, depth_node_ms=0.002, change_ms=2.0)
    for _ in range(200):
        curve.observe(2, 1000, 1, 6.0 + 14.0 + 2.0)
        curve.observe(1, 1000, 2, 4.0 + 12.0 + 2.0)
    assert curve.base == pytest.approx([INF, 4.0, 6.0])
    assert curve.scale == pytest.approx(1.0)


def test_what_steps_take_is_believed_in_the_end() -> None:
    """Two and a half times as long as measured, or a third of it: more than a load is off by."""
    dear, cheap = CostCurve([INF, 10.0, 16.0]), CostCurve([INF, 10.0, 16.0])
    feed(dear, {1: 10.0, 2: 40.0}, rounds=200)
    feed(cheap, {1: 10.0, 2: 6.0}, rounds=200)
    assert dear.base[2] == pytest.approx(40.0, rel=0.05)
    assert cheap.base[2] == pytest.approx(6.0, rel=0.05)
    assert [dear.scale, cheap.scale] == pytest.approx([1.0, 1.0], rel=0.02)


@pytest.mark.parametrize("times", [1.5, 2.0, 3.0, 5.0, 1 / 3])
def test_twenty_plain_steps_show_another_speed(times: float) -> None:
    """Whichever it is, in the middle of an answer: within a tenth, by the next group of steps."""
    curve = CostCurve([INF, 10.0, 15.0])
    feed(curve, {1: 10.0}, rounds=44)
    feed(curve, {1: 10.0 * times}, rounds=20)
    assert curve.scale == pytest.approx(times, rel=0.1)


def test_a_step_is_the_measurement_of_a_size_without_one() -> None:
    """As far as a guess of 20 ms, which a fifth is a standard error of, and noise allow."""
    curve = CostCurve([INF, 10.0, INF])
    feed(curve, {1: 10.0}, rounds=16)
    assert curve.standard_errors([2], 0)[0] == 0.2
    curve.observe(2, 0, 2, 15.0)
    assert curve.base[2] == pytest.approx(15.0, rel=0.02)
    assert 0.06 < curve.standard_errors([2], 0)[0] < 0.1, "one step is worth about one measurement"
    assert curve.scale == pytest.approx(1.0, rel=0.01)


def test_hiccups_do_not_bend_the_curve() -> None:
    """Every 50th step takes 100 times as long, as when another program wakes up."""
    curve = CostCurve([INF, 10.0, 15.0])
    for step in range(2000):
        n = 1 + step % 2
        hiccup = 100.0 if step % 50 == 17 else 1.0
        curve.observe(n, 0, n, hiccup * (5.0 + 5.0 * n))
    assert curve.base[1] == pytest.approx(10.0, rel=0.1)
    assert curve.base[2] / curve.base[1] == pytest.approx(1.5, rel=0.05)
    assert not curve.stopped_fitting


@pytest.mark.parametrize("n", [1, 2])
def test_one_hiccup_moves_nothing(n: int) -> None:
    curve = CostCurve([INF, 10.0, 15.0])
    curve.observe(n, 0, n, 10_000.0)
    assert (curve.base, curve.scale) == ([INF, 10.0, 15.0], 1.0)


@pytest.mark.parametrize("times", [2.0, 4.0, 20.0])
def test_a_machine_of_another_speed_for_good_is_found_out(times: float) -> None:
    """However much slower it becomes; ratios stay, and it is as fast again when that is over."""
    curve = CostCurve([INF, 10.0, 15.0])
    feed(curve, {1: 10.0, 2: 15.0}, rounds=50)
    for scale in (times, 1.0):
        feed(curve, {1: 10.0 * scale, 2: 15.0 * scale}, rounds=20)
        assert curve.scale == pytest.approx(scale, rel=0.05)
        assert curve.base == pytest.approx([INF, 10.0, 15.0], rel=0.02)
    assert not curve.stopped_fitting


def test_a_run_of_slow_steps_tells_nothing_while_it_is_short_or_of_drafts() -> None:
    """A program that wakes up takes some steps; a size of its own may be dear on this machine."""
    curve = CostCurve([INF, 10.0, 15.0])
    for _ in range(5):
        for _ in range(7):
            curve.observe(1, 0, 1, 80.0)
        curve.observe(2, 0, 2, 15.0)
    for _ in range(100):
        curve.observe(2, 0, 2, 120.0)
    assert curve.scale == pytest.approx(1.0, rel=0.02)
    assert curve.base[2] == pytest.approx(15.0, rel=0.02)


# ms of steps over so many tokens of one model with memory of 58 GB/s (measured on a Zen 4), and
# where memory takes 1.6 times as long (made up): steps over several tokens compute meanwhile.
_FAST_MEMORY = {1: 23.7, 2: 29.1, 3: 33.7, 4: 37.8, 6: 47.3, 8: 54.5}
_SLOW_MEMORY = {1: 37.9, 2: 38.2, 3: 38.5, 4: 40.0, 6: 49.0, 8: 58.0}


@pytest.mark.parametrize("states", [(_FAST_MEMORY, _SLOW_MEMORY), (_SLOW_MEMORY, _FAST_MEMORY)])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (1, 2, 3, 4), (1, 1, 3, 6)])
@pytest.mark.parametrize("seed", range(4))
def test_memory_of_another_speed_changes_the_ratios_within_some_steps(
    states: tuple[dict[int, float], dict[int, float]], sizes: tuple[int, ...], seed: int
) -> None:
    """Sixty plain steps and forty of each size later both are within a tenth."""
    before, after = states
    draw, previous = random.Random(seed), 0
    curve = CostCurve([INF, *(before.get(n, INF) for n in range(1, 9))])

    def write(times: dict[int, float], n: int) -> None:
        nonlocal previous
        curve.observe(n, 100, previous, times[n] * math.exp(draw.gauss(0.0, 0.03)))
        previous = n

    for _ in range(300):
        write(before, draw.choice(sizes))
    counts = dict.fromkeys(sizes, 0)
    while counts[1] < 60:
        n = draw.choice(sizes)
        counts[n] += 1
        write(after, n)
    for n in {*sizes} - {1}:
        for _ in range(40 - counts[n]):
            write(after, n)
    assert curve.t(1, 100)[0] == pytest.approx(after[1], rel=0.1)
    for n in sizes:
        ratio = curve.step_ms(n, 100) / curve.step_ms(1, 100)
        assert ratio == pytest.approx(after[n] / after[1], rel=0.1), n


def test_a_slow_down_seen_by_one_size_does_not_move_its_ratio_to_the_others() -> None:
    """Plain decoding while a neighbour is busy must not make drafts look cheap."""
    curve = CostCurve([INF, 10.0, 15.0])
    feed(curve, {1: 20.0}, rounds=300)
    assert curve.base[2] / curve.base[1] == pytest.approx(1.5)
    assert curve.scale == pytest.approx(2.0, rel=0.01)


def test_a_curve_that_fits_no_more_is_found_out() -> None:
    """Drafts of four take four times as long as measured, and plain steps as long as before."""
    curve = CostCurve([INF, 10.0, 15.0, INF, 20.0])
    worst = 0.0
    for _ in range(100):
        feed(curve, {1: 10.0, 4: 80.0}, rounds=1)
        worst = max(worst, curve.misfit)
        if curve.stopped_fitting:
            break
    assert curve.stopped_fitting, f"the misfit never exceeded {worst:.2f}"


@settings(max_examples=100)
@given(
    st.floats(0.0, 40.0),
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(0, 4000), st.integers(0, 3), st.floats(0.001, 1e4)
        ),
        max_size=20,
    ),
)
def test_step_times_stay_positive(
    change_ms: float, steps: list[tuple[int, int, int, float]]
) -> None:
    """Whatever the clock says, again and again: no step is believed to take no time."""
    curve = CostCurve([INF, 4.0, 6.0, 7.0], 0.001, 0.0001, change_ms)
    for step in steps * 20:
        curve.observe(*step)
    assert all(0.0 < curve.step_ms(n, depth) < INF for n in (1, 2, 3) for depth in (0, 4000))


# ------------------------------------------------------------------------------ other sizes


@pytest.mark.parametrize(
    ("max_nodes", "base"),
    [
        (4, [INF, 4.0, 6.0, INF, 7.0]),
        (2, [INF, 4.0, 6.0]),
        (6, [INF, 4.0, 6.0, INF, 7.0, INF, INF]),
    ],
)
def test_a_curve_is_cut_or_left_open(max_nodes: int, base: list[float]) -> None:
    """Cut where steps are smaller, unmeasured where they are larger."""
    whole = CostCurve([INF, 4.0, 6.0, INF, 7.0], 0.01, 0.002, 0.5)
    resized = whole.resized(max_nodes)
    assert resized.base == base
    assert (resized.depth_ms, resized.depth_node_ms, resized.change_ms) == (0.01, 0.002, 0.5)
    assert whole.base == [INF, 4.0, 6.0, INF, 7.0]


def test_a_resized_curve_keeps_its_corrections() -> None:
    whole = CostCurve([INF, 4.0, 6.0])
    feed(whole, {1: 4.0, 2: 8.0}, rounds=50)
    learned = whole.base[2]
    assert learned > 6.0
    part = whole.resized(2)
    assert part.base == [INF, 4.0, learned]
    feed(part, {1: 4.0, 2: 10.0}, rounds=100)
    assert whole.base[2] == learned, "a copy of its own"


def test_a_scaled_curve_keeps_its_corrections() -> None:
    curve = CostCurve([INF, 4.0, 6.0], 0.01, 0.002, 0.5)
    feed(curve, {1: 4.0, 2: 8.0}, rounds=50)
    scaled = curve.scaled(2.0)
    assert scaled.base == pytest.approx([INF, 8.0, 2.0 * curve.base[2]])
    assert (scaled.depth_ms, scaled.depth_node_ms, scaled.change_ms) == (0.02, 0.004, 1.0)


def test_a_newer_measurement_keeps_the_larger_sizes_of_the_older() -> None:
    """The machine is half as fast now: what was 10 and 12 ms counts as 20 and 24."""
    older = CostCurve([INF, 4.0, 6.0, INF, 10.0, 12.0], 0.01, 0.002, 0.5)
    newer = CostCurve([INF, 8.0, 13.0, 15.0], 0.02, 0.003, 0.6)
    both = older.updated(newer)
    assert both.base == [INF, 8.0, 13.0, 15.0, 20.0, 24.0]
    assert (both.depth_ms, both.depth_node_ms, both.change_ms) == (0.02, 0.003, 0.6)


def test_a_newer_measurement_of_all_sizes_replaces_the_older() -> None:
    newer = CostCurve([INF, 8.0, 13.0, 15.0])
    assert CostCurve([INF, 4.0, 6.0]).updated(newer) == newer


def test_sizes_that_were_never_measured_stay_so() -> None:
    both = CostCurve([INF, 4.0, 6.0, INF, INF]).updated(CostCurve([INF, 4.0, INF]))
    assert both.base == [INF, 4.0, 6.0, INF, INF]


# ------------------------------------------------------------------------------ storage


def test_a_curve_survives_a_restart() -> None:
    curve = CostCurve([INF, 4.0, INF, 6.5], 0.01, 0.002, 1.5)
    document = json.loads(json.dumps(curve.as_json()))
    assert document["base_ms"] == [None, 4.0, None, 6.5]
    assert CostCurve.from_json(document) == curve


def test_a_correction_is_there_at_the_next_load_and_less_sure() -> None:
    curve = CostCurve([INF, 4.0, 6.0, INF])
    feed(curve, {1: 8.0, 2: 15.0}, rounds=50)
    loaded = CostCurve.from_json(json.loads(json.dumps(curve.as_json())))
    assert loaded.base == curve.base
    assert curve.standard_errors([2], 0)[0] < loaded.standard_errors([2], 0)[0] < 0.08


def test_a_document_of_an_earlier_version_is_read() -> None:
    """Which kept corrections apart, and said what the errors of slopes are by another name."""
    document = {**GOOD, "learned_ms": [None, 4.0, 6.5], "deviations_ms": [0.1, 0.2, 0.3]}
    document |= {"standard_errors": {"2": 0.05}, "level": 1.1, "answered_ms": 7.0}
    curve = CostCurve.from_json(document)
    assert (curve.base, curve.level) == ([INF, 4.0, 6.0], 1.1)
    assert curve.standard_errors([2], 0)[0] == pytest.approx(0.05)
    assert CostCurve.from_json(json.loads(json.dumps(curve.as_json()))) == curve


def test_a_process_begins_at_the_level_of_earlier_ones() -> None:
    curve = CostCurve([INF, 4.0, 6.0], level=1.2)
    loaded = CostCurve.from_json(json.loads(json.dumps(curve.as_json())))
    assert (loaded.scale, loaded.resized(1).scale) == (1.2, 1.2)
    assert loaded.scaled(2.0).scale == 1.2, "rounds did as their steps"


def test_a_later_measurement_keeps_the_level() -> None:
    """A slow model measures missing sizes at many loads."""
    stored = CostCurve([INF, 4.0, 6.0, INF], level=1.2)
    newer = measure_curve(
        lambda n: None, 3, seconds=0.0, known=stored, clock=itertools.count().__next__
    )
    assert (newer.level, stored.updated(newer).level) == (1.2, 1.2)


def test_a_stored_curve_takes_over_what_a_part_of_it_has_learned() -> None:
    """Its sizes, how much slower rounds were, and the sizes that only the stored one has."""
    stored = CostCurve([INF, 4.0, 6.0, 9.0])
    used = stored.resized(2)
    feed(used, {1: 4.4, 2: 8.8}, rounds=500)
    both = stored.updated(used)
    assert both.base == pytest.approx([INF, 4.0, 8.0, 9.0], rel=0.01)
    assert both.level == pytest.approx(1.3, rel=0.2)
    assert (both.standard_errors([2], 0)[0], both.standard_errors([3], 0)[0]) == (
        used.standard_errors([2], 0)[0],
        0.08,
    )


def test_a_level_is_of_whole_rounds_and_the_first_answer_sets_it() -> None:
    """Steps as predicted, and a tenth of their time beside each."""
    used = CostCurve([INF, 4.0, 6.0])
    for _ in range(300):
        used.observe(1, 0, 1, 4.0, 4.4)
    assert used.level == pytest.approx(1.1)
    assert used.answered_ms == pytest.approx(300 * 4.0)
    loaded = CostCurve.from_json(json.loads(json.dumps(used.as_json())))
    assert (loaded.level, loaded.answered_ms) == (used.level, used.answered_ms)
    for _ in range(30_000):  # two minutes of rounds that do not take longer
        loaded.observe(1, 0, 1, 4.0)
    assert loaded.level == pytest.approx(1.0, abs=0.01)


def test_a_stored_curve_takes_over_from_one_of_another_moment() -> None:
    """Another process measured again meanwhile: more sizes, and at twice the speed."""
    used = CostCurve([INF, 8.0, 12.0, INF, 16.0])
    feed(used, {1: 8.0, 2: 15.0, 4: 16.0}, rounds=500)
    stored = CostCurve([INF, 4.0, 6.0, 9.0, INF]).updated(used)
    ratios = [ms / stored.base[1] for ms in stored.base]
    assert ratios == pytest.approx([INF, 1.0, 15 / 8, 9 / 4, 2.0], rel=0.01)


GOOD: dict[str, Any] = {
    "base_ms": [None, 4.0, 6.0],
    "depth_ms": 0.0,
    "depth_node_ms": 0.0,
    "change_ms": 0.0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"base_ms": []},
        {"base_ms": [None]},
        {"base_ms": [None, None]},
        {"base_ms": [None, None, 4.0]},
        {"base_ms": [None, 0.0, 4.0]},
        {"base_ms": [None, 4.0, -1.0]},
        {"base_ms": [None, 4.0, float("nan")]},
        {"base_ms": [None, "fast"]},
        {"base_ms": [None, [4.0]]},
        {"base_ms": [None, 10**400]},
        {"base_ms": None},
        {"base_ms": 4.0},
        {"depth_ms": None},
        {"depth_ms": "deep"},
        {"depth_ms": float("nan")},
        {"depth_ms": -1.0},
        {"depth_node_ms": float("nan")},
        {"depth_node_ms": -1.0},
        {"change_ms": {}},
        {"change_ms": float("nan")},
        {"change_ms": -1.0},
        {"deviations_ms": [0.1, 0.1]},
        {"deviations_ms": [0.1, 0.1, -1.0]},
        {"deviations_ms": "many"},
        {"standard_errors": {"2": 7.0}},
        {"standard_errors": {"two": 0.1}},
        {"standard_errors": [1, 2]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_damaged_document_is_refused(change: dict[str, Any]) -> None:
    assert CostCurve.from_json(GOOD).base == [INF, 4.0, 6.0]
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostCurve.from_json({**GOOD, **change})


@pytest.mark.parametrize("name", GOOD)
def test_a_document_without_a_key_is_refused(name: str) -> None:
    with pytest.raises(KeyError):
        CostCurve.from_json({key: value for key, value in GOOD.items() if key != name})


def test_a_step_by_hand() -> None:
    """6 + (0.01 + 0.002 * 2) * 100 = 7.4, and 3 more after a step of another size."""
    curve = CostCurve([INF, 4.0, 6.0], depth_ms=0.01, depth_node_ms=0.002, change_ms=3.0)
    assert curve.step_ms(2, 100) == pytest.approx(7.4)
    assert curve.step_ms(2, 100, previous=2) == pytest.approx(7.4)
    assert curve.step_ms(2, 100, previous=1) == pytest.approx(10.4)
    assert CostCurve([INF, 4.0, INF, 6.0, INF]).max_nodes == 3


def test_a_step_over_several_texts_reads_the_cache_of_each() -> None:
    """At a depth of 100 each of three texts adds 1 ms, and each of six nodes 0.2 ms."""
    curve = CostCurve([INF, *(2.0 + n for n in range(1, 9))], depth_ms=0.01, depth_node_ms=0.002)
    together = curve.together(3)
    assert curve.step_ms(6, 100) == pytest.approx(8.0 + 1.0 + 1.2)
    assert together.step_ms(6, 100) == pytest.approx(8.0 + 3.0 + 1.2)
    for _ in range(40):  # which is no news to it
        together.observe(3, 100, 3, together.step_ms(3, 100))
    assert together.scale == pytest.approx(1.0)


# ------------------------------------------------------------------------------ how sure it is


TRUE = CostCurve([INF, 4.0, 4.5, 4.8, 5.0, 5.6, 6.2, 6.8, 7.0], 0.0012, 0.0008, 0.4)


def write(curve: CostCurve, texts: list[int], seed: int, slow: float = 1.0) -> None:
    """Answers of 100 steps behind so many tokens, three quarters of them plain; 8% noise."""
    draw = random.Random(seed)
    for depth in texts:
        previous = 1
        for step in range(100):
            n = draw.choice((2, 4, 8)) if draw.random() < 0.25 else 1
            ms = slow * TRUE.step_ms(n, depth + step, previous) * draw.gauss(1.0, 0.08)
            curve.observe(n, depth + step, previous, ms)
            previous = n


def test_one_parameter_by_hand() -> None:
    """Only the size is unsure: 0.08 of 8 ms, as the noise is, so that half of a tenth is moved."""
    curve = CostCurve([INF, 4.0, 8.0])
    curve._state.cov = [[0.0] * 5 for _ in range(5)]
    off = 0.1
    curve.observe(2, 9, 2, 8.0 * math.exp(off))
    own, speed, noise = 0.08**2, 0.01**2, 0.06**2
    assert curve.base[2] == pytest.approx(8.0 * math.exp(off * own / (own + speed + noise)))
    assert curve.scale == pytest.approx(math.exp(off * speed / (own + speed + noise)))
    [error] = curve.standard_errors([2], 0)
    assert error**2 == pytest.approx(own * (1 - own / (own + speed + noise)))


def test_what_is_too_far_off_counts_as_far_as_is_likely() -> None:
    """A size that takes twice as long, at first: three standard errors of it."""
    curve = CostCurve([INF, 4.0, 8.0])
    curve._state.cov = [[0.0] * 5 for _ in range(5)]
    curve.observe(2, 9, 2, 16.0)
    own, all_of_it = 0.08**2, 0.08**2 + 0.01**2 + 0.06**2
    assert curve.base[2] == pytest.approx(8.0 * math.exp(3.0 * own / all_of_it**0.5))
    assert curve.standard_errors([2], 0)[0] > 0.068, "and it is nearly as unsure as before"


@pytest.mark.parametrize("wrong", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_slopes_that_were_measured_wrongly_are_mended_by_answers(wrong: float, seed: int) -> None:
    """Steps behind 1,000 tokens are within a tenth, after answers behind 30 to 900."""
    curve = CostCurve(list(TRUE.base), TRUE.depth_ms * wrong, TRUE.depth_node_ms * wrong, 0.1)
    write(curve, [40, 600, 30, 900, 120, 300], seed)
    for n in (1, 2, 4, 8):
        assert curve.step_ms(n, 1000) / curve.step_ms(1, 0) == pytest.approx(
            TRUE.step_ms(n, 1000) / TRUE.step_ms(1, 0), rel=0.1
        )
    assert curve.change_ms == pytest.approx(0.4, abs=0.12)


def test_long_use_does_not_drift() -> None:
    """A machine at 1.3 times the time, 40 answers: speed, shape and slopes stay apart."""
    curve = CostCurve(list(TRUE.base), TRUE.depth_ms, TRUE.depth_node_ms, TRUE.change_ms)
    draw = random.Random(1)
    write(curve, [draw.randrange(20, 1500) for _ in range(40)], 2, slow=1.3)
    assert curve.scale == pytest.approx(1.3, rel=0.06)
    for n in (2, 4, 8):
        assert curve.base[n] == pytest.approx(TRUE.base[n], rel=0.06)
    assert curve.depth_node_ms == pytest.approx(TRUE.depth_node_ms, rel=0.2)
    assert curve._state.cov[4][4] == 1.0, "nothing was read"


def test_what_is_unsure_by_hand() -> None:
    """0.08 of a measured base, 0.2 of a guessed one, 1/8000 of a plain step for depth and node."""
    curve = CostCurve([INF, 4.0, INF, 8.0], depth_ms=0.01)
    lost = 0.08 * 8.0 + 2 * 1000 * 4.0 / 8000
    assert curve.standard_errors([3], 1000)[0] == pytest.approx(lost / (8.0 + 10.0))
    assert curve.together(2).standard_errors([3], 1000)[0] == pytest.approx(lost / (8.0 + 20.0))
    assert curve.standard_errors([2], 1000)[0] == 0.2
    for found, own in ((curve.t(3, 0), 0.08), (curve.t(2, 0), 0.2), (curve.t(1, 0), 0.0)):
        assert found[1] == pytest.approx(math.hypot(0.15, own)), "and the machine's speed"
    assert curve.t(1, 0, Chunk(2, 0)) == curve.t(3, 0)


@pytest.mark.parametrize("times", [4.0, 2.0, 0.5, 0.25])
def test_a_few_plain_steps_of_another_speed_are_no_news(times: float) -> None:
    """Eight in a row would be."""
    curve = CostCurve([INF, 4.0, 6.0])
    feed(curve, {1: 4.0, 2: 6.0}, rounds=50)
    for _ in range(3):
        curve.observe(1, 0, 1, times * 4.0)
    curve.observe(2, 0, 2, 6.0)
    assert (curve.scale, curve.base) == (1.0, [INF, 4.0, 6.0])


def test_what_is_unsure_shrinks_with_steps_and_is_kept() -> None:
    curve = CostCurve(list(TRUE.base), TRUE.depth_ms, TRUE.depth_node_ms, TRUE.change_ms)
    before = curve.standard_errors([8], 1000)[0]
    write(curve, [100, 1000], 3)
    assert curve.standard_errors([1], 1000)[0] == 0.0
    assert curve.standard_errors([8], 1000)[0] < before / 2
    loaded = CostCurve.from_json(curve.as_json())
    assert loaded._state.slopes == pytest.approx(curve._state.slopes)
    [known], [of_load] = (one.standard_errors([8], 0) for one in (curve, loaded))
    assert known < of_load < 0.05, "of another moment"
    assert loaded.resized(4).standard_errors([4], 0)[0] == pytest.approx(
        loaded.standard_errors([4], 0)[0], rel=0.01
    )


def test_how_long_a_step_takes_now_is_told_with_its_error() -> None:
    """At 1.5 times the time; a size is sure as what all have in common and its own measurement."""
    curve = CostCurve([INF, 4.0, 6.0], depth_ms=0.01)
    before_ms, before = curve.t(2, 100)
    assert before_ms == pytest.approx(7.0) and before > 0.15
    feed(curve, {1: 1.5 * 5.0, 2: 1.5 * 7.0}, rounds=100, depth=100)
    ms, error = curve.t(2, 100)
    assert ms == pytest.approx(1.5 * 7.0, rel=0.02)
    assert error < 0.05 < curve.t(2, 3000)[1] < before + 0.5


def test_a_chunk_reads_what_stands_before_it() -> None:
    """6 ms for a token and two more, 0.5 + 0.2 for its text, 3 + 2 x 1.2 for the chunk's."""
    curve = CostCurve([INF, 4.0, 5.0, 6.0], depth_ms=0.005, depth_node_ms=0.002)
    assert curve.t(1, 100, Chunk(2, 600))[0] == pytest.approx(6.0 + 0.7 + 3.0 + 2.4)
    assert curve.t(1, 100, Chunk(0, 600))[0] == pytest.approx(4.7)
    assert curve.t(1, 100, Chunk(12, 0))[0] == pytest.approx(4.0 + 12 + 0.7)


def test_what_a_token_beyond_all_sizes_adds_is_learned() -> None:
    """And nothing else by it: three sizes were measured, and chunks take twice what those say."""
    curve = CostCurve([INF, 4.0, 5.0, 6.0])
    for step in range(60):
        tokens = 10 + step % 20
        curve.observe(1, 0, 0, 4.0)
        curve.observe_chunk(Chunk(tokens, 0), 1, 6.0 + 2.0 * (tokens - 2))
    assert curve.t(1, 0, Chunk(32, 0))[0] == pytest.approx(6.0 + 60.0, rel=0.03)
    assert curve.base == [INF, 4.0, 5.0, 6.0]
    assert curve.level == pytest.approx(1.0), "chunks are no rounds of answers"


def test_a_curve_that_knows_nothing_learns_from_its_first_step() -> None:
    for ms in (0.01, 1.0, 60_000.0):
        curve = CostCurve.unmeasured()
        assert curve.t(1, 0)[1] > 1.0
        curve.observe(1, 0, 0, ms)
        found_ms, error = curve.t(1, 0)
        assert found_ms == pytest.approx(ms, rel=0.01) and error < 0.1


def test_a_pause_beside_a_step_is_not_what_answers_take() -> None:
    """300 ms behind one step of 5 ms, in the first answers: a lid that was closed."""
    curve = CostCurve([INF, 5.0, 6.0])
    for number in range(40):
        curve.observe(1, 0, 1, 5.0, 305.0 if number == 39 else 5.4)
    assert curve.level == pytest.approx(1.08, abs=0.05)
