"""Whether a plan uses edgespec's matrix kernels: where they were measured to be faster.

Before a first load, products of a file's matrices are timed with them and with llama.cpp's own, a
few tenths of a second a type, once for a device. Later the whole steps of both count, where both
were loaded.

Imports no inference library; measuring does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from edgespec.memory.bytes.footprint import multiplied_tensors
from edgespec.memory.device import host
from edgespec.memory.device.kernels import kernels_key, missing_kernels, packed_bytes
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.memory.store import cache
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import ONNX_FORMAT, ModelSpec
from edgespec.progress import Progress
from edgespec.setup.stored import stored_curve

_KIND = "products"
# Plain steps, short drafts, and prompts, of which four tokens are read for each that is written.
_TOKENS = {1: 1.0, 4: 1.0, 64: 4 / 64}
_EXPERTS = " experts"  # behind the name of their type
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
            taken = _measured(kind, shape, spec.num_experts_used)
            cache.store(_KIND, _key(kind), {"ms": taken})
            report("timing matrix kernels", 1.0)


def best_kernels(spec: ModelSpec, request: Request, plan_of: Callable[[Request], Plan]) -> Plan:
    """The plan with the kernels that are faster, as far as anything was measured."""
    plan = plan_of(request)
    if request.kernels != "auto" or not plan.kernels:
        return plan
    own = replace(plan, kernels=False)
    curves = stored_curve(spec, own), stored_curve(spec, plan)
    if all(one is not None and one.contention == 1.0 for one in curves):
        other = plan_of(replace(request, kernels="off"))
        speeds = plan.tokens_per_s, other.tokens_per_s
        reason = "{:.1f} tokens/s predicted, {:.1f} with llama.cpp's".format(*speeds)
        return (plan if speeds[0] >= speeds[1] else other).with_reason("kernels", reason)
    gain = product_gain(spec)
    if gain is None:
        return plan
    if gain < _LEAST_GAIN:
        reason = "llama.cpp's own were as fast with this file's types, timed on this device"
        return plan_of(replace(request, kernels="off")).with_reason("kernels", reason)
    reason = "edgespec's own were faster than llama.cpp's with this file's types, timed here"
    return plan.with_reason("kernels", reason)


def product_gain(spec: ModelSpec) -> float | None:
    """How many times as fast this file's products are with the kernels; None if not measured."""
    theirs = ours = 0.0
    shares = _shares(spec)
    for kind in _deciding(spec):
        times = stored_product(kind)
        if times is None:
            return None
        for tokens, (their_ms, our_ms) in times.items():
            weight = shares[kind] * _TOKENS.get(int(tokens), 1.0)
            theirs += weight * their_ms
            ours += weight * our_ms
    return theirs / ours if ours else None


def stored_product(kind: str) -> Times | None:
    """What products of a type took on this device, or None."""
    found = cache.load(_KIND, _key(kind)) or {}
    try:
        return {str(int(n)): (float(a), float(b)) for n, (a, b) in found["ms"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _key(kind: str) -> str:
    return f"{host.device_key()} | {kernels_key()} | {kind}"


def _kind(tensor: GgufTensor) -> str:
    """What is timed apart: a type, and a type of experts."""
    return tensor.type.name + (_EXPERTS if len(tensor.dims) > 2 else "")


def _shares(spec: ModelSpec) -> dict[str, float]:
    """Bytes by kind, of weights that plain steps multiply by, as shares of all of them."""
    nbytes: dict[str, float] = {}
    for tensor in multiplied_tensors(spec):
        experts = tensor.dims[2] if len(tensor.dims) > 2 else 1
        size = tensor.data_bytes * min(1.0, max(1, spec.num_experts_used) / experts)
        nbytes[_kind(tensor)] = nbytes.get(_kind(tensor), 0.0) + size
    total = sum(nbytes.values())
    return {kind: size / total for kind, size in nbytes.items()}


def _deciding(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Dimensions of the largest matrix of each kind that counts and has a kernel."""
    shares, largest = _shares(spec), dict[str, tuple[int, ...]]()
    for tensor in multiplied_tensors(spec):
        dims, kind = tensor.dims if len(tensor.dims) > 1 else (*tensor.dims, 1), _kind(tensor)
        number = GGML_NUMBERS[tensor.type.name]
        if shares[kind] < _LEAST_SHARE or not packed_bytes(number, dims[1], dims[0]):
            continue
        if prod(dims) > prod(largest.get(kind, (0,))):
            largest[kind] = dims
    return largest


def _measured(kind: str, shape: tuple[int, ...], used: int) -> Times:
    from edgespec.backends.llama.kernels import product_ms

    number = GGML_NUMBERS[kind.removesuffix(_EXPERTS)]
    used = used if len(shape) > 2 else 0
    return {str(n): product_ms(number, shape, n, used) for n in _TOKENS}
