"""Plans of any model on any device: a plan fits, or what the error names does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from laid_out import machine_with
from planning_cases import INF, MIB, gpu, model, outcome, plan_of, quick, thorough

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import kv_type_fits
from edgespec.memory.device.accelerators import Accelerator
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.plan import Plan
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.models.spec import ModelSpec


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Models of many shapes: sliding, recurrent and headless layers, any processor's types."""
    layers = draw(st.integers(1, 5))
    kv_heads = draw(st.sampled_from((1, 2, 8)))
    spec = model(
        layers=layers,
        width=draw(st.sampled_from((256, 512, 2048))),
        heads=(kv_heads * draw(st.integers(1, 4)), kv_heads),
        head=draw(st.sampled_from((64, 80, 128, 256))),
        feed_forward=draw(st.sampled_from((256, 1024, 8192))),
        vocabulary=draw(st.sampled_from((256, 32_000, 151_936))),
        kind=draw(st.sampled_from(("Q4_0", "Q4_K", "Q8_0", "Q6_K", "F16"))),
        context_length=draw(st.sampled_from((100, 512, 1000, 4096, 32_768))),
    )
    if draw(st.booleans()):
        pattern = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
        spec = replace(spec, sliding_window=draw(st.integers(1, 5000)), is_sliding=tuple(pattern))
    if draw(st.booleans()):
        spec = replace(spec, keeps_state=True)
    return spec


# Unmeasured sizes, steps that are not monotone, drafts that lose.
speeds = st.builds(
    lambda times, is_measured: (
        lambda _settings: SpeedModel(CostCurve([INF, 10.0, *times]), is_measured)
    ),
    st.lists(st.floats(5.0, 400.0) | st.just(INF), max_size=31),
    st.booleans(),
)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "context_size": st.sampled_from((1, 100, 500, 512, 3000, 32_768)),
        "threads": st.integers(1, 8),
        "kv_type": st.sampled_from(("f32", "f16", "bf16", "q8_0", "q4_0")),
        "draft_max": st.integers(0, 255),
        "drafter": st.sampled_from(("auto", "none")),
        "exact": st.booleans(),
        "prompt_tokens": st.integers(0, 8000),
        "max_tokens": st.integers(0, 8000),
        "prefer": st.sampled_from(("speed", "context")),
    },
)
repacking = st.booleans()


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """With no GPU, a small or a large one, or one that shares the memory."""
    gpus: tuple[Accelerator, ...] = ()
    if draw(st.booleans()):
        gpus = gpu(draw(st.integers(1, 200)) * MIB, draw(st.booleans()))
    return machine_with(64 << 30, gpus, repacks=draw(repacking))


def gpu_free_bytes(machine: Machine) -> int:
    return sum(one.free_bytes for one in machine.accelerators if not one.shares_memory)


def possible(spec: ModelSpec, machine: Machine, request: dict[str, Any]) -> bool:
    """Requests that nothing but memory can refuse.

    Layers on a GPU with memory of its own are chosen without looking at `draft_max`.
    """
    return (
        request.get("context_size", 1) <= spec.context_length
        and kv_type_fits(spec, request.get("kv_type", "f16"))
        and ("draft_max" not in request or not gpu_free_bytes(machine))
    )


def taken(plan: Plan) -> int:
    return plan.predicted_peak_bytes + plan.predicted_gpu_bytes


