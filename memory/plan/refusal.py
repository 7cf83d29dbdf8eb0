"""Why a request does not fit, and what would: every way out is tried before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import kv_type_fits
from edgespec.memory.bytes.shape import WORKER
from edgespec.memory.plan.layout import Layout, largest_fitting, parts_on, smallest_batch
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.plan import component_bytes
from edgespec.memory.plan.request import CONTEXT_STEP

_MEBIBYTE = 1 << 20
_NAMED = 4  # components, the largest ones


def refusal(layout: Layout, context: int, batch: int, draft_max: int) -> DoesNotFitError:
    """The error for a request that does not fit with these sizes (tokens)."""
    parts = layout.footprint(context, batch, draft_max)
    shortage = next(layout.shortages(parts))
    if shortage.device:  # each memory stands for itself
        parts = tuple(parts_on(shortage.device, parts))
    else:
        parts = tuple(part for part in parts if not part.device.startswith(WORKER))
    largest = sorted(component_bytes(parts).items(), key=lambda item: -item[1])[:_NAMED]
    named = ", ".join(f"{name.replace('_', ' ')} {-(-size // _MEBIBYTE)}" for name, size in largest)
    total = -(-sum(part.nbytes for part in parts) // _MEBIBYTE)
    both = "" if layout.switch_spec is None else "two models and "
    return DoesNotFitError(
        f"needs {total} MiB for {both}{context} tokens of context ({named} MiB); "
        f"{shortage.where}: {shortage.there_bytes // _MEBIBYTE} MiB",
        hint="; ".join(_ways_out(layout, context, draft_max)) or "use a smaller model file",
    )


def _ways_out(layout: Layout, context: int, draft_max: int) -> Iterator[str]:
    """Options that help; a larger budget only where nothing else does."""
    others = list(_other_options(layout, context, draft_max))
    yield from others
    if reserved := layout.machine.reserved_bytes // _MEBIBYTE:
        yield f"other programs of edgespec have reserved {reserved} MiB: stop one"
    if not others and layout.request.budget_bytes:
        needed = layout.nbytes(context, smallest_batch(draft_max), draft_max)
        if needed <= layout.machine.free_bytes:
            yield f"`--budget {-(-needed // _MEBIBYTE)}MiB` is enough"


def _other_options(layout: Layout, context: int, draft_max: int) -> Iterator[str]:
    request, least = layout.request, smallest_batch(draft_max)
    alone = replace(layout, switch_spec=None)
    if layout.switch_spec is not None and alone.fits(context, least, draft_max):
        yield f"leaving out --switch: {layout.spec.path.name} alone fits"
    if draft_max and layout.fits(context, smallest_batch(0), 0):
        is_drafted = layout.draft_spec is not None
        yield "leaving out --draft-model" if is_drafted else "a smaller --draft-max"
    if fitting := _largest_fitting_context(layout, context, draft_max):
        yield f"`--ctx {fitting}` fits"
    may_change = request.kv_type in (None, "f16") and not request.exact
    if not may_change or layout.backend != LLAMACPP:
        return
    if all(kv_type_fits(spec, "q8_0") for spec in layout.specs):
        smaller = replace(layout, kv_type_k="q8_0", kv_type_v="q8_0")
        if fitting := _largest_fitting_context(smaller, context + 1, draft_max):
            yield f"`--kv-type q8_0 --ctx {fitting}` fits, at a small cost in quality"


def _largest_fitting_context(layout: Layout, below: int, draft_max: int) -> int:
    """Largest context under `below` that fits, in steps of 256; 0 if none.

    None that is too small for the prompt that was asked for.
    """
    batch, sizes = smallest_batch(draft_max), range(CONTEXT_STEP, below, CONTEXT_STEP)
    largest = largest_fitting(sizes, lambda size: layout.excess_bytes(size, batch, draft_max)) or 0
    return largest if largest >= layout.request.prompt_tokens else 0
