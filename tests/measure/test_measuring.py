"""Measuring on a machine made of arithmetic: its clock moves only when a step is run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.measure.timing import measure_curve
from edgespec.memory.times import CostCurve

INF = float("inf")
# Milliseconds of n = 1, 2, ...: three nodes cost more than four, as in the design's table.
TIMES = (4.0, 6.5, 9.0, 8.5, 9.5, 10.5, 11.75, 12.75, 15.0, 16.0, 17.0, 17.5)
SLOW_TIMES = tuple(25 * ms for ms in TIMES)


class Machine:
    """A device whose steps take exactly `times[n - 1]` ms, and more where their size changes.

    From step number `slow_from` on everything takes `slow` times as long.
    """

    def __init__(
        self,
        times: Sequence[float] = TIMES,
        change_ms: float = 0.0,
        *,
        slow: float = 1.0,
        slow_from: int = 0,
    ) -> None:
        self.times = times
        self.change_ms = change_ms
        self.slow = slow
        self.slow_from = slow_from
        self.compile_ms = 0.0  # of a size that it meets for the first time
        self.now = 0.0
        self.steps: list[int] = []

    def run(self, n: int) -> None:
        ms = self.times[n - 1]
        if self.steps and self.steps[-1] != n:
            ms += self.change_ms
        if n not in self.steps:
            ms += self.compile_ms
        self.now += ms / 1e3 * (self.slow if len(self.steps) >= self.slow_from else 1.0)
        self.steps.append(n)

    def clock(self) -> float:
        return self.now

    def measure(self, max_nodes: int, **options: Any) -> CostCurve:
        return measure_curve(self.run, max_nodes, clock=self.clock, **options)


@pytest.mark.parametrize("change_ms", [0.0, 2.25])
def test_measuring_recovers_every_step_time_and_the_cost_of_a_change(change_ms: float) -> None:
    curve = Machine(change_ms=change_ms).measure(12, seconds=10.0)
    assert curve.base[0] == INF
    assert curve.base[1:] == pytest.approx(TIMES)
    assert curve.change_ms == pytest.approx(change_ms)
    assert (curve.max_nodes, curve.depth_ms, curve.depth_node_ms) == (12, 0.0, 0.0)


@pytest.mark.parametrize(
    ("times", "slow_from", "most"),
    [(TIMES, 11, 0), (TIMES, 40, 0), (TIMES, 80, 0), (SLOW_TIMES, 60, 1)],
)
def test_a_machine_that_slows_down_while_measuring_keeps_its_ratios(
    times: tuple[float, ...], slow_from: int, most: int
) -> None:
    """After t(1), or later, everything takes 1.4 times as long; sizes are seen beside neighbours.

    A slow model has few samples of a size: one beside the change may be off.
    """
    curve = Machine(times, slow=1.4, slow_from=slow_from).measure(12, seconds=10.0)
    pairs = zip(curve.base[1:], times, strict=True)
    off = [ms / curve.base[1] * times[0] / true for ms, true in pairs]
    assert sum(abs(one - 1.0) > 1e-6 for one in off) <= most


class Noisy(Machine):
    """Steps differ by 5%, and one in twenty was disturbed."""

    def __init__(self, seed: int, times: Sequence[float]) -> None:
        super().__init__(times, change_ms=0.1 * times[0])
        self.draw = random.Random(seed)

    def run(self, n: int) -> None:
        before = self.now
        super().run(n)
        longer = self.draw.uniform(1.2, 2.5) if self.draw.random() < 0.05 else 1.0
        self.now = before + (self.now - before) * longer * self.draw.gauss(1.0, 0.05)


@pytest.mark.parametrize(("times", "share"), [(TIMES, 0.95), (tuple(5 * ms for ms in TIMES), 0.85)])
def test_sizes_that_matter_are_seldom_off_by_a_tenth(
    times: tuple[float, ...], share: float
) -> None:
    """Forty loads. With two samples of each size it was 0.79, and 0.78 of a slower model."""
    near = []
    for seed in range(40):
        curve = Noisy(seed, times).measure(12, seconds=1.2)
        ratios = [curve.base[n] / curve.base[1] * times[0] / times[n - 1] for n in (2, 4, 8)]
        near += [abs(ratio - 1.0) < 0.1 for ratio in ratios]
    assert sum(near) / len(near) >= share


def test_a_hiccup_while_measuring_does_not_spoil_a_size() -> None:
    """One step, of one token or of more, takes half a second more: no size looks dear or cheap."""
    for hiccup, times in itertools.product(range(60), (TIMES, SLOW_TIMES)):
        machine = Machine(times)
        steps = itertools.count()

        def run(n: int, machine: Machine = machine, steps: Iterator[int] = steps) -> None:
            machine.run(n)
            machine.now += 0.5 * (next(steps) == hiccup)  # noqa: B023

        curve = measure_curve(run, 12, seconds=30.0, clock=machine.clock)
        assert curve.base[1:] == pytest.approx(times), f"hiccup in step {hiccup}"


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.6, 10.0])
def test_compiling_for_a_size_is_not_taken_for_its_step(seconds: float) -> None:
    """A GPU's driver compiles when it meets a size: 30 ms here. What is not true is not stored."""
    machine = Machine(change_ms=1.5)
    machine.compile_ms = 30.0
    curve = machine.measure(12, seconds=seconds)
    measured = {n: curve.base[n] for n in range(1, 13) if curve.base[n] != INF}
    assert measured == pytest.approx({n: TIMES[n - 1] for n in measured})
    assert len(measured) >= (12 if seconds == 10.0 else 2)