@quick
@given(specs(), machines(), speeds, wishes, st.floats(0.3, 1.2), st.booleans())
def test_a_plan_never_exceeds_what_it_may_take(
    spec: ModelSpec,
    machine: Machine,
    speed_of: Callable[[RunConfig], SpeedModel],
    request: dict[str, Any],
    part: float,
    is_budget: bool,
) -> None:
    """Part of what the request takes when there is plenty, as a budget or as free memory."""
    assume(possible(spec, machine, request))
    ample = plan_of(spec, machine, speed_of, **request)
    limit = int(part * taken(ample))
    options = {"budget_bytes": limit} if is_budget else {}
    where = machine if is_budget else replace(machine, free_bytes=limit)
    plan = outcome(spec, where, speed_of, **request, **options)
    if isinstance(plan, DoesNotFitError):
        assert plan.hint
        return
    assert plan.predicted_peak_bytes <= limit == plan.limit_bytes
    assert plan.predicted_gpu_bytes <= gpu_free_bytes(machine)
    assert taken(plan) <= limit or not is_budget
    assert all(component.nbytes > 0 for component in plan.components)
    assert 1 <= plan.context_size <= spec.context_length
    assert plan.context_size == request.get("context_size", plan.context_size)
    assert plan.draft_max < plan.batch_size
    asked = min(request.get("draft_max", plan.draft_max), plan.context_size - 1)
    assert plan.draft_max == asked or plan.drafter == "none"
    assert plan.tokens_per_s >= plan.plain_tokens_per_s * (1 - 1e-9)


@quick
@given(specs(), machines(), speeds, wishes, st.floats(0.5, 1.1))
def test_quality_is_never_traded_silently(
    spec: ModelSpec,
    machine: Machine,
    speed_of: Callable[[RunConfig], SpeedModel],
    request: dict[str, Any],
    part: float,
) -> None:
    """However tight the budget: f16 unless asked, and bf16 beside it for exact runs.

    `prefer` "context" asks for q8_0 where f16 does not reach all of the context.
    """
    assume(possible(spec, machine, request))
    budget = int(part * taken(plan_of(spec, machine, speed_of, **request)))
    plan = outcome(spec, machine, speed_of, **request, budget_bytes=budget)
    if isinstance(plan, DoesNotFitError):
        return
    asked = request.get("kv_type")
    if asked in (None, "f16") and request.get("exact"):
        assert (plan.kv_type_k, plan.kv_type_v) == ("bf16", "f16")
    elif asked is None and request.get("prefer") == "context":
        assert plan.kv_type_k == plan.kv_type_v and plan.kv_type_k in ("f16", "q8_0")
    else:
        assert (plan.kv_type_k, plan.kv_type_v) == (asked or "f16",) * 2


@thorough
@given(specs(), repacking, speeds, st.none() | st.sampled_from((512, 4096)), st.booleans())
def test_more_budget_is_never_worse(
    spec: ModelSpec,
    repacks: bool,
    speed_of: Callable[[RunConfig], SpeedModel],
    context_size: int | None,
    exact: bool,
) -> None:
    """40 budgets, from a tenth of what is needed to more than enough."""
    assume(spec.context_length >= (context_size or 1))
    machine = machine_with(64 << 30, repacks=repacks)
    request = {"context_size": context_size, "exact": exact}
    ample = taken(plan_of(spec, machine, speed_of, **request))
    best, fitted = 0.0, False
    for step in range(1, 41):
        budget = int(ample * (0.1 + step / 30))
        plan = outcome(spec, machine, speed_of, **request, budget_bytes=budget)
        if isinstance(plan, DoesNotFitError):
            assert not fitted, f"{budget} does not fit, but less did"
            assert plan.hint
            continue
        assert plan.tokens_per_s >= best * (1 - 1e-9), f"slower with {budget}"
        best, fitted = plan.tokens_per_s, True
    assert fitted


@pytest.mark.slow
@thorough
@given(specs(), st.booleans(), st.integers(1, 64))
def test_more_budget_never_stops_fitting_with_a_gpu(
    spec: ModelSpec, shares: bool, mebibytes: int
) -> None:
    """And never brings fewer layers to it."""
    machine = machine_with(64 << 30, gpu(mebibytes * MIB, shares))
    ample = taken(plan_of(spec, machine))
    layers, fitted = -2, False
    for step in range(1, 41):
        plan = outcome(spec, machine, budget_bytes=int(ample * (0.1 + step / 30)))
        if isinstance(plan, DoesNotFitError):
            assert not fitted
            continue
        on_gpu = plan.gpu_layers if plan.gpu_layers >= 0 else spec.num_layers + 1
        assert on_gpu >= layers
        layers, fitted = on_gpu, True
    assert fitted


