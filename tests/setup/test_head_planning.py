"""Whether the head in a model's file is loaded: tried first, then judged by what it saved here."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from time import time
from typing import Any

import pytest
from hybrid_gguf import Shape, write_hollow
from planning_cases import reason

from edgespec.drafting.drafters.model_savings import SAVINGS
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.memory.store import cache
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import learned_key

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_hollow(tmp_path / "model.gguf", Shape("qwen35", predicting=1)))


def plan_of(spec: ModelSpec, **changes: Any) -> Plan:
    return make_run_plan(spec, Request(context_size=512, kernels="off", **changes))


def saw(spec: ModelSpec, rounds: float, saved: float) -> None:
    """An earlier run had so many rounds, and saved that part of their time."""
    plain = plan_of(spec, drafter="suffix")
    values = dict(zip(SAVINGS, (rounds, 1000.0 * rounds, 1000.0 * rounds * saved), strict=True))
    cache.store("learned", learned_key(spec, plain, None), {**values, "time": time()})


@pytest.mark.parametrize(
    ("rounds", "saved", "used"),
    [(0.0, 0.0, True), (100.0, 0.0, True), (400.0, 0.0, False), (400.0, 0.2, True)],
)
def test_a_head_is_used_until_it_was_seen_not_to_pay(
    spec: ModelSpec, rounds: float, saved: float, used: bool
) -> None:
    saw(spec, rounds, saved)
    plan = plan_of(spec)
    assert (plan.drafter == "suffix,head") == used
    assert ("head_kv_cache" in plan.component_bytes) == used
    why = reason(plan, "head")
    assert ("saved" in why) == (rounds > 300)
    assert used or "--drafter suffix,head uses it" in why
    assert plan_of(spec, drafter="suffix,head").drafter == "suffix,head", "as asked"


def test_a_head_is_not_used_where_others_are_named(spec: ModelSpec) -> None:
    assert plan_of(spec, drafter="suffix").drafter == "suffix"
    assert plan_of(spec, drafter="none").drafter == "none"
    with pytest.raises(UnsupportedError, match="cannot draft together"):
        plan_of(spec, drafter="head,model")


def fits(spec: ModelSpec, budget: int) -> bool:
    try:
        plan_of(spec, drafter="suffix", draft_max=7, budget_bytes=budget)
    except DoesNotFitError:
        return False
    return True


def test_a_head_gives_way_to_context(spec: ModelSpec) -> None:
    """Where both do not fit, the head is left out, and that is said."""
    most = plan_of(spec, drafter="suffix", draft_max=7).predicted_peak_bytes
    budgets = range(most // 2, most, 1 << 14)
    least = bisect_left(budgets, True, key=lambda budget: fits(spec, budget))
    plan = plan_of(spec, draft_max=7, budget_bytes=budgets[least])
    assert plan.drafter == "suffix" and plan.draft_max == 7
    (choice,) = (one for one in plan.choices if one.name == "head")
    assert choice.value == "not used" and "needs" in choice.reason
