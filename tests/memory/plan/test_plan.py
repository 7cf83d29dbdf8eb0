"""What a plan says of itself: where bytes lie, whether more memory would help, its small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planning_cases import plan_of

from edgespec.memory.bytes.footprint import Component
from edgespec.memory.plan.plan import Choice, most_leaves


def test_bytes_are_counted_where_they_lie() -> None:
    parts = (
        Component("weights", 100),
        Component("weights", 40, device="gpu"),
        Component("kv_cache", 7, device="gpu1"),
        Component("weights", 3, device="worker"),
    )
    plan = replace(plan_of(), components=parts)
    assert (plan.predicted_peak_bytes, plan.predicted_gpu_bytes) == (100, 47)
    assert plan.predicted_bytes_of("worker") == 3
    assert plan.component_bytes == {
        "weights": 100,
        "gpu_weights": 40,
        "gpu1_kv_cache": 7,
        "worker_weights": 3,
    }


def test_the_small_model_of_a_pair_is_loaded_as_the_large_one() -> None:
    """But for what only the large one has: a draft model and a head."""
    pair = replace(
        plan_of(),
        switch=Path("small.gguf"),
        draft_model=Path("draft.gguf"),
        drafter="recycling,model",
        mapped=False,
        switch_mapped=True,
        snapshots=4,
        switch_snapshots=2,
    )
    small = pair.of_small()
    assert (small.switch, small.draft_model, small.drafter) == (None, None, "recycling")
    assert (small.mapped, small.snapshots, small.switch_snapshots) == (True, 2, 0)
    assert (small.context_size, small.threads) == (pair.context_size, pair.threads)
    assert replace(pair, drafter="head").of_small().drafter == "suffix"


def test_more_memory_would_bring_a_longer_context_or_larger_drafts() -> None:
    plan = plan_of()
    context, drafts = plan.context_size, plan.draft_max
    reached = replace(plan, wanted_context=context, wanted_drafts=drafts)
    assert not reached.is_limited
    assert replace(reached, wanted_drafts=drafts + 1).is_limited
    assert replace(reached, wanted_context=context + 1).is_limited


def test_reasons_are_given_in_order_and_replaced_by_name() -> None:
    plan = plan_of().with_choice(Choice("backend", "llamacpp", "asked for"))
    assert next(iter(plan.as_json())) == "backend"
    other = plan.with_reason("backend", "the only one")
    assert other.as_json()["backend"] == {"value": "llamacpp", "reason": "the only one"}
    assert [c.name for c in other.choices] == [c.name for c in plan.choices]


def test_suffix_drafts_alone_are_chains() -> None:
    assert (most_leaves("suffix", 7), most_leaves("suffix,recycling", 7)) == (1, 7)
    assert most_leaves("none", 0) == 1
