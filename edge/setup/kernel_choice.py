"""Whether a plan uses edgespec's matrix kernels: where they were measured to be faster.

Before a first load, products of a file's matrices are timed with them and with llama.cpp's own, a
few tenths of a second a type, once for a device. Later the whole steps of both count, where both
were loaded.

Imports no inference library; measuring does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.memory.bytes.footprint import multiplied_tensors
from edgespec.memory.device import host
from edgespec.memory.device.kernels import kernels_key, missing_kernels, packed_bytes
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.memory.plan.settings import settings_of
from edgespec.memory.store import cache
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.spec import ONNX_FORMAT, ModelSpec
from edgespec.progress import Progress
from edgespec.setup.stored import stored_curve

_KIND = "products"
_TOKENS = (1, 4)  # plain steps and short drafts
_LEAST_SHARE = 0.05  # of a file's weights: a type with less does not decide
_LEAST_GAIN = 1.02  # less is noise

# Milliseconds of a product by tokens in the step: with llama.cpp's kernels, with ours.
Times = dict[str, tuple[float, float]]


def prepare_kernels(spec: ModelSpec, request: Request, report: Progress) -> None:
    """Hand the kernels to llama.cpp and time what decides, so that the next plan knows.

    Where they do not fit this llama.cpp, plans of this process know that, too.
    """
    asked = request.gpu_layers or 0
    is_elsewhere = asked < 0 or asked > spec.num_layers
    is_possible = request.kernels != "off" and not missing_kernels() and not is_elsewhere
    if request.backend == ONNX or spec.format == ONNX_FORMAT or not is_possible:
        return
    from edgespec.backends.llama.kernels import attach

    if attach() or request.kernels == "on":
        return
    for kind, shape in _deciding(spec).items():
        if stored_product(kind) is None:
            report("timing matrix kernels", 0.0)
            cache.store(_KIND, _key(kind), {"ms": _measured(kind, shape)})
            report("timing matrix kernels", 1.0)


def best_kernels(spec: ModelSpec, request: Request, plan_of: Callable[[Request], Plan]) -> Plan:
    """The plan with the kernels that are faster, as far as anything was measured."""
    plan = plan_of(request)
    if request.kernels != "auto" or not plan.kernels:
        return plan
    own = replace(settings_of(plan), kernels=False)
    if stored_curve(spec, own) is not None and stored_curve(spec, settings_of(plan)) is not None:
        return _faster(plan, plan_of(replace(request, kernels="off")))
    gain = product_gain(spec)
    if gain is None:
        return plan
    if gain < _LEAST_GAIN:
        reason = f"llama.cpp's own are as fast on this file's matrices, measured: ours {gain:.2f}x"
        return plan_of(replace(request, kernels="off")).with_reason("kernels", reason)
    reason = f"{gain:.1f}x as fast as llama.cpp's own on this file's matrices, measured"
    return plan.with_reason("kernels", reason)


def _faster(plan: Plan, other: Plan) -> Plan:
    """The faster of two plans, with edgespec's kernels and with llama.cpp's."""
    both = f"{plan.tokens_per_s:.1f} tokens/s predicted, {other.tokens_per_s:.1f} with llama.cpp's"
    best = plan if plan.tokens_per_s >= other.tokens_per_s else other
    return best.with_reason("kernels", both)


def product_gain(spec: ModelSpec) -> float | None:
    """How many times as fast this file's products are with the kernels; None if not measured."""
    theirs = ours = 0.0
    shares = _shares(spec)
    for kind in _deciding(spec):
        times = stored_product(kind)
        if times is None:
            return None
        theirs += shares[kind] * sum(pair[0] for pair in times.values())
        ours += shares[kind] * sum(pair[1] for pair in times.values())
    return theirs / ours if ours else None


def stored_product(kind: str) -> Times | None:
    """What products of a type took on this device, or None."""
    found = cache.load(_KIND, _key(kind)) or {}
    try:
        return {tokens: (float(a), float(b)) for tokens, (a, b) in found["ms"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _key(kind: str) -> str:
    return f"{host.device_key()} | {kernels_key()} | {kind}"


def _shares(spec: ModelSpec) -> dict[str, float]:
    """Bytes by type, of weights that steps multiply by, as shares of all of them."""
    nbytes: dict[str, int] = {}
    for tensor in multiplied_tensors(spec):
        nbytes[tensor.type.name] = nbytes.get(tensor.type.name, 0) + tensor.data_bytes
    total = sum(nbytes.values())
    return {kind: size / total for kind, size in nbytes.items()}


def _deciding(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Columns and rows of the largest matrix of each type that counts and has a kernel."""
    shares, largest = _shares(spec), dict[str, tuple[int, int]]()
    for tensor in multiplied_tensors(spec):
        columns, rows = (*tensor.dims, 1)[:2]
        kind = tensor.type.name
        if shares[kind] < _LEAST_SHARE or not packed_bytes(GGML_NUMBERS[kind], rows, columns):
            continue
        if columns * rows > largest.get(kind, (0, 0))[0] * largest.get(kind, (0, 0))[1]:
            largest[kind] = columns, rows
    return largest


def _measured(kind: str, shape: tuple[int, int]) -> Times:
    from edgespec.backends.llama.kernels import product_ms

    return {str(n): product_ms(GGML_NUMBERS[kind], shape, n) for n in _TOKENS}