def test_a_device_that_does_not_compile_makes_no_step_for_nothing() -> None:
    """Of each size and the two single tokens beside it, after what tells its price."""
    machine = Machine()
    machine.measure(12, seconds=10.0)
    samples = machine.steps.count(12)
    assert len(machine.steps) == 1 + 8 + 2 * 8 + 3 * samples * 11


class Cold(Machine):
    """Steps come nearer to their time one by one: caches hold a little more of the weights."""

    cold = 0.0  # how much longer the next one takes, in parts of its time

    def run(self, n: int) -> None:
        before = self.now
        super().run(n)
        self.now += self.cold * (self.now - before)
        self.cold *= 0.8


def test_steps_at_first_that_find_cold_caches_make_no_size_look_cheap() -> None:
    """They are single tokens; the price of a change was nothing, and two tokens looked cheap."""
    machine = Cold(change_ms=0.4)
    machine.cold = 0.8
    curve = machine.measure(12, seconds=10.0)
    assert curve.change_ms == pytest.approx(0.4, abs=0.1)
    for n in (2, 4, 8, 12):
        assert curve.base[n] / curve.base[1] == pytest.approx(TIMES[n - 1] / TIMES[0], rel=0.03)


def test_measuring_a_backend_of_single_tokens() -> None:
    machine = Machine()
    curve = machine.measure(1, seconds=10.0)
    assert curve.base == [INF, pytest.approx(4.0)]
    assert set(machine.steps) == {1}


def test_measuring_stops_in_time_and_leaves_the_rest_unmeasured() -> None:
    """With steps of 100 ms there is time for t(1), for 4 and 8, and not for more."""
    machine = Machine(times=(100.0,) * 12)
    curve = machine.measure(12, seconds=1.05)
    measured = [n for n in range(1, 13) if curve.base[n] != INF]
    assert measured == [1, 4, 8]
    assert machine.now <= 1.05 + 0.2  # the pair under way is finished


def test_a_slow_model_measures_the_sizes_of_short_drafts() -> None:
    """Of a 1.5B model on two cores: a size between two measured ones counts as unsure."""
    curve = Machine(times=tuple(40.0 + 8.0 * n for n in range(32))).measure(32, seconds=1.1)
    assert all(curve.base[n] != INF for n in (2, 3, 4, 8))


def test_a_budget_of_nothing_still_gives_two_sizes() -> None:
    curve = Machine(times=(100.0,) * 12).measure(12, seconds=0.0)
    assert curve.base[1] == pytest.approx(100.0)
    assert [n for n in range(1, 13) if curve.base[n] != INF] == [1, 4]


def test_a_later_measurement_goes_on_with_what_is_missing() -> None:
    """Each time a few more sizes, and in the end all of them."""
    known, counts = None, []
    for _ in range(6):
        machine = Machine(times=(100.0, *(100.0 + n for n in range(2, 13))))
        known = machine.measure(12, seconds=1.0, known=known)
        counts.append(sum(ms != INF for ms in known.base))
    assert counts == sorted(counts)
    assert counts[0] < 6
    assert counts[-1] == 12
    assert known is not None
    assert known.base[1:] == pytest.approx([100.0, *(100.0 + n for n in range(2, 13))])


def test_a_later_measurement_keeps_the_slopes_and_fits_the_new_size() -> None:
    known = CostCurve([INF, 4.0, 6.5, 9.0], depth_ms=0.5, depth_node_ms=0.25)
    longer = Machine().measure(5, seconds=0.0, known=known)
    assert longer.base == [INF, pytest.approx(4.0), 6.5, 9.0, INF, INF]
    assert (longer.depth_ms, longer.depth_node_ms) == (0.5, 0.25)
    shorter = Machine().measure(2, seconds=0.0, known=known)
    assert shorter.base == [INF, pytest.approx(4.0), 6.5]


def test_times_of_another_moment_are_brought_to_the_speed_of_this_one() -> None:
    known = CostCurve([INF, 4.0, 6.5, 9.0])
    curve = Machine(slow=2.0).measure(3, seconds=0.0, known=known)
    assert curve.base[1:] == pytest.approx([8.0, 13.0, 18.0])


@pytest.mark.parametrize("change_ms", [0.0, 0.5, 20.0])
@settings(max_examples=60)
@given(times=st.lists(st.floats(1.0, 50.0), min_size=2, max_size=33), seconds=st.floats(0.0, 3.0))
def test_whatever_is_measured_is_right(
    change_ms: float, times: list[float], seconds: float
) -> None:
    """Any shape, any budget: a size is either unmeasured or has its true time.

    Half of t(1) is the least a step is believed to take.
    """
    machine = Machine(times, change_ms)
    curve = machine.measure(len(times), seconds=seconds)
    assert curve.change_ms == pytest.approx(change_ms, abs=1e-6)
    assert len(curve.base) == len(times) + 1
    for n, ms in enumerate(times, start=1):
        if curve.base[n] != INF or n == 1:
            assert curve.base[n] == pytest.approx(max(ms, times[0] / 2))
