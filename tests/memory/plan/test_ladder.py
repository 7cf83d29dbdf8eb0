"""What grows first as memory grows: context or drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laid_out import machine_with, sizes_by_hand
from planning_cases import (
    SPEC,
    TABLES,
    peak,
    plan_of,
    reason,
)

from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.simulation import Allocation, ContextRequest
from edgespec.memory.plan.layout import largest_fitting


@pytest.mark.parametrize("wish", [{}, {"draft_max": 200}])
def test_the_largest_step_fits_into_the_context(wish: dict[str, Any]) -> None:
    plan = plan_of(context_size=16, **wish)
    assert plan.draft_max == plan.wanted_drafts == 15
    assert plan_of(context_size=1, **wish).draft_max == 0


def test_a_context_nobody_asked_for_shrinks_until_it_fits() -> None:
    """2,560 tokens fit without drafts; one byte less, and 2,304 do."""
    least = peak(context_size=2560)
    plan = plan_of(budget_bytes=least, drafter="none")
    assert (plan.context_size, plan.batch_size) == (2560, 32)
    assert plan.as_json()["context_size"] == {"value": 2560, "reason": "the largest that fits"}
    assert plan.predicted_peak_bytes == plan.limit_bytes == least
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


@pytest.mark.parametrize(("context", "most"), [(None, 12), (900, 14)])
def test_few_sizes_are_simulated(context: int | None, most: int) -> None:
    """Each is 20 ms of llama.cpp's: a plan asked of 21, and 30 under a budget."""
    asked = set[RunConfig]()

    def sizes(wanted: Sequence[ContextRequest]) -> Sequence[Allocation]:
        asked.update(replace(one.config, mapped=False) for one in wanted)
        return sizes_by_hand(wanted)

    budget = None if context is None else peak(context_size=20_480) + 4 * TABLES
    plan_of(SPEC, replace(machine_with(64 << 30), sizes=sizes), budget_bytes=budget)
    assert len(asked) <= most


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=60, unique=True).map(sorted),
    st.lists(st.integers(0, 10**6), min_size=60, max_size=60).map(sorted),
    st.integers(-(10**6), 10**6),
)
def test_the_largest_that_fits_is_found(sizes: list[int], nbytes: list[int], room: int) -> None:
    excess = {size: taken - room for size, taken in zip(sizes, nbytes, strict=False)}
    fitting = [size for size in sizes if excess[size] <= 0]
    assert largest_fitting(sizes, excess.__getitem__) == max(fitting, default=None)


def test_a_line_takes_four_questions() -> None:
    asked = []

    def excess_bytes(size: int) -> int:
        asked.append(size)
        return 3 * size - 50_000

    assert largest_fitting(range(256, 131_072, 256), excess_bytes) == 16_640
    assert len(asked) <= 4
