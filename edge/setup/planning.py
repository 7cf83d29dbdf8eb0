"""Plans for whole runs: the planner, the drafter's tables, and what was measured before.

Imports no inference library and no numpy, so that `edgespec plan` answers at once.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from edgespec.drafting.drafters import MODEL, drafter_names, tables_bytes
from edgespec.drafting.proposal import MOST_DRAWN
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.device.bandwidth import memory_bandwidth
from edgespec.memory.plan.plan import (
    Choice,
    Device,
    Plan,
    Settings,
    this_device,
)
from edgespec.memory.plan.planner import make_plan
from edgespec.memory.plan.request import LLAMACPP, ONNX, Request
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import SpeedModel, estimated_curve
from edgespec.models.exits.early_exit import read_exit
from edgespec.models.onnx.packing import check_supported
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec
from edgespec.setup.exit_planning import Experience, Verdict, exit_of, judge
from edgespec.setup.stored import (
    draft_settings_of,
    known_exact_step,
    settings_of,
    stored_curve,
    stored_kv_losses,
    stored_learned,
    stored_reads,
    stored_rounds,
)
from edgespec.switching.planning import check_switch, reason, stored
from edgespec.switching.policy import SwitchPrices

_F32, _F64 = 4, 8
_MAX_NODES = 32  # of a step whose time is estimated
# Predicted speed of the other backend: one that has answered here, and one that has only been timed
# (such predictions were up to 30% too good).
_WORTH_SWITCHING, _WORTH_TRYING = 1.03, 1.2
_MANY, _FLAT = 8, 1.3  # nodes of a step, and times a plain step: flatter curves reward branches


def make_run_plan(spec: ModelSpec, request: Request, machine: Device | None = None) -> Plan:
    """The plan of a request on this machine, with everything that was measured earlier.

    With `backend="auto"` llama.cpp runs the file unless ONNX Runtime was measured with it, too,
    and is predicted to be worth what it takes (`_worth`).

    An ONNX model folder runs on ONNX Runtime alone.

    Raises UnsupportedError or DoesNotFitError, as `make_plan` does.
    """
    machine = machine or this_device()
    if spec.format == ONNX_FORMAT:
        return _folder_plan(spec, request, machine)
    request = _placed(request, machine)
    if request.backend == ONNX:
        check_supported(spec)
        plan = _plan_on(spec, request, machine)
        reason = "an NPU is ONNX Runtime's" if request.device == "npu" else "as asked"
        return _with_choice(plan, Choice("backend", ONNX, reason))
    plan = _plan_on(spec, replace(request, backend=LLAMACPP), machine)
    if request.backend != "auto":
        return _with_choice(plan, Choice("backend", LLAMACPP, "as asked"))
    other = _measured_onnx_plan(spec, request, machine, plan.goal.draft_max)
    if isinstance(other, str):
        return _with_choice(plan, Choice("backend", LLAMACPP, other))
    both = f"{plan.goal.tokens_per_s:.1f} tokens/s predicted with llama.cpp"
    both += f", {other.tokens_per_s:.1f} with ONNX Runtime"
    worth = _worth(other, plan, stored_curve(spec, settings_of(other)))
    if other.tokens_per_s > worth * plan.goal.tokens_per_s:
        return _with_choice(other, Choice("backend", ONNX, both))
    both += f", which would have to be {worth:.2f}x as fast to be worth its memory"
    return _with_choice(plan, Choice("backend", LLAMACPP, both))


def _worth(other: Plan, plan: Plan, curve: CostCurve | None) -> float:
    """How many times as fast another backend must be predicted to be.

    A percent for every percent of the memory that it takes more of, and more where its step times
    were never held against a real answer.
    """
    extra = max(0, other.predicted_peak_bytes - plan.predicted_peak_bytes)
    is_tried = curve is not None and curve.is_tried
    return (_WORTH_SWITCHING if is_tried else _WORTH_TRYING) + extra / other.limit_bytes


def _folder_plan(spec: ModelSpec, request: Request, machine: Device) -> Plan:
    if request.backend == LLAMACPP:
        raise UnsupportedError(
            f"llama.cpp runs GGUF files, and {spec.path} is an ONNX model folder",
            hint="leave out --backend, or name a GGUF file",
        )
    if request.exact:
        # Empty cells lie between the past and the new tokens, so sums are taken in another order.
        raise UnsupportedError(
            "--exact is not possible with an ONNX model folder: a token rounds differently once it "
            "is past",
            hint="leave out --exact, or use a GGUF file of this model",
        )
    request = _placed(replace(request, backend=ONNX), machine)
    plan = _plan_on(spec, request, machine)
    return _with_choice(plan, Choice("backend", ONNX, "the model is an ONNX folder"))


def _placed(request: Request, machine: Device) -> Request:
    """The request with what its device means for the other options.

    Raises UnsupportedError where they contradict it.
    """
    if request.device == "npu":
        if request.backend == LLAMACPP:
            raise UnsupportedError(
                "--device npu is not possible with llama.cpp", hint="use --backend onnx"
            )
        return replace(request, backend=ONNX)
    if request.backend == ONNX or request.device not in ("cpu", "gpu"):
        return request
    if request.gpu_layers is not None and (request.gpu_layers == 0) != (request.device == "cpu"):
        raise UnsupportedError(
            f"--device {request.device} and --gpu-layers {request.gpu_layers} contradict each "
            "other",
            hint="leave one of them out",
        )
    if request.device == "gpu" and not machine.accelerators:
        raise UnsupportedError(
            "--device gpu is not possible: llama.cpp has no GPU here",
            hint="`edgespec doctor` says how to build it with one; or add --backend onnx",
        )
    return replace(request, gpu_layers=0) if request.device == "cpu" else request


def _plan_on(spec: ModelSpec, request: Request, machine: Device) -> Plan:
    early_exit = exit_of(spec, request)
    if early_exit is None:
        return _plan_by_curve(spec, request, machine)
    plan = _plan_by_curve(spec, replace(request, draft_model=None), machine)
    if plan.drafter == "none":
        return plan
    draft_curve = stored_curve(early_exit.spec, draft_settings_of(plan, early_exit.spec))
    curve = stored_curve(spec, settings_of(plan))
    experience = Experience.from_json(stored_learned(spec, plan, early_exit.spec))
    verdict = judge(early_exit, spec, curve, draft_curve, experience)
    if verdict.pays:
        names = f"{plan.drafter},{MODEL}"
        wider = replace(request, drafter=names, draft_model=early_exit.spec.path)
        try:
            drafting = _plan_with(spec, wider, machine)
        except DoesNotFitError as problem:
            verdict = Verdict(False, str(problem))
        else:
            if drafting.draft_max and not drafting.is_limited:
                choice = Choice("early_exit", "used", verdict.reason)
                reason = "what the text repeats, and the model's own first words of what follows"
                return _with_choice(_with_reason(drafting, "drafter", reason), choice)
            verdict = Verdict(False, f"{verdict.reason}; but context would be left out for it")
    hint = f"; --drafter {plan.drafter},{MODEL} uses it" if early_exit.is_named else ""
    return _with_choice(plan, Choice("early_exit", "not used", verdict.reason + hint))


def _plan_by_curve(spec: ModelSpec, request: Request, machine: Device) -> Plan:
    plan = _plan_with(spec, request, machine)
    if request.drafter != "auto" or plan.drafter != "suffix" or not _is_flat(spec, plan):
        return plan
    wide = _plan_with(spec, replace(request, drafter="suffix,recycling"), machine)
    reason = "steps over many tokens cost little here: what else the target could have said pays"
    return _with_reason(wide, "drafter", reason)


def _plan_with(spec: ModelSpec, request: Request, machine: Device) -> Plan:
    draft_spec, switch_spec = _draft_spec(spec, request), _switch_spec(spec, request)
    names = "suffix" if request.drafter == "auto" else request.drafter
    plan = make_plan(
        spec,
        request,
        machine,
        lambda settings: speed_model(spec, settings),
        drafter_bytes=tables_bytes(names) + _draft_rows_bytes(spec, draft_spec),
        draft_spec=draft_spec,
        switch_spec=switch_spec,
        max_step_of=lambda settings: known_exact_step(spec, settings) if request.exact else None,
        kv_losses=stored_kv_losses(spec),
    )
    return plan if switch_spec is None else _with_switch(plan, spec, switch_spec, request)


def _with_switch(plan: Plan, spec: ModelSpec, small: ModelSpec, request: Request) -> Plan:
    """The plan with what taking turns with a smaller model is expected to bring."""
    pair = (spec, settings_of(plan)), (small, settings_of(plan.of_small()))
    curves = [speed_model(*one).curve for one in pair]
    reads = [
        known and known.at_the_level_of(curve)
        for known, curve in zip((stored_reads(*one) for one in pair), curves, strict=True)
    ]
    prices = SwitchPrices(curves[0], curves[1], reads[0], reads[1])
    depth = request.prompt_tokens + (request.max_tokens or 256) // 2
    why, speed = reason(stored(spec, small), prices, depth, plan.tokens_per_s)
    choices = (*plan.choices, Choice("switch", small.path.name, why))
    return replace(plan, choices=choices, tokens_per_s=speed)


def _draft_rows_bytes(spec: ModelSpec, draft_spec: ModelSpec | None) -> int:
    """Bytes of the laws that drawn nodes carry, and of the target's rows they are held against."""
    if draft_spec is None:
        return 0
    laws = MOST_DRAWN * spec.vocab_size * (_F32 + _F64)
    spread = spec.vocab_size * _F32 if read_exit(draft_spec) else 0
    return laws + spread


