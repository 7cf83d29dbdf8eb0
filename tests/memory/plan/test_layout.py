"""What a layout takes, and of which memory."""

from __future__ import annotations

from dataclasses import replace

from planning_cases import (
    MIB,
    RECURRENT,
    SPEC,
    gpu,
    outcome,
    plan_of,
)

from edgespec.errors import DoesNotFitError
from edgespec.memory.plan.machine import Machine


def test_recurrent_state_is_planned() -> None:
    assert plan_of(RECURRENT).component_bytes["recurrent_state"] == 20_000


def test_a_budget_covers_the_gpu_too() -> None:
    machine = Machine(64 << 30, gpu(8 << 30))
    whole = plan_of(SPEC, machine)
    needed = whole.predicted_peak_bytes + whole.predicted_gpu_bytes
    for part in (0.8, 0.85, 0.9, 1.0):
        budget = int(needed * part)
        plan = plan_of(SPEC, machine, budget_bytes=budget)
        assert plan.predicted_peak_bytes + plan.predicted_gpu_bytes <= budget
        assert plan.context_size < 4096 or part >= 0.9


def test_shared_memory_is_one_pool() -> None:
    """What the GPU takes counts against the same limit, and the file stays mapped."""
    machine = Machine(100 * MIB, gpu(64 << 30, shares=True))
    plan = plan_of(SPEC, machine)
    assert (plan.gpu_layers, plan.mapped, plan.predicted_gpu_bytes) == (-1, True, 0)
    assert plan.predicted_peak_bytes == sum(plan.component_bytes.values())
    assert {"gpu_weights", "gpu_kv_cache", "gpu_compute"} <= set(plan.component_bytes)
    tight = plan_of(SPEC, replace(machine, free_bytes=plan.predicted_peak_bytes - 1))
    assert tight.predicted_peak_bytes < plan.predicted_peak_bytes
    assert isinstance(outcome(SPEC, replace(machine, free_bytes=60 * MIB)), DoesNotFitError)
