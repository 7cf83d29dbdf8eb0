"""Plans by hand: each choice, and what it is made by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from laid_out import sizes_by_hand
from planning_cases import (
    CELL,
    PLENTY,
    SPEC,
    TABLES,
    parts_by_hand,
    plan_of,
    reason,
    unmeasured,
)

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.simulation import Allocation, ContextRequest
from edgespec.memory.device import host
from edgespec.memory.plan.plan import Request
from edgespec.setup.planning import make_run_plan


def test_a_plan_without_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 6)
    plan = plan_of(threads=None)
    assert (plan.context_size, plan.threads, plan.drafter) == (4096, 6, "suffix")
    assert (plan.kv_type_k, plan.kv_type_v, plan.gpu_layers) == ("f16", "f16", 0)
    assert (plan.exact, plan.mapped) == (False, True)
    assert plan.component_bytes["kv_cache"] == 4096 * CELL
    assert plan.component_bytes["drafter_tables"] == TABLES
    assert plan.predicted_peak_bytes == sum(part.nbytes for part in plan.components)
    assert (plan.available_bytes, plan.limit_bytes, plan.predicted_gpu_bytes) == (64 << 30,) * 2 + (
        0,
    )


def test_a_plan_is_the_footprint_of_its_own_settings() -> None:
    plan = plan_of(context_size=1000, kv_type="q8_0")
    sizes = 1000, plan.batch_size, plan.draft_max + 1
    options: dict[str, Any] = {"mapped": plan.mapped, "kv_type_k": "q8_0", "kv_type_v": "q8_0"}
    assert plan.components == parts_by_hand(*sizes, TABLES, **options)


def test_llama_cpp_is_asked_once_where_memory_is_no_limit() -> None:
    """Eleven contexts were simulated for a plan: 0.2 s for a model of 28 layers."""
    asked: set[RunConfig] = set()

    def sizes(wanted: Sequence[ContextRequest]) -> Sequence[Allocation]:
        asked.update(replace(one.config, mapped=False) for one in wanted)
        return sizes_by_hand(wanted)

    machine = replace(PLENTY, sizes=sizes)
    plan = plan_of(machine=machine, speed_of=unmeasured)
    assert len(asked) == 1
    assert [one.name for one in plan.alternatives] == ["smaller", "longer context"]


def test_what_is_asked_for_is_what_is_planned() -> None:
    plan = plan_of(context_size=2000, threads=3, kv_type="q8_0", draft_max=5, drafter="none")
    assert (plan.context_size, plan.threads) == (2000, 3)
    assert (plan.kv_type_k, plan.kv_type_v, plan.drafter) == ("q8_0", "q8_0", "none")
    assert "drafter_tables" not in plan.component_bytes
    values = {name: choice["value"] for name, choice in plan.as_json().items()}
    assert values == {
        "context_size": 2000,
        "threads": 3,
        "kv_type": "q8_0",
        "gpu_layers": 0,
        "device": "cpu",
        "drafter": "none",
        "draft_max": 0,
        "batch_size": plan.batch_size,
        "mapped": "yes",
        "kernels": "off",
    }
    assert plan_of(draft_max=5).draft_max == 5


def test_every_choice_has_a_reason() -> None:
    plan = plan_of()
    assert set(plan.as_json()) == {
        "context_size", "threads", "kv_type", "gpu_layers", "drafter", "draft_max", "batch_size",
        "mapped", "device", "kernels",
    }  # fmt: skip
    assert all(choice.reason for choice in plan.choices)
    assert reason(plan, "threads") == "as asked" != reason(plan, "context_size")
    assert reason(plan_of(context_size=999), "context_size") == "as asked"
    assert reason(plan_of(draft_max=9), "draft_max") == "as asked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_type": "q9"}, "'q9'"),
        ({"threads": 0}, "--threads 0"),
        ({"threads": -4}, "--threads -4"),
        ({"draft_max": -1}, "--draft-max -1"),
        ({"draft_max": 256}, "--draft-max 256"),
        ({"context_size": 0}, "--ctx 0"),
        ({"context_size": -5}, "--ctx -5"),
        ({"context_size": 32769}, "--ctx 32769 exceeds the 32768 tokens"),
        ({"budget_bytes": 0}, "--budget 0"),
        ({"budget_bytes": -1}, "--budget -1"),
        ({"prefer": "beauty"}, "'beauty'"),
        ({"drafter": "lookahead"}, "'lookahead'"),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused_with_its_value_and_a_hint(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)) as caught:
        make_run_plan(SPEC, Request(**options), PLENTY)
    assert caught.value.hint
