"""What snapshots of a recurrent state cost: step times with some tell of those with others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pytest
from hybrid_gguf import Shape, write_hollow
from planning_cases import reason

from edgespec.drafting.combined import SAVINGS
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import (
    curve_key,
    curve_with,
    keep_curve,
    keep_rounds,
    keep_snapshot_cost,
    learned_key,
    rounds_key,
    settings_key,
    snapshot_cost,
    stored_rounds,
    stored_snapshot_costs,
)

pytestmark = pytest.mark.usefixtures("cache_folder")

NEVER = [(1, 1, 1000.0)]  # nothing that was drafted was right
INF = float("inf")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_hollow(tmp_path / "model.gguf", Shape("qwen35", predicting=1)))


def plan_of(spec: ModelSpec, **changes: Any) -> Plan:
    return make_run_plan(spec, Request(context_size=512, kernels="off", **changes))


def measured(spec: ModelSpec, cost: float | None = None, count: int = 3) -> Plan:
    """An earlier run had so many snapshots."""
    settings = plan_of(spec, drafter="suffix", draft_max=count)
    times = [INF, *(10.0 + n for n in range(count + 1))]
    keep_curve(curve_key(spec, settings), CostCurve(times), replaced=True)
    if cost is not None:
        keep_snapshot_cost(spec, settings, count, cost)
    return settings


def test_step_times_are_kept_by_their_snapshots(spec: ModelSpec) -> None:
    settings = measured(spec)
    assert settings.snapshots == 3
    other = replace(settings, snapshots=7)
    assert curve_key(spec, settings) != curve_key(spec, other)
    assert settings_key(spec, settings) == settings_key(spec, other), "rounding does not change"
    found = curve_with(spec, settings)
    assert found is not None and found.base[1] == 10.0


def test_times_with_some_snapshots_tell_of_those_with_others(spec: ModelSpec) -> None:
    settings = measured(spec)
    for count in (0, 7):
        assert curve_with(spec, replace(settings, snapshots=count)) is None, "cost unknown"
    measured(spec, 1.06)
    assert snapshot_cost(spec, settings, 3) == 1.06
    assert snapshot_cost(spec, settings, 7) == pytest.approx(1.14)
    assert snapshot_cost(spec, settings, 0) == 1.0
    for count, expected in ((0, 10.0 / 1.06), (7, 10.0 * 1.14 / 1.06)):
        curve = curve_with(spec, replace(settings, snapshots=count))
        assert curve is not None and curve.base[1] == pytest.approx(expected)


def test_plain_times_of_another_moment_are_not_compared(spec: ModelSpec) -> None:
    """A machine is faster at one time than at another, by more than snapshots cost."""
    settings = replace(measured(spec, 1.06), snapshots=0)
    keep_curve(curve_key(spec, settings), CostCurve([INF, 20.0]), replaced=True)
    curve = curve_with(spec, settings)
    assert curve is not None and curve.base[1] == pytest.approx(10.0 / 1.06)


def test_damaged_costs_are_none(spec: ModelSpec) -> None:
    settings = measured(spec)
    cache.store("snapshots", settings_key(spec, settings), {"3": "x", "x": 2.0, "7": -1.0})
    assert stored_snapshot_costs(spec, settings) == {}


@pytest.mark.parametrize(("cost", "drafts"), [(1.06, 0), (1.005, 3)])
def test_a_plan_leaves_out_snapshots_that_cost_more_than_they_bring(
    spec: ModelSpec, cost: float, drafts: int
) -> None:
    measured(spec, cost)
    without_head = {"draft_model": None, "users": 1}
    saw(spec, 400.0, 0.0)
    assert plan_of(spec, **without_head).draft_max >= 3, "what is usual says that drafts pay"
    keep_rounds(spec, "suffix", NEVER)
    plan = plan_of(spec, **without_head)
    assert plan.draft_max == drafts
    assert f"{cost:.2f} times as long" in reason(plan, "snapshots") or cost < 1.01


def test_what_decided_against_them_is_forgotten(spec: ModelSpec) -> None:
    """Texts change: after a day drafts are tried again."""
    keep_rounds(spec, "suffix", NEVER)
    assert stored_rounds(spec, "suffix") == ((1, 1, 1000.0),)
    key = rounds_key(spec, "suffix")
    old = time() - 25 * 3600.0
    cache.store("rounds", key, {"rounds": NEVER, "time": old})
    assert stored_rounds(spec, "suffix") != ((1, 1, 1000.0),)
    keep_rounds(spec, "suffix", [(4, 4, 600.0)])
    assert stored_rounds(spec, "suffix") == ((4, 4, 600.0),), "and what follows counts alone"
    attending = replace(spec, arch="llama")
    cache.store("rounds", rounds_key(attending, "suffix"), {"rounds": NEVER, "time": old})
    assert stored_rounds(attending, "suffix") == ((1, 1, 1000.0),)


def saw(spec: ModelSpec, rounds: float, saved: float) -> None:
    """An earlier run with the head had so many rounds, and saved that part of their time."""
    plan = plan_of(spec, drafter="suffix")
    found = (rounds, 1000.0 * rounds, 1000.0 * rounds * saved, 0.0)
    values = dict(zip(SAVINGS, found, strict=True))
    document = {**values, "time": time(), "since": time() - 600.0}
    cache.store("learned", learned_key(spec, plan, None), document)


@pytest.mark.parametrize(("saved", "used"), [(0.05, False), (0.09, True)])
def test_a_head_pays_for_the_snapshots_that_it_alone_needs(
    spec: ModelSpec, saved: float, used: bool
) -> None:
    measured(spec, 1.06)
    keep_rounds(spec, "suffix", NEVER)
    saw(spec, 400.0, saved)
    plan = plan_of(spec)
    assert (plan.drafter == "suffix,head") == used
    assert (plan.snapshots > 0) == used
    assert used or "1.06 times as long" in reason(plan, "head")
