"""Plans for whole runs: the planner, the drafter's tables, and what was measured before.

    request -> candidates -> plan

A request leaves open who drafts and which backend runs. Every way to settle that is a candidate: a
request that says more, planned as any other (`planned`). They come one after the other, because
whether the next one is of use depends on the plans before it:

1. on llama.cpp, drafts of what the text repeats
2. where large steps are cheap: those of what else the target could have said, too
3. where it pays: those of an early exit or a head, too (`drafter_choice`)
4. with edgespec's matrix kernels, and with llama.cpp's: 1 to 3 with those that are faster
   (`kernel_choice`)
5. where ONNX Runtime was measured with this file: 1 to 3 on it (`backend_choice`)

Imports no inference library and no numpy, so that `edgespec plan` answers at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgespec.drafting.drafters import tables_bytes
from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.simulation import simulating
from edgespec.memory.device.bandwidth import memory_bandwidth
from edgespec.memory.plan.machine import Machine, this_machine
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.planner import make_plan
from edgespec.memory.plan.request import Choice, Request, users_of
from edgespec.memory.plan.settings import Settings, settings_of
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import SpeedModel, estimated_curve
from edgespec.models.spec import ModelSpec
from edgespec.setup.backend_choice import best_backend, with_backend
from edgespec.setup.companions import (
    draft_rows_bytes,
    draft_spec_of,
    switch_spec_of,
    with_switch,
)
from edgespec.setup.drafter_choice import Candidate, candidate_of, with_candidate, with_offer
from edgespec.setup.kernel_choice import best_kernels
from edgespec.setup.projector_choice import with_projector
from edgespec.setup.snapshots import curve_with
from edgespec.setup.stored import known_exact_step, stored_curve, stored_kv_losses, stored_rounds

_MAX_NODES = 32  # of a step whose time is estimated
# Nodes of a step, and times a plain step. A ledger bounds what recycling can lose, so that this is
# where it brings nothing: over suffix alone 1.013 at 1.15, 1.000 at 1.3, 1.002 at 1.48, 0.999 at
# 1.67, in replays of SmolLM2's answers that charge nothing for its tables.
_MANY, _FLAT = 8, 1.3


def make_run_plan(spec: ModelSpec, request: Request, machine: Machine | None = None) -> Plan:
    """The plan of a request on this machine, with everything that was measured earlier.

    With `backend="auto"` llama.cpp runs the file unless ONNX Runtime was measured with it, too,
    and is predicted to be worth what it takes. An ONNX model folder runs on ONNX Runtime alone.

    Raises UnsupportedError or DoesNotFitError, as `make_plan` does.
    """
    machine = machine or this_machine(request.workers)
    with simulating():
        request, is_found = with_projector(spec, request)
        try:
            plan = _made(spec, request, machine)
        except DoesNotFitError:
            if not is_found:
                raise
            plan = _made(spec, replace(request, mmproj=None), machine)
            reason = "the one beside the model does not fit"
            return plan.with_choice(Choice("mmproj", "none", reason))
    if plan.projector is None:
        return plan
    found = "the one beside the model; --mmproj none leaves it out"
    reason = found if is_found else "images are asked for"
    return plan.with_choice(Choice("mmproj", plan.projector.name, reason))


def _made(spec: ModelSpec, request: Request, machine: Machine) -> Plan:
    request, backend = with_backend(spec, request, machine)
    request, tried = _for_users(spec, request)
    plan_of = partial(_best_kernels, spec, machine=machine, tried=tried)
    plan = plan_of(request)
    if backend is not None:
        plan = plan.with_choice(backend)
    elif plan.users == 1 and not plan.projector:  # on the other backend, one text at a time
        plan = best_backend(spec, request, machine, plan, plan_of)
    return replace(plan, drafter_is_asked=request.drafter != "auto")


def _for_users(spec: ModelSpec, request: Request) -> tuple[Request, Candidate | None]:
    """The early exit or head that may draft: it follows one text. Raises UnsupportedError."""
    switch_spec = switch_spec_of(spec, request)
    specs = (spec,) if switch_spec is None else (spec, switch_spec)
    if int(users_of(specs, request).value) > 1:
        return request, None
    if request.mmproj is not None:  # a head or an exit would follow what it cannot read
        return request, None
    if request.draft_model is not None:  # candidates without it are planned, too
        request = replace(request, users=1)
    return request, candidate_of(spec, request)


def _best_kernels(
    spec: ModelSpec, request: Request, machine: Machine, tried: Candidate | None
) -> Plan:
    """The plan on one backend, with the matrix kernels that are faster there."""
    plan_of = partial(_best_drafters, spec, machine=machine, tried=tried)
    return best_kernels(spec, request, plan_of)


def _best_drafters(
    spec: ModelSpec, request: Request, machine: Machine, tried: Candidate | None
) -> Plan:
    """The plan on one backend and its kernels, with the drafters that are worth it."""
    plan_of = partial(planned, spec, machine=machine)
    tables = request if tried is None else replace(request, draft_model=None)
    plan = plan_of(tables)
    is_open = request.drafter == "auto" and plan.drafter == "suffix"
    if is_open and _is_flat(stored_curve(spec, settings_of(plan))):
        reason = (
            "steps over many tokens cost little here: what else the target could have said pays"
        )
        wide = plan_of(replace(tables, drafter="suffix,recycling"))
        plan = wide.with_reason("drafter", reason)
    if plan.drafter == "none":
        return plan
    if tried is not None:
        return with_candidate(spec, request, plan, tried, plan_of)
    return with_offer(spec, request, plan)


def _is_flat(curve: CostCurve | None) -> bool:
    """Whether verifying many tokens was measured to cost hardly more than one."""
    return curve is not None and curve.step_ms(_MANY, 0) <= _FLAT * curve.base[1]


def planned(spec: ModelSpec, request: Request, machine: Machine) -> Plan:
    """One candidate's plan: its models read, and what earlier runs know put in."""
    draft_spec, switch_spec = draft_spec_of(spec, request), switch_spec_of(spec, request)
    names = "suffix" if request.drafter == "auto" else request.drafter
    plan = make_plan(
        spec,
        request,
        machine,
        lambda settings: speed_model(spec, settings),
        drafter_bytes=tables_bytes(names) + draft_rows_bytes(spec, draft_spec, names),
        draft_spec=draft_spec,
        switch_spec=switch_spec,
        max_step_of=lambda settings: known_exact_step(spec, settings) if request.exact else None,
        kv_losses=stored_kv_losses(spec),
    )
    if switch_spec is None:
        return plan
    return with_switch(plan, spec, switch_spec, request.depth, _curve_of)


def _curve_of(spec: ModelSpec, settings: Settings) -> CostCurve:
    return speed_model(spec, settings).curve


def speed_model(spec: ModelSpec, settings: Settings) -> SpeedModel:
    """Predicts speed from the stored curve and history, or from bandwidth where there is none."""
    curve = curve_with(spec, settings)
    rounds = stored_rounds(spec, settings.drafter)
    if curve is not None:
        return SpeedModel(curve, is_measured=True, rounds=rounds)
    estimate = estimated_curve(spec.bytes_per_token, memory_bandwidth(), _MAX_NODES)
    return SpeedModel(estimate, is_measured=False, rounds=rounds)
