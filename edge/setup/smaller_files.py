"""Files that fit where a model does not: smaller ones of it on this machine, or one to be made.

Only for people, as headers of other files are read and planned with: `make_run_plan` itself refuses
in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from shlex import quote

from edgespec.errors import DoesNotFitError, EdgespecError
from edgespec.memory.bytes.config import MEBIBYTE
from edgespec.memory.bytes.simulation import simulating
from edgespec.memory.plan.machine import Machine, this_machine
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import LEAST_CONTEXT, Request
from edgespec.models.hub.caches import local_models
from edgespec.models.spec import GGUF_FORMAT, ModelSpec, read_model_spec
from edgespec.setup.planning import make_run_plan

_MOST_READ = 12  # headers, of a few to a hundred milliseconds each
_LEAST_BITS = 2.8  # of a weight that `quantize fit` gets down to: Q2_K has 2.6, and heads more
_MARGIN = 0.98  # of the bytes that are left: other types may be copied, and these are not planned


def plan_or_say_what_fits(
    spec: ModelSpec, request: Request, machine: Machine | None = None
) -> Plan:
    """As `make_run_plan`; what does not fit is refused with files that would."""
    with simulating():
        try:
            return make_run_plan(spec, request, machine)
        except DoesNotFitError as problem:
            if spec.format != GGUF_FORMAT or request.draft_model or request.switch:
                raise
            machine = machine or this_machine(request.workers)
            ways = [*_files_that_fit(spec, request, machine), *_to_be_made(spec, request, machine)]
            if not ways:
                raise
            others = [problem.hint] if "smaller model file" not in problem.hint else []
            raise DoesNotFitError(str(problem), hint="; ".join([*others, *ways])) from None


def _files_that_fit(spec: ModelSpec, request: Request, machine: Machine) -> Iterator[str]:
    """The largest smaller file of this model, beside it or in a cache, that does fit."""
    beside = {one: str(one) for one in spec.path.parent.glob("*.gguf")}
    known = {**{one.path: one.name for one in local_models()}, **beside}
    sizes = {path: path.stat().st_size for path in known if path.exists()}
    smaller = [path for path, size in sizes.items() if size < spec.file_bytes]
    for path in sorted(smaller, key=lambda one: -sizes[one])[:_MOST_READ]:
        with suppress(EdgespecError, OSError):
            other = read_model_spec(path)
            if _is_same_model(spec, other):
                plan = make_run_plan(other, request, machine)
                takes = -(-(plan.predicted_peak_bytes + plan.predicted_gpu_bytes) // MEBIBYTE)
                yield f"`{_shown(spec, path, known[path])}` ({other.file_type}) fits in {takes} MiB"
                return


def _is_same_model(spec: ModelSpec, other: ModelSpec) -> bool:
    """Whether two files have the same network and tokens; whose training, names alone say."""

    def shape(one: ModelSpec) -> tuple[object, ...]:
        return one.arch, one.num_layers, one.embedding_size, one.tokenizer_hash, one.name

    return shape(spec) == shape(other) and other.weight_bytes < spec.weight_bytes


def _shown(spec: ModelSpec, path: Path, name: str) -> str:
    """What to type for a file: beside the other one as that was named."""
    return str(spec.path.with_name(path.name)) if path.parent == spec.path.parent else name


def _to_be_made(spec: ModelSpec, request: Request, machine: Machine) -> Iterator[str]:
    """The file that `quantize fit` would make, if its types get so small."""
    least = replace(
        request,
        budget_bytes=None,
        context_size=request.context_size or max(LEAST_CONTEXT, request.prompt_tokens),
        draft_max=0 if request.draft_max is None else request.draft_max,
    )
    with suppress(EdgespecError):
        needed = make_run_plan(spec, least, replace(machine, free_bytes=1 << 60))
        limit = min(machine.free_bytes, request.budget_bytes or machine.free_bytes)
        left = spec.file_bytes - (needed.predicted_peak_bytes - limit)
        size = int(_MARGIN * left) // MEBIBYTE
        weights = sum(prod(tensor.dims) for tensor in spec.tensors.values())
        if size * MEBIBYTE >= weights * _LEAST_BITS / 8 and left < spec.file_bytes:
            made = f"{spec.path.stem}-{size}MiB.gguf"
            names = f"{quote(str(spec.path))} {quote(made)}"
            yield f"`edgespec quantize fit {names} {size}MiB` makes one that fits"
