"""Why a request does not fit, and what would: every way out is tried before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import GPU, HOST, kv_type_fits
from edgespec.memory.plan.layout import Layout, smallest_batch
from edgespec.memory.plan.plan import component_bytes
from edgespec.memory.plan.request import CONTEXT_STEP, LLAMACPP, Request

_MEBIBYTE = 1 << 20
_NAMED = 4  # components, the largest ones


def refusal(layout: Layout, request: Request, context: int, batch: int) -> DoesNotFitError:
    """The error for a request that does not fit with these sizes (tokens)."""
    parts = layout.footprint(context, batch, request.draft_max or 0)
    shortage = layout.shortage(parts)
    assert shortage is not None
    where, there = shortage
    if where != "budget":  # then each memory stands for itself
        device_name = GPU if where.endswith("GPU") else HOST
        parts = tuple(part for part in parts if part.device == device_name)
    largest = sorted(component_bytes(parts).items(), key=lambda item: -item[1])[:_NAMED]
    named = ", ".join(f"{name.replace('_', ' ')} {-(-size // _MEBIBYTE)}" for name, size in largest)
    total = -(-sum(part.nbytes for part in parts) // _MEBIBYTE)
    both = "" if layout.switch_spec is None else "two models and "
    return DoesNotFitError(
        f"needs {total} MiB for {both}{context} tokens of context ({named} MiB); "
        f"{where}: {there // _MEBIBYTE} MiB",
        hint="; ".join(_ways_out(layout, request, context)) or "use a smaller model file",
    )


def _ways_out(layout: Layout, request: Request, context: int) -> Iterator[str]:
    """Options that help; a larger budget only where nothing else does."""
    others = list(_other_options(layout, request, context))
    yield from others
    if not others and request.budget_bytes:
        asked = request.draft_max or 0
        needed = layout.nbytes(context, smallest_batch(asked), asked)
        if needed <= layout.machine.free_bytes:
            yield f"`--budget {-(-needed // _MEBIBYTE)}MiB` is enough"


def _other_options(layout: Layout, request: Request, context: int) -> Iterator[str]:
    asked = request.draft_max or 0
    alone = replace(layout, switch_spec=None)
    if layout.switch_spec is not None and alone.fits(context, smallest_batch(asked), asked):
        yield f"leaving out --switch: {layout.spec.path.name} alone fits"
    if asked and layout.fits(context, smallest_batch(0), 0):
        is_drafted = layout.draft_spec is not None
        yield "leaving out --draft-model" if is_drafted else "a smaller --draft-max"
    if fitting := _largest_fitting_context(layout, request, context):
        yield f"`--ctx {fitting}` fits"
    may_change = request.kv_type in (None, "f16") and not request.exact
    if not may_change or layout.backend != LLAMACPP:
        return
    if all(kv_type_fits(spec, "q8_0") for spec in layout.specs):
        smaller = replace(layout, key_type="q8_0", value_type="q8_0")
        if fitting := _largest_fitting_context(smaller, request, context + 1):
            yield f"`--kv-type q8_0 --ctx {fitting}` fits, at a small cost in quality"


def _largest_fitting_context(layout: Layout, request: Request, below: int) -> int:
    """Largest context under `below` that fits, in steps of 256; 0 if none.

    None that is too small for the prompt that was asked for.
    """
    draft = request.draft_max or 0
    low, high = 0, (below - 1) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if layout.fits(middle * CONTEXT_STEP, smallest_batch(draft), draft):
            low = middle
        else:
            high = middle - 1
    fitting = low * CONTEXT_STEP
    return fitting if fitting >= request.prompt_tokens else 0
