"""What a layout takes, and of which memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laid_out import STATE_BYTES, machine_with
from planning_cases import (
    MIB,
    RECURRENT,
    SPEC,
    gpu,
    model,
    outcome,
    plan_of,
    reason,
)

from edgespec.errors import DoesNotFitError
from edgespec.memory.device.kernels import missing_kernels


def test_recurrent_state_is_planned() -> None:
    assert plan_of(RECURRENT).component_bytes["kv_cache"] == STATE_BYTES


def test_a_budget_covers_the_gpu_too() -> None:
    machine = machine_with(64 << 30, gpu(8 << 30))
    whole = plan_of(SPEC, machine)
    needed = whole.predicted_peak_bytes + whole.predicted_gpu_bytes
    for part in (0.8, 0.85, 0.9, 1.0):
        budget = int(needed * part)
        plan = plan_of(SPEC, machine, budget_bytes=budget)
        assert plan.predicted_peak_bytes + plan.predicted_gpu_bytes <= budget
        assert plan.context_size < 4096 or part >= 0.9


def test_shared_memory_is_one_pool() -> None:
    """What the GPU takes counts against the same limit."""
    machine = machine_with(100 * MIB, gpu(64 << 30, shares=True))
    plan = plan_of(SPEC, machine)
    assert (plan.gpu_layers, plan.mapped, plan.predicted_gpu_bytes) == (-1, False, 0)
    assert plan.predicted_peak_bytes == sum(plan.component_bytes.values())
    assert {"gpu_weights", "gpu_kv_cache", "gpu_compute"} <= set(plan.component_bytes)
    tight = plan_of(SPEC, replace(machine, free_bytes=plan.predicted_peak_bytes - 1))
    assert tight.predicted_peak_bytes < plan.predicted_peak_bytes
    assert isinstance(outcome(SPEC, replace(machine, free_bytes=60 * MIB)), DoesNotFitError)


def test_a_file_stays_mapped_where_a_gpu_computes_with_its_pages() -> None:
    """Else the pages would lie beside the GPU's copies, in the same memory."""
    (one,) = gpu(64 << 30, shares=True)
    assert plan_of(SPEC, machine_with(100 * MIB, (replace(one, maps_files=True),))).mapped
    assert not plan_of(SPEC, machine_with(100 * MIB, (one,))).mapped
    assert plan_of(SPEC, machine_with(100 * MIB, (one,)), gpu_layers=0).mapped


def test_of_shared_memory_a_gpu_takes_what_its_driver_lets_it_have() -> None:
    """Drivers keep a part of the memory for the processor alone."""
    machine = machine_with(100 * MIB, gpu(2 * MIB, shares=True))
    plan = plan_of(SPEC, machine)
    taken = sum(size for name, size in plan.component_bytes.items() if name.startswith("gpu_"))
    assert 0 < plan.gpu_layers <= SPEC.num_layers and 0 < taken <= 2 * MIB
    refused = outcome(SPEC, machine, gpu_layers=SPEC.num_layers + 1)
    assert isinstance(refused, DoesNotFitError)
    assert "free on the GPU: 2 MiB" in str(refused)
    assert "gpu weights" in str(refused)


def test_branches_of_trees_are_sequences_that_batches_are_reserved_for() -> None:
    """With 14, and the text's own, a batch of 128 is rounded up to 135 tokens; chains need none."""
    chains, trees = (
        plan_of(context_size=1024, draft_max=14, drafter=names)
        for names in ("suffix", "suffix,recycling")
    )
    assert (chains.max_leaves, trees.max_leaves) == (1, 14)
    assert chains.batch_size == trees.batch_size == 128
    sizes = [plan.component_bytes["compute"] for plan in (chains, trees)]
    assert 1.04 < sizes[1] / sizes[0] < 1.08
    windowed = replace(SPEC, sliding_window=64)  # as llama.cpp has it of a small Exaone 4
    plan = plan_of(windowed, context_size=1024, draft_max=14, drafter="suffix,recycling")
    assert plan.component_bytes["compute"] == sizes[0], "it verifies chains alone"


def test_kernels_compute_the_layers_that_stay_here() -> None:
    """As with workers: what is on a GPU has the GPU's."""
    spec, machine = model(kind="Q4_0"), machine_with(64 << 30, gpu(8 << 30), missing_kernels="")
    if missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {missing_kernels()}")
    assert plan_of(spec, machine, gpu_layers=2).kernels
    everything = plan_of(spec, machine)
    assert not everything.kernels
    assert "all layers are on other devices" in reason(everything, "kernels")


def test_what_keeps_answers_to_a_form_is_planned_where_one_may_be_asked_for() -> None:
    spec = replace(SPEC, vocab_size=50_000)
    found = plan_of(spec, keeps_to_form=True).component_bytes["schemas"]
    assert found == 410 * 50_000 + 13 * MIB
    several = plan_of(spec, keeps_to_form=True, users=3).component_bytes["schemas"]
    assert several == found + 26 * MIB
    assert "schemas" not in plan_of(spec).component_bytes