@quick
@given(specs(), repacking, st.sampled_from((512, 3000, 4096, 32_768)), st.floats(0.2, 1.0))
def test_a_hint_that_names_a_context_works(
    spec: ModelSpec, repacks: bool, context_size: int, part: float
) -> None:
    """The context it names fits as it stands, and one of 256 tokens more does not."""
    assume(spec.context_length >= context_size)
    machine = machine_with(64 << 30, repacks=repacks)
    wish: dict[str, Any] = {"context_size": context_size}
    limit = int(part * taken(plan_of(spec, machine, drafter="none", **wish)))
    tight = replace(machine, free_bytes=limit)
    error = outcome(spec, tight, **wish)
    if isinstance(error, Plan):
        return
    ways = re.findall(r"`(?:--kv-type (\w+) )?--ctx (\d+)`", error.hint)
    assert ways or error.hint == "use a smaller model file"
    for kv_type, tokens in ways:
        named = {"kv_type": kv_type or None}
        assert isinstance(outcome(spec, tight, context_size=int(tokens), **named), Plan)
        assert int(tokens) <= context_size
        if int(tokens) + 256 <= context_size:
            larger = outcome(spec, tight, context_size=int(tokens) + 256, **named)
            assert isinstance(larger, DoesNotFitError)


@quick
@given(specs(), repacking, st.floats(0.01, 0.9))
def test_a_hint_that_names_a_budget_works(spec: ModelSpec, repacks: bool, part: float) -> None:
    machine = machine_with(64 << 30, repacks=repacks)
    smallest = taken(plan_of(spec, machine, context_size=min(512, spec.context_length)))
    error = outcome(spec, machine, budget_bytes=int(part * smallest))
    if isinstance(error, Plan):
        return
    for named in re.findall(r"`--budget (\d+)MiB`", error.hint):
        assert isinstance(outcome(spec, machine, budget_bytes=int(named) * MIB), Plan)
        less = outcome(spec, machine, budget_bytes=(int(named) - 1) * MIB)
        assert isinstance(less, DoesNotFitError)
    for named in re.findall(r"`--ctx (\d+)`", error.hint):
        wish = {"context_size": int(named), "budget_bytes": int(part * smallest)}
        assert isinstance(outcome(spec, machine, **wish), Plan)


@quick
@given(specs(), repacking, speeds, st.floats(0.4, 1.3))
def test_alternatives_hold_what_they_claim(
    spec: ModelSpec,
    repacks: bool,
    speed_of: Callable[[RunConfig], SpeedModel],
    part: float,
) -> None:
    """Each one's options are followed; `faster` names a budget, the others fit this one."""
    machine = machine_with(64 << 30, repacks=repacks)
    budget = int(part * taken(plan_of(spec, machine, speed_of)))
    plan = outcome(spec, machine, speed_of, budget_bytes=budget)
    if isinstance(plan, DoesNotFitError):
        return
    for other in plan.alternatives:
        wish: dict[str, Any] = {"budget_bytes": budget}
        if found := re.search(r"--ctx (\d+)", other.options):
            wish["context_size"] = int(found[1])
        if found := re.search(r"--draft-max (\d+)", other.options):
            wish["draft_max"] = int(found[1])
        if found := re.search(r"--budget (\d+)MiB", other.options):
            wish["budget_bytes"] = int(found[1]) * MIB
        made = plan_of(spec, machine, speed_of, **wish)
        assert (made.context_size, made.tokens_per_s) == (other.context_size, other.tokens_per_s)
        assert made.predicted_peak_bytes == other.peak_bytes
        assert other.peak_bytes <= wish["budget_bytes"]
        if other.name == "faster":
            assert other.tokens_per_s > 1.02 * plan.tokens_per_s
        elif other.name == "longer context":
            assert other.context_size > plan.context_size
        else:
            assert other.peak_bytes <= plan.predicted_peak_bytes
