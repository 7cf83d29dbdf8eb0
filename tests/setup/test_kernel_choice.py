"""Whose matrix kernels a plan uses: as asked, wherever they fit, and by whole steps in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planning_cases import PLENTY, SPEC, curve, model, plan_of

from edgespec.memory.plan.options import KernelChoice
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.models.spec import ModelSpec
from edgespec.setup import planning
from edgespec.setup.planning import best_kernels, prepare_kernels
from edgespec.setup.stored import settings_key, stored_curve

WITH_KERNELS = replace(PLENTY, missing_kernels="")
REQUEST = Request(threads=2, is_plain_greedy=True)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has kernels."""
    monkeypatch.setattr(planning, "missing_kernels", lambda: "")
    monkeypatch.setattr("edgespec.setup.stored.kernels_key", lambda: "kernels 1")


def planner(spec: ModelSpec = SPEC) -> Callable[[Request], Plan]:
    """Plans with what is stored; llama.cpp's kernels take 10 ms a step where nothing is."""

    def speed(settings: Any) -> SpeedModel:
        found = stored_curve(spec, settings)
        return SpeedModel(found or curve(), is_measured=found is not None)

    def plan(request: Request) -> Plan:
        return plan_of(spec, WITH_KERNELS, speed, kernels=request.kernels)

    return plan


def store_steps(own_ms: float, their_ms: float) -> None:
    plan = planner()(REQUEST)
    for kernels, ms in ((True, own_ms), (False, their_ms)):
        settings = replace(plan, kernels=kernels)
        taken = CostCurve([float("inf"), ms, 1.2 * ms])
        cache.store("curves", settings_key(SPEC, settings), taken.as_json())


def reason_of(plan: Plan) -> str:
    return str(plan.as_json()["kernels"]["reason"])


def test_what_is_asked_for_is_not_measured_away() -> None:
    store_steps(9.0, 3.0)
    asked: tuple[tuple[KernelChoice, bool], ...] = (("on", True), ("off", False))
    for kernels, used in asked:
        plan = best_kernels(SPEC, replace(REQUEST, kernels=kernels), planner())
        assert plan.kernels is used and reason_of(plan) == "as asked"


def test_without_measurements_they_are_used_where_they_fit() -> None:
    plan = best_kernels(SPEC, REQUEST, planner())
    assert plan.kernels and reason_of(plan) == "edgespec's own, which have this file's types"
    other = model(kind="F16")
    assert not best_kernels(other, REQUEST, planner(other)).kernels


@pytest.mark.parametrize(("own_ms", "used"), [(4.0, False), (2.0, True)])
def test_whole_steps_of_both_decide(own_ms: float, used: bool) -> None:
    store_steps(own_ms, 3.0)
    best = best_kernels(SPEC, REQUEST, planner())
    assert best.kernels is used and "with llama.cpp's" in reason_of(best)


@pytest.mark.parametrize(
    ("changes", "attached"),
    [
        ({}, 1),
        ({"kernels": "on"}, 1),
        ({"kernels": "off"}, 0),
        ({"gpu_layers": -1}, 0),
        ({"backend": "onnx"}, 0),
    ],
)
def test_llama_cpp_is_handed_them_before_a_plan_that_may_use_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], attached: int
) -> None:
    calls: list[None] = []

    def attach() -> str:
        calls.append(None)
        return "another version"

    monkeypatch.setattr("edgespec.backends.llama.kernels.refusal_of_kernels", attach)
    prepare_kernels(SPEC, replace(REQUEST, **changes))
    assert len(calls) == attached
