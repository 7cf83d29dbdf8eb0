"""What grows first as memory grows: context or drafts."""

from __future__ import annotations

from typing import Any

import pytest
from laid_out import machine_with
from planning_cases import (
    SPEC,
    TABLES,
    peak,
    plan_of,
    reason,
)


@pytest.mark.parametrize("wish", [{}, {"draft_max": 200}])
def test_the_largest_step_fits_into_the_context(wish: dict[str, Any]) -> None:
    assert plan_of(context_size=16, **wish).draft_max == 15
    assert plan_of(context_size=1, **wish).draft_max == 0


def test_a_context_nobody_asked_for_shrinks_until_it_fits() -> None:
    """2,560 tokens fit without drafts; one byte less, and 2,304 do."""
    least = peak(context_size=2560)
    plan = plan_of(budget_bytes=least, drafter="none")
    assert (plan.context_size, plan.batch_size) == (2560, 32)
    assert plan.as_json()["context_size"] == {"value": 2560, "reason": "the largest that fits"}
    assert plan.predicted_peak_bytes == least
    assert plan_of(budget_bytes=least - 1, drafter="none").context_size == 2304
    assert plan_of(SPEC, machine_with(least), drafter="none").context_size == 2560


def test_drafts_come_before_context_unless_context_is_preferred() -> None:
    """There is room for 4,096 tokens or for a draft and fewer of them."""
    budget = peak(context_size=4096)
    fast = plan_of(budget_bytes=budget)
    assert fast.draft_max > 0 and fast.context_size < 4096
    long = plan_of(budget_bytes=budget, prefer="context", kv_type="f16")
    assert (long.draft_max, long.context_size) == (0, 4096)
    assert "no room for drafts" in reason(long, "draft_max")
    longer = plan_of(budget_bytes=peak(context_size=20_480) + 4 * TABLES, prefer="context")
    assert longer.context_size > 20_480, "beyond what is usually wanted"


def test_context_leaves_room_for_drafts_that_were_asked_for() -> None:
    budget = peak(context_size=4096)
    plan = plan_of(budget_bytes=budget, prefer="context", kv_type="f16", draft_max=15)
    assert plan.draft_max == 15 and 2048 < plan.context_size < 4096
    assert plan.predicted_peak_bytes <= budget
