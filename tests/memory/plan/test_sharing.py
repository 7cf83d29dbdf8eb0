"""Plans for several users: their cells, their bytes, and what cannot be shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from laid_out import machine_with
from planning_cases import CELL, MIB, PLENTY, SPEC, TABLES, model, plan_of, reason

from edgespec.errors import UnsupportedError
from edgespec.memory.plan.plan import Plan


def bytes_of(plan: Plan, name: str) -> int:
    return plan.component_bytes[name]


@pytest.mark.parametrize("users", range(1, 9))
def test_each_user_has_a_context_where_memory_allows(users: int) -> None:
    """Drafters share their tables; steps have a root for each user besides the longest draft."""
    plan = plan_of(users=users, context_size=1024)
    assert (plan.users, plan.context_size, plan.cells) == (users, 1024, users * 1024)
    assert bytes_of(plan, "kv_cache") == users * 1024 * CELL
    assert bytes_of(plan, "drafter_tables") == TABLES
    assert bytes_of(plan, "logits") == (plan.draft_max + users) * SPEC.vocab_size * 4
    assert plan.max_nodes == plan.draft_max + users <= plan.batch_size


def test_one_user_is_the_plan_there_was() -> None:
    alone, among = plan_of(), plan_of(users=1)
    assert alone == among
    assert "users" not in alone.as_json() and "cells" not in alone.as_json()


@pytest.mark.parametrize("more_mib", range(0, 30, 3))
def test_cells_are_what_a_budget_leaves(more_mib: int) -> None:
    """From one context for all users up; never more than the budget, and more never buys less."""
    least = plan_of(users=1, context_size=2048).predicted_peak_bytes + MIB
    smaller, plan = (
        plan_of(users=8, context_size=2048, budget_bytes=least + size * MIB)
        for size in (more_mib, more_mib + 1)
    )
    assert plan.predicted_peak_bytes <= least + (more_mib + 1) * MIB
    assert 2048 <= smaller.cells <= plan.cells <= 8 * 2048
    assert str(plan.cells // 8) in reason(plan, "cells")


def test_exact_plans_give_each_user_cells_of_its_own() -> None:
    plan = plan_of(users=3, exact=True, context_size=1000)
    assert plan.cells == 3 * 1024
    tight = plan_of(users=3, exact=True, budget_bytes=plan.predicted_peak_bytes)
    assert tight.cells % tight.users == 0 and tight.cells // 3 >= tight.context_size


def test_auto_is_four_where_a_cache_can_be_shared() -> None:
    assert plan_of(users=None).users == 4
    assert "--users changes it" in reason(plan_of(users=None), "users")


ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "onnx": ({"backend": "onnx"}, "ONNX Runtime's cache holds one text"),
    "head": ({"drafter": "suffix,head"}, "a head follows one text"),
}


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE)
def test_what_follows_one_text_has_one_user(case: tuple[dict[str, Any], str]) -> None:
    changes, why = case
    plan = plan_of(users=None, **changes)
    assert (plan.users, reason(plan, "users")) == (1, why)
    with pytest.raises(UnsupportedError, match=f"--users 2 is not possible: {why}"):
        plan_of(users=2, **changes)


def test_windows_of_all_users_are_planned() -> None:
    spec = replace(model(), is_sliding=(True, False, True, False), sliding_window=512)
    plans = [plan_of(spec=spec, users=users, context_size=4096) for users in (1, 4)]
    assert bytes_of(plans[1], "kv_cache") > 2 * bytes_of(plans[0], "kv_cache")


def test_the_plan_says_what_it_gives_when_little_is_free() -> None:
    free = plan_of(users=1, context_size=4096).predicted_peak_bytes + 8 * TABLES
    plan = plan_of(users=8, machine=machine_with(free), context_size=4096)
    assert plan.cells < 8 * 4096
    assert "what memory leaves" in reason(plan, "cells")
    assert plan_of(users=8, machine=PLENTY, context_size=4096).cells == 8 * 4096
