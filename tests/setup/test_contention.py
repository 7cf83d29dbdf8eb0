"""Step times where other programs always compute: kept without what these explain, and said so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_backend import FakeBackend
from planning_cases import INF, PLENTY, SPEC

from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.setup import loading, planning
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import curve_key, keep_curve, plain_key, settings_key, stored_curve

pytestmark = pytest.mark.usefixtures("quiet")
ALONE, BESIDE = [10.0, 12.0, 14.0, 16.0], [10.0, 14.0, 18.0, 22.0]  # further tokens take twice


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The contention of each measurement that was made."""
    seen: list[float] = []

    def measure(run: Any, _most: int, **options: Any) -> CostCurve:
        contention = run.__closure__[0].cell_contents.contention
        seen.append(contention)
        return CostCurve([INF, *(ALONE if contention == 1.0 else BESIDE)])

    monkeypatch.setattr(loading, "measure_curve", measure)
    monkeypatch.setattr(loading, "times_behind", lambda *_: 1.0)
    monkeypatch.setattr("edgespec.measure.timing._LOOK_SECONDS", 0.0)
    monkeypatch.setattr(loading, "saw_step", lambda *_: None)
    return seen


def echo(context: Sequence[int]) -> list[float]:
    return [float(token == context[-1]) for token in range(300)]


def backend_of(contention: float) -> FakeBackend:
    backend = FakeBackend(echo, 300, max_nodes=4)
    backend.contention = contention
    return backend


def plan_of(**changes: Any) -> Plan:
    return make_run_plan(SPEC, Request(context_size=256, threads=2, **changes), PLENTY)


def load(contention: float, plan: Plan) -> CostCurve:
    return loading._curve(backend_of(contention), SPEC, plan, lambda *_: None)


def test_a_busy_machine_measures_once_and_a_free_one_anew(measured: list[float]) -> None:
    plan = plan_of()
    first = load(2.0, plan)
    assert first.base == [INF, *ALONE] and first.contention == 2.0
    assert first.step_ms(1, 100) > first.base[1], "what is likely of the model"
    stored = stored_curve(SPEC, plan)
    assert stored is not None and stored == first
    assert load(2.0, plan) == first and load(4.0, plan) == first
    assert measured == [2.0]
    assert load(1.0, plan).contention == 1.0
    assert load(2.0, plan).contention == load(1.0, plan).contention == 1.0
    assert measured == [2.0, 1.0]


def test_missing_sizes_are_measured_beside_as_many_programs(measured: list[float]) -> None:
    """What is known is not what they explain; a machine that got busier leaves them for later."""
    plan = plan_of()
    keep_curve(curve_key(SPEC, plan), CostCurve([INF, 10.0, 12.0, INF, INF]), replaced=True)
    assert load(2.0, plan).base == [INF, 10.0, 12.0, INF, INF]
    assert measured == []
    load(1.0, plan)
    assert measured == [1.0]


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ((1, 2, 3, 4, 8, 32), 0),
        ((1, 2, 3, 4, 8, 29), 0),
        ((1, 2, 3, 4, 8, 28), 1),
        ((1, 2, 3, 4, 32), 1),
        ((1, 2, 3, 4, 8, 16), 1),
        ((1, 4, 16, 32), 0),
    ],
)
def test_sizes_between_others_are_left_to_answers(
    measured: list[float], sizes: Sequence[int], times: int
) -> None:
    plan = plan_of()
    base = [float(10 + size) if size in sizes else INF for size in range(33)]
    keep_curve(curve_key(SPEC, plan), CostCurve(base), replaced=True)
    backend = FakeBackend(echo, 300, max_nodes=32)
    loading._curve(backend, SPEC, plan, lambda *_: None)
    assert len(measured) == times


def test_a_plan_says_what_it_rests_on(measured: list[float]) -> None:
    load(2.0, plan_of())
    plan = plan_of()
    assert "with 50% of its threads, as other programs computed" in plan.speed_source
    load(1.0, plan)
    assert re.fullmatch(r"measured on \d+ [A-Z]\w+ 20\d\d", plan_of().speed_source)


def test_a_draft_models_times_are_kept_too(measured: list[float]) -> None:
    target = backend_of(2.0)

    def curve_of(contention: float, stored: CostCurve | None) -> CostCurve:
        return loading._draft_curve(backend_of(contention), lambda *_: None, stored, target, SPEC)

    first = curve_of(2.0, None)
    assert first.contention == 2.0 and first.base == [INF, *ALONE]
    assert first.step_ms(1, 100) > first.base[1]
    assert curve_of(2.0, first) is first
    assert curve_of(1.0, first).contention == 1.0


def test_kernels_are_not_compared_where_one_was_measured_beside_others() -> None:
    plan = plan_of()
    for kernels, contention in ((True, 2.0), (False, 1.0)):
        settings = replace(plan, kernels=kernels)
        one = CostCurve([INF, *ALONE], contention=contention)
        cache.store("curves", settings_key(SPEC, settings), one.as_json())
    fast = replace(plan, kernels=True, tokens_per_s=9.0)
    found = planning.best_kernels(SPEC, Request(context_size=256), lambda _one: fast)
    assert "predicted" not in str(found.as_json()["kernels"]["reason"])


@pytest.mark.parametrize("contention", [0.5, 1e9, "2", None])
def test_a_damaged_contention_is_no_curve(contention: Any) -> None:
    document = {**CostCurve([INF, 4.0]).as_json(), "contention": contention}
    with pytest.raises((TypeError, ValueError)):
        CostCurve.from_json(document)


def test_a_run_without_drafts_is_measured_for_plans(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and no more where steps of drafts were measured."""
    backend = backend_of(2.0)  # until it is looked at once more
    monkeypatch.setattr(loading, "contention_now", lambda one: setattr(one, "contention", 1.0))
    monkeypatch.setitem(loading._BACKENDS, LLAMACPP, lambda *_: backend)
    before = plan_of()
    assert before.speed_source.startswith("estimated") and before.plain_tokens_per_s > 120.0
    told: list[tuple[str, float]] = []
    for _ in range(2):
        loading._load_one(SPEC, plan_of(drafter="none"), lambda *one: told.append(one))
    assert measured == [1.0] and told == [("measuring step times", part) for part in (0.0, 1.0)]
    after = plan_of()
    assert after.plain_tokens_per_s == pytest.approx(100.0)
    assert after.speed_source.startswith("measured on")
    assert after.speed_source.endswith(", drafts estimated")
    keep_curve(curve_key(SPEC, after), CostCurve([INF, *ALONE]), replaced=True)
    cache.remove("curves", plain_key(SPEC, after))
    loading._load_one(SPEC, plan_of(drafter="none"), lambda *_: None)
    assert measured == [1.0]
