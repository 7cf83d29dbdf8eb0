"""What the error of a plan that does not fit names: the shortage, and every way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from laid_out import machine_with
from planning_cases import MIB, SPEC, does_not_fit, model, outcome, peak, plan_of

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import runtime_bytes


def test_a_context_that_was_asked_for_is_refused_with_the_largest_that_fits() -> None:
    available = peak(context_size=2560) + 5
    error = does_not_fit(SPEC, machine_with(available), context_size=8192)
    needed = peak(context_size=8192)
    assert f"needs {-(-needed // MIB)} MiB for 8192 tokens" in str(error)
    assert f"free: {available // MIB} MiB" in str(error)
    assert "`--ctx 2560` fits" in error.hint
    assert f"budget: {available // MIB} MiB" in str(
        does_not_fit(context_size=8192, budget_bytes=available)
    )


def test_the_largest_components_are_named() -> None:
    """16 MiB of cache, 5 of text and 2.03 of weights, rounded up; the runtime is larger."""
    error = does_not_fit(SPEC, machine_with(64 * MIB), context_size=8192)
    runtime = -(-runtime_bytes(SPEC) // MIB)
    assert f"(runtime {runtime}, kv cache 16, text 5, weights 3 MiB)" in str(error)


def test_no_error_ever_says_that_as_much_is_free_as_is_needed() -> None:
    """One byte is missing: the needed MiB are rounded up, or the sentence makes no sense."""
    error = does_not_fit(SPEC, machine_with(peak(context_size=4096) - 1), context_size=4096)
    needed, free = re.findall(r"needs (\d+) MiB.*free: (\d+) MiB", str(error))[0]
    assert int(needed) > int(free)


def test_a_prompt_that_leaves_no_room_is_refused_instead_of_cut() -> None:
    error = does_not_fit(
        SPEC, machine_with(peak(context_size=2560)), prompt_tokens=3000, max_tokens=100
    )
    assert "for 3328 tokens" in str(error)


def test_a_model_that_cannot_fit_at_all_says_so() -> None:
    assert does_not_fit(SPEC, machine_with(20 * MIB)).hint == "use a smaller model file"


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    hint = does_not_fit(budget_bytes=20 * MIB).hint
    smallest = int(re.findall(r"`--budget (\d+)MiB`", hint)[0])
    assert smallest == -(-peak(context_size=512) // MIB)
    # Rounded up to a whole MiB there may be room for 256 tokens more.
    assert plan_of(budget_bytes=smallest * MIB).context_size in (512, 768)
    assert isinstance(outcome(budget_bytes=(smallest - 1) * MIB), DoesNotFitError)


def test_a_draft_that_does_not_fit_is_named() -> None:
    """There is 1 MiB left for drafts, less than the drafter's tables take."""
    budget = peak(context_size=512) + MIB
    error = does_not_fit(budget_bytes=budget, context_size=512, draft_max=31)
    assert "a smaller --draft-max" in error.hint
    assert plan_of(budget_bytes=budget, context_size=512, draft_max=0).draft_max == 0
    assert "--draft-max" not in does_not_fit(budget_bytes=20 * MIB, draft_max=31).hint


@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q4_0"])
def test_a_cache_type_that_was_chosen_is_not_argued_about(kv_type: str) -> None:
    error = does_not_fit(SPEC, machine_with(70 * MIB), context_size=32768, kv_type=kv_type)
    assert "--kv-type" not in error.hint


def test_a_smaller_cache_is_offered_where_that_may_differ() -> None:
    """4,096 tokens fit with it; `--exact` would not be exact."""
    asked: dict[str, Any] = {"context_size": 4096, "budget_bytes": peak(context_size=2816)}
    assert "`--kv-type q8_0 --ctx 4096` fits" in does_not_fit(**asked).hint
    assert plan_of(**asked, kv_type="q8_0").context_size == 4096
    assert "--kv-type" not in does_not_fit(**asked, exact=True).hint


def test_a_cache_type_that_the_heads_do_not_allow_is_not_offered() -> None:
    error = does_not_fit(model(head=80), machine_with(80 * MIB), context_size=32768)
    assert "--ctx" in error.hint and "q8_0" not in error.hint


def test_other_programs_are_named_only_where_free_memory_is_short() -> None:
    """A budget is short whatever others have reserved."""
    reserved = machine_with(1 << 30, reserved_bytes=111 * MIB)
    assert "other programs" not in does_not_fit(SPEC, reserved, budget_bytes=20 * MIB).hint
    full = machine_with(20 * MIB, reserved_bytes=111 * MIB)
    assert "other programs of edgespec have reserved 111 MiB" in does_not_fit(SPEC, full).hint
