"""Which backend runs a file: what a request settles, and whether ONNX Runtime is the faster one.

Imports no inference library and no numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.options import LLAMACPP, ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Choice, Request
from edgespec.memory.plan.settings import settings_of
from edgespec.memory.times.curve import CostCurve
from edgespec.models.onnx.facts import check_supported
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec
from edgespec.setup.stored import stored_curve

# Predicted speed of the other backend: one that has answered here, and one that has only been timed
# (such predictions were up to 30% too good).
_WORTH_SWITCHING, _WORTH_TRYING = 1.03, 1.2


def with_backend(
    spec: ModelSpec, request: Request, machine: Machine
) -> tuple[Request, Choice | None]:
    """The request with a backend, and why it has that one.

    Where the request leaves it open that is llama.cpp for now, and None: `best_backend` looks at
    the other one. Raises UnsupportedError where options contradict each other or the file.
    """
    if spec.format == ONNX_FORMAT:
        _check_folder(spec, request)
        request = _with_device(replace(request, backend=ONNX), machine)
        return request, Choice("backend", ONNX, "the model is an ONNX folder")
    request = _with_device(request, machine)
    if request.backend == ONNX:
        check_supported(spec)
        reason = "an NPU is ONNX Runtime's" if request.device == "npu" else "as asked"
        return request, Choice("backend", ONNX, reason)
    if request.backend == LLAMACPP:
        return request, Choice("backend", LLAMACPP, "as asked")
    return replace(request, backend=LLAMACPP), None


def _check_folder(spec: ModelSpec, request: Request) -> None:
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


def _with_device(request: Request, machine: Machine) -> Request:
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
            f"--device gpu is not possible: {machine.missing_gpu}",
            hint="`edgespec doctor` says what is missing; or add --backend onnx",
        )
    return replace(request, gpu_layers=0) if request.device == "cpu" else request


def best_backend(
    spec: ModelSpec,
    request: Request,
    machine: Machine,
    plan: Plan,
    plan_of: Callable[[Request], Plan],
) -> Plan:
    """`plan`, which is llama.cpp's, or that of ONNX Runtime; each says why it was chosen.

    ONNX Runtime has to be measured with this file, and predicted to be worth what it takes.
    """
    other = _obstacle(request, machine) or _onnx_plan(spec, request, plan, plan_of)
    if isinstance(other, str):
        return plan.with_choice(Choice("backend", LLAMACPP, other))
    both = f"{plan.goal.tokens_per_s:.1f} tokens/s predicted with llama.cpp"
    both += f", {other.tokens_per_s:.1f} with ONNX Runtime"
    worth = _worth(other, plan, stored_curve(spec, settings_of(other)))
    if other.tokens_per_s > worth * plan.goal.tokens_per_s:
        return other.with_choice(Choice("backend", ONNX, both))
    both += f", which would have to be {worth:.2f}x as fast to be worth its memory"
    return plan.with_choice(Choice("backend", LLAMACPP, both))


def _obstacle(request: Request, machine: Machine) -> str | None:
    """What keeps a request from ONNX Runtime, whatever its plan there would be."""
    if (machine.accelerators and request.device != "cpu") or request.gpu_layers:
        return "shares layers with workers" if request.workers else "runs on the GPU"
    if request.kv_type not in (None, "f32"):
        return f"has a cache of {request.kv_type}"
    if not find_spec("onnxruntime"):
        return "ONNX Runtime is not installed"
    return None


def _onnx_plan(
    spec: ModelSpec, request: Request, plan: Plan, plan_of: Callable[[Request], Plan]
) -> Plan | str:
    """The plan on ONNX Runtime where it was measured and fits, or why there is none.

    It fits where nothing is left out for it, be it drafts as large as llama.cpp would have: more
    memory must not bring a faster backend and less of the rest.
    """
    request, least_draft = replace(request, backend=ONNX), plan.goal.draft_max
    try:
        if request.switch is not None:
            check_supported(read_model_spec(request.switch))
        check_supported(spec)
        found = plan_of(request)
        if found.goal.draft_max < least_draft:
            larger = plan_of(replace(request, draft_max=least_draft))
            found = larger.with_reason("draft_max", "as with llama.cpp")
    except (UnsupportedError, DoesNotFitError) as problem:
        return f"not on ONNX Runtime: {problem}"
    if stored_curve(spec, settings_of(found)) is None:
        return "ONNX Runtime was not tried with this file yet (--backend onnx)"
    if found.is_limited:
        return "ONNX Runtime takes more memory: context or drafts would be left out for it"
    return found


def _worth(other: Plan, plan: Plan, curve: CostCurve | None) -> float:
    """How many times as fast another backend must be predicted to be.

    A percent for every percent of the memory that it takes more of, and more where its step times
    were never held against a real answer.
    """
    extra = max(0, other.predicted_peak_bytes - plan.predicted_peak_bytes)
    is_tried = curve is not None and curve.is_tried
    return (_WORTH_SWITCHING if is_tried else _WORTH_TRYING) + extra / other.limit_bytes