def _draft_spec(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The draft model that was named, if it can draft for this one."""
    names = () if request.drafter == "auto" else drafter_names(request.drafter)
    if request.draft_model is None:
        if MODEL in names:
            raise UnsupportedError(
                "the drafter 'model' needs a draft model", hint="name one with --draft-model FILE"
            )
        return None
    if names and MODEL not in names:
        raise UnsupportedError(
            f"--draft-model is not used by --drafter {request.drafter}", hint="leave out one"
        )
    draft_spec = read_model_spec(request.draft_model)
    check_pair(spec, draft_spec)
    return draft_spec


def _switch_spec(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The smaller model that was named, if it can take turns with this one."""
    if request.switch is None:
        return None
    if request.remember:
        raise UnsupportedError(
            "--remember keeps what one model writes, and with --switch two do",
            hint="leave out one of them",
        )
    small = read_model_spec(request.switch)
    check_switch(spec, small)
    return small


def _is_flat(spec: ModelSpec, plan: Plan) -> bool:
    """Whether verifying many tokens was measured to cost hardly more than one."""
    curve = stored_curve(spec, settings_of(plan))
    return curve is not None and curve.step_ms(_MANY, 0) <= _FLAT * curve.base[1]


def _measured_onnx_plan(
    spec: ModelSpec, request: Request, machine: Device, least_draft: int
) -> Plan | str:
    """The plan on ONNX Runtime where it was measured and fits, or why there is none.

    It fits where nothing is left out for it, be it drafts as large as llama.cpp would have: more
    memory must not bring a faster backend and less of the rest.
    """
    if (machine.accelerators and request.device != "cpu") or request.gpu_layers:
        return "runs on the GPU"
    if request.kv_type not in (None, "f32"):
        return f"has a cache of {request.kv_type}"
    if not find_spec("onnxruntime"):
        return "ONNX Runtime is not installed"
    try:
        if request.switch is not None:
            check_supported(read_model_spec(request.switch))
        check_supported(spec)
        plan = _plan_on(spec, replace(request, backend=ONNX), machine)
        if plan.goal.draft_max < least_draft:
            larger = replace(request, backend=ONNX, draft_max=least_draft)
            plan = _with_reason(_plan_on(spec, larger, machine), "draft_max", "as with llama.cpp")
    except (UnsupportedError, DoesNotFitError) as problem:
        return f"not on ONNX Runtime: {problem}"
    if stored_curve(spec, settings_of(plan)) is None:
        return "ONNX Runtime was not tried with this file yet (--backend onnx)"
    if plan.is_limited:
        return "ONNX Runtime takes more memory: context or drafts would be left out for it"
    return plan


def _with_choice(plan: Plan, choice: Choice) -> Plan:
    return replace(plan, choices=(choice, *plan.choices))


def _with_reason(plan: Plan, name: str, reason: str) -> Plan:
    choices = [replace(c, reason=reason) if c.name == name else c for c in plan.choices]
    return replace(plan, choices=tuple(choices))


def speed_model(spec: ModelSpec, settings: Settings) -> SpeedModel:
    """Predicts speed from the stored curve and history, or from bandwidth where there is none."""
    curve = stored_curve(spec, settings)
    rounds = stored_rounds(spec, settings.drafter)
    if curve is not None:
        return SpeedModel(curve, is_measured=True, rounds=rounds)
    estimate = estimated_curve(spec.weight_bytes, memory_bandwidth(), _MAX_NODES)
    return SpeedModel(estimate, is_measured=False, rounds=rounds)
