"""Ratios of times, their intervals, and what they weigh."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.bench.summary import Ratio, Timed, middle_repeats, ratio_of, together


def test_a_ratio_weighs_prompts_by_their_time() -> None:
    """10 + 30 tokens in 1 + 1 s over 10 + 30 tokens in 1 + 3 s: 20/s over 10/s."""
    ours, other = [Timed(10, 1.0), Timed(30, 1.0)] * 3, [Timed(10, 1.0), Timed(30, 3.0)] * 3
    assert together(ours).per_s == 20.0 and together(other).per_s == 10.0
    ratio = ratio_of(ours, other)
    assert ratio.value == 2.0
    assert ratio.low is not None and ratio.high is not None
    assert 1.0 <= ratio.low < 2.0 < ratio.high <= 3.0
    assert ratio_of(ours, other) == ratio, "the same numbers give the same interval"


@pytest.mark.parametrize("prompts", [1, 4])
def test_few_prompts_have_no_interval(prompts: int) -> None:
    assert ratio_of([Timed(10, 1.0)] * prompts, [Timed(10, 2.0)] * prompts) == Ratio(2.0)


def test_an_interval_holds_its_ratio() -> None:
    """Here every prompt is 1.30 to 1.31 times as fast, and all together 1.41 times."""
    ours = [Timed(100, 1.0), Timed(20, 0.25)] * 2
    base = [Timed(100, 1.3), Timed(100, 1.64)] * 2
    ratio = ratio_of([*ours, *ours], [*base, *base], list("aabbccdd"))
    assert ratio.value == pytest.approx(1.41, abs=0.01)
    assert ratio.value is not None and ratio.low is not None and ratio.high is not None
    assert ratio.low <= ratio.value <= ratio.high


def test_answers_of_one_token_tell_nothing_about_decoding() -> None:
    nothing = Timed(0, 0.0)
    ours, base = [Timed(10, 1.0)] * 5, [Timed(10, 2.0)] * 5
    told = ratio_of(ours, base)
    assert ratio_of([*ours, nothing, Timed(9, 1.0)], [*base, Timed(9, 1.0), nothing]) == told
    assert ratio_of([nothing], [nothing]) == Ratio(None)


def test_an_interval_narrows_with_more_prompts() -> None:
    few = [Timed(10, 1.0 + 0.1 * (i % 3)) for i in range(9)]
    base = [Timed(10, 2.0)] * 9
    wide, narrow = ratio_of(few, base), ratio_of(few * 9, base * 9)
    assert wide.value is not None and narrow.value == pytest.approx(wide.value)
    widths = [(one.high or 0.0) - (one.low or 0.0) for one in (narrow, wide)]
    assert 0.0 < widths[0] < 0.5 * widths[1]


def test_what_differs_between_tasks_does_not_widen_an_interval() -> None:
    ours = [Timed(10, 1.0)] * 3 + [Timed(10, 0.2)] * 3
    base = [Timed(10, 2.0)] * 6
    apart = ratio_of(ours, base, ["a"] * 3 + ["b"] * 3)
    together = ratio_of(ours, base)
    assert together.value is not None and together.low is not None
    assert (apart.low, apart.high) == pytest.approx((together.value, together.value))
    assert together.low < 0.8 * together.value


@pytest.mark.parametrize("size", [2, 3, 8])
def test_few_prompts_a_task_give_the_interval_of_stratified_sampling(size: int) -> None:
    """Rates over a constant are means, whose standard error is known: with n prompts in each task
    of N in all, sqrt(sum(n * variance)) / N. Drawing n of n would be sqrt(1/2) of it for n = 2."""
    tasks = [f"{place // size}" for place in range(240)]
    tokens = np.random.default_rng(5).integers(50, 150, size=len(tasks))
    ratio = ratio_of([Timed(int(n), 1.0) for n in tokens], [Timed(1, 1.0)] * len(tasks), tasks)
    variances = tokens.reshape(-1, size).var(axis=1, ddof=1)
    error = np.sqrt(size * variances.sum()) / len(tasks)
    assert ratio.value is not None and ratio.low is not None and ratio.high is not None
    assert ratio.value - ratio.low == pytest.approx(1.96 * error, rel=0.1)
    assert ratio.high - ratio.value == pytest.approx(1.96 * error, rel=0.1)


def test_prompts_that_are_alone_in_their_task_are_drawn_together() -> None:
    ours = [Timed(10, seconds) for seconds in (1.0, 0.9, 0.5, 0.8, 0.7)]
    base = [Timed(10, 2.0)] * 5
    assert ratio_of(ours, base, list("abcde")) == ratio_of(ours, base)
    one = ratio_of(ours, base, list("aabbc"))
    joined = ratio_of([*ours[:2], ours[4], *ours[2:4]], base, list("aaabb"))
    assert (one.low, one.high) == pytest.approx((joined.low, joined.high)), "joins the largest"


def test_the_repeat_with_the_median_ratio_counts() -> None:
    base = [Timed(10, 1.0), Timed(10, 4.0), Timed(10, 1.0)]
    assert middle_repeats([Timed(10, 0.5), Timed(10, 3.9), Timed(10, 0.25)], base) == [0]
    assert middle_repeats([Timed(10, 0.5), Timed(10, 1.0)], base[:2]) == [0, 1]
    alone = [Timed(10, 1.0), Timed(10, 4.0), Timed(10, 2.0)]
    assert middle_repeats(alone, alone) == [2], "a baseline's own: by its speed"
