"""Budgets: what gives way to what, and what a refusal names."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planning_cases import MIB, SPEC, TABLES, model, outcome, plan_of, reason, refusal

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import (
    RunShape,
    footprint,
    runtime_bytes,
)
from edgespec.memory.plan.plan import Device


def peak(**request: Any) -> int:
    """Bytes of a plan with the smallest batch and no drafts."""
    shape = RunShape(request.pop("context_size"), 32, 1, threads=2, **request)
    return sum(part.nbytes for part in footprint(SPEC, shape))


def test_a_context_nobody_asked_for_shrinks_until_it_fits() -> None:
    """2,560 tokens fit without drafts; one byte less, and 2,304 do."""
    least = peak(context_size=2560)
    plan = plan_of(budget_bytes=least, drafter="none")
    assert (plan.context_size, plan.batch_size) == (2560, 32)
    assert plan.as_json()["context_size"] == {"value": 2560, "reason": "the largest that fits"}
    assert plan.predicted_peak_bytes == least
    assert plan_of(budget_bytes=least - 1, drafter="none").context_size == 2304
    assert plan_of(SPEC, Device(least), drafter="none").context_size == 2560


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


def test_only_the_preference_for_context_takes_a_smaller_cache_and_says_what_it_costs() -> None:
    budget = peak(context_size=4096)
    long = plan_of(budget_bytes=budget, prefer="context")
    assert (long.kv_type_k, long.kv_type_v) == ("q8_0", "q8_0")
    assert long.context_size == 7424  # 34 bytes for 32 values instead of 64
    assert "cost in quality" in reason(long, "kv_type")
    for prefer in ("speed", "quality"):
        assert plan_of(budget_bytes=budget, prefer=prefer).kv_type_k == "f16"
    ample = plan_of(prefer="context")
    assert (ample.kv_type_k, ample.context_size) == ("f16", SPEC.context_length)


@pytest.mark.parametrize(
    ("losses", "kind"),
    [
        ({}, "q8_0"),
        ({"q8_0": 0.001}, "q8_0"),
        ({"q8_0": 0.001, "q4_0": 0.5}, "q8_0"),
        ({"q8_0": 0.001, "q4_0": 0.008}, "q4_0"),
        ({"q8_0": 0.02, "q4_0": 0.5}, "f16"),
    ],
)
def test_measured_losses_decide_which_cache_is_taken(losses: dict[str, float], kind: str) -> None:
    """The budget is one that q8_0 does not make large enough either."""
    plan = plan_of(budget_bytes=peak(context_size=4096), prefer="context", kv_losses=losses)
    assert plan.kv_type_k == plan.kv_type_v == kind
    if kind in losses:
        assert f"divergence of {losses[kind]:.4f}" in reason(plan, "kv_type")


def test_a_context_that_was_asked_for_is_refused_with_the_largest_that_fits() -> None:
    available = peak(context_size=2560) + 5
    error = refusal(SPEC, Device(available), context_size=8192)
    needed = peak(context_size=8192)
    assert f"needs {-(-needed // MIB)} MiB for 8192 tokens" in str(error)
    assert f"free: {available // MIB} MiB" in str(error)
    assert "`--ctx 2560` fits" in error.hint
    assert f"budget: {available // MIB} MiB" in str(
        refusal(context_size=8192, budget_bytes=available)
    )


def test_the_largest_components_are_named() -> None:
    """16 MiB of cache and 2.03 of weights, each rounded up; the runtime is larger than both."""
    error = refusal(SPEC, Device(64 * MIB), context_size=8192)
    runtime = -(-runtime_bytes(SPEC) // MIB)
    assert f"(runtime {runtime}, kv cache 16, weights 3, compute 1 MiB)" in str(error)


def test_a_refusal_never_says_that_as_much_is_free_as_is_needed() -> None:
    """One byte is missing: the needed MiB are rounded up, or the sentence makes no sense."""
    error = refusal(SPEC, Device(peak(context_size=4096) - 1), context_size=4096)
    needed, free = re.findall(r"needs (\d+) MiB.*free: (\d+) MiB", str(error))[0]
    assert int(needed) > int(free)


def test_a_prompt_that_leaves_no_room_is_refused_instead_of_cut() -> None:
    error = refusal(SPEC, Device(peak(context_size=2560)), prompt_tokens=3000, max_tokens=100)
    assert "for 3328 tokens" in str(error)


def test_a_model_that_cannot_fit_at_all_says_so() -> None:
    assert refusal(SPEC, Device(20 * MIB)).hint == "use a smaller model file"


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    hint = refusal(budget_bytes=20 * MIB).hint
    smallest = int(re.findall(r"`--budget (\d+)MiB`", hint)[0])
    assert smallest == -(-peak(context_size=512) // MIB)
    # Rounded up to a whole MiB there may be room for 256 tokens more.
    assert plan_of(budget_bytes=smallest * MIB).context_size in (512, 768)
    assert isinstance(outcome(budget_bytes=(smallest - 1) * MIB), DoesNotFitError)


def test_a_draft_that_does_not_fit_is_named() -> None:
    """There is 1 MiB left for drafts, less than the drafter's tables take."""
    budget = peak(context_size=512) + MIB
    error = refusal(budget_bytes=budget, context_size=512, draft_max=31)
    assert "a smaller --draft-max" in error.hint
    assert plan_of(budget_bytes=budget, context_size=512, draft_max=0).draft_max == 0


@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q4_0"])
def test_a_cache_type_that_was_chosen_is_not_argued_about(kv_type: str) -> None:
    assert (
        "--kv-type" not in refusal(SPEC, Device(70 * MIB), context_size=32768, kv_type=kv_type).hint
    )


def test_a_cache_type_that_the_heads_do_not_allow_is_not_offered() -> None:
    error = refusal(model(head=80), Device(80 * MIB), context_size=32768)
    assert "--ctx" in error.hint and "q8_0" not in error.hint
