"""The other models of a plan: one that drafts, or one that takes turns; what they take and bring.

Imports no inference library and no numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.drafting.drafters import HEAD, MODEL, drafter_names
from edgespec.drafting.proposal import MOST_DRAWN
from edgespec.errors import UnsupportedError
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Choice, Request
from edgespec.memory.plan.settings import Settings, settings_of
from edgespec.memory.times.curve import CostCurve
from edgespec.models.early_exit import read_exit
from edgespec.models.heads import DRAFTED, require_head
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.stored import stored_reads
from edgespec.switching.planning import check_switch, stored_switch, switch_reason
from edgespec.switching.policy import SwitchPrices

_F32, _F64 = 4, 8


def draft_spec_of(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The draft model that was named. Raises UnsupportedError if it cannot draft for this one."""
    names = () if request.drafter == "auto" else drafter_names(request.drafter)
    if HEAD in names and request.backend == ONNX:
        raise UnsupportedError(
            "ONNX Runtime runs no heads", hint="leave out --backend, or the drafter 'head'"
        )
    if request.draft_model is None:
        if HEAD in names:
            require_head(spec)
        if MODEL in names:
            raise UnsupportedError(
                "the drafter 'model' needs a draft model", hint="name one with --draft-model FILE"
            )
        return None
    draft_spec = read_model_spec(request.draft_model, heads=True)
    drafts_as = MODEL if draft_spec.reads is None else HEAD
    if names and drafts_as not in names:
        raise UnsupportedError(
            f"--draft-model is not used by --drafter {request.drafter}",
            hint=f"leave out one, or name the drafter '{drafts_as}'",
        )
    check_pair(spec, draft_spec)
    return draft_spec


def draft_rows_bytes(spec: ModelSpec, draft_spec: ModelSpec | None, names: str) -> int:
    """Bytes of the distributions of drawn nodes, and of the target's that they are held against."""
    if draft_spec is None and HEAD not in names.split(","):
        return 0
    distributions = MOST_DRAWN * spec.vocab_size * (_F32 + _F64)
    is_part = draft_spec and (DRAFTED in draft_spec.tensors or read_exit(draft_spec))
    spread = spec.vocab_size * _F32 if is_part else 0
    return distributions + spread


def switch_spec_of(spec: ModelSpec, request: Request) -> ModelSpec | None:
    """The smaller model that was named. Raises UnsupportedError if it cannot take turns."""
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


def with_switch(
    plan: Plan,
    spec: ModelSpec,
    small: ModelSpec,
    depth: int,
    curve_of: Callable[[ModelSpec, Settings], CostCurve],
) -> Plan:
    """The plan with what taking turns with a smaller model is expected to bring.

    `depth` counts the tokens in the cache where speed is predicted.
    """
    pair = (spec, settings_of(plan)), (small, settings_of(plan.of_small()))
    curves = [curve_of(*one) for one in pair]
    reads = [
        known and known.at_the_level_of(curve)
        for known, curve in zip((stored_reads(*one) for one in pair), curves, strict=True)
    ]
    prices = SwitchPrices(curves[0], curves[1], reads[0], reads[1])
    why, speed = switch_reason(stored_switch(spec, small), prices, depth, plan.tokens_per_s)
    choices = (*plan.choices, Choice("switch", small.path.name, why))
    return replace(plan, choices=choices, tokens_per_s=speed)
