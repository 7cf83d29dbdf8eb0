"""Whether a plan uses edgespec's matrix kernels: where they fit, unless whole steps were slower.

A file of quantized weights was slower with them on no processor that was measured
(docs/measurements.md), so nothing is timed before a first load. Where whole steps of both were
measured, as `bench` does, the faster ones are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.models.spec import ONNX_FORMAT, ModelSpec
from edgespec.setup.stored import stored_curve


def prepare_kernels(spec: ModelSpec, request: Request) -> None:
    """Hand the kernels to llama.cpp, so that the next plan knows where they do not fit it."""
    asked = request.gpu_layers or 0
    is_elsewhere = asked < 0 or asked > spec.num_layers
    is_possible = request.kernels != "off" and not missing_kernels() and not is_elsewhere
    if request.backend == ONNX or spec.format == ONNX_FORMAT or not is_possible:
        return
    from edgespec.backends.llama.kernels import refusal_of_kernels

    refusal_of_kernels()


def best_kernels(spec: ModelSpec, request: Request, plan_of: Callable[[Request], Plan]) -> Plan:
    """The plan with the kernels whose steps were measured to be faster; else with edgespec's."""
    plan = plan_of(request)
    if request.kernels != "auto" or not plan.kernels:
        return plan
    own = replace(plan, kernels=False)
    curves = stored_curve(spec, own), stored_curve(spec, plan)
    if any(one is None or one.contention != 1.0 for one in curves):
        return plan
    other = plan_of(replace(request, kernels="off"))
    speeds = plan.tokens_per_s, other.tokens_per_s
    reason = "{:.1f} tokens/s predicted, {:.1f} with llama.cpp's".format(*speeds)
    return (plan if speeds[0] >= speeds[1] else other).with_reason("kernels", reason)
