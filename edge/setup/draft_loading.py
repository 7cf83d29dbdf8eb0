"""Draft models: opened for their target, and the times of their steps measured once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from edgespec.backends.base import Backend
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.early_exit import ExitBackend
from edgespec.backends.llama.head import Followed
from edgespec.backends.llama.head_files import open_head_file
from edgespec.drafting.drafters import HEAD
from edgespec.drafting.drafters.model import HeadDrafter, HeadText, ModelDrafter
from edgespec.measure.timing import (
    measure_curve,
    measure_depths,
    measured_while_busy,
    one_step,
    times_behind,
)
from edgespec.memory.device import host
from edgespec.memory.plan.plan import DRAFT_MODEL_BATCH, DRAFT_MODEL_NODES, Plan, draft_context
from edgespec.memory.plan.settings import Settings
from edgespec.memory.times.curve import CostCurve
from edgespec.models.exits.early_exit import gains_of, read_exit, read_made_for
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.stored import (
    draft_settings_of,
    head_settings_of,
    keep_curve,
    stored_curve,
)

_CURVE_SECONDS = 0.4
_TIMED_CONTEXT = 1024  # of draft models that are only timed


def load_draft_model(
    target: Backend, spec: ModelSpec, plan: Plan, report: Progress
) -> ModelDrafter | None:
    """The draft model of a plan, its steps measured."""
    if plan.draft_model is None or plan.draft_max == 0 or _has_head(plan):
        return None
    draft_spec = read_model_spec(plan.draft_model)
    chosen = draft_settings_of(plan, draft_spec)
    settings = _settings(plan, draft_spec, chosen, draft_context(draft_spec, plan.context_size))
    stored = stored_curve(draft_spec, chosen)
    with ExitStack() as opened:
        backend = opened.enter_context(closing(_open(draft_spec, spec, settings, report)))
        curve = _curve(backend, report, stored, target)
        if curve is not stored and backend.crowding == 1.0:
            keep_curve(draft_spec, chosen, curve, replaced=True)
        vocab_size = target.tokenizer.vocab_size
        early_exit = read_exit(draft_spec)
        readable = vocab_size if early_exit else backend.tokenizer.vocab_size
        drafter = ModelDrafter(backend, curve, vocab_size, readable, early_exit)
        opened.pop_all()
        return drafter


def load_head(target: Backend, spec: ModelSpec, plan: Plan, report: Progress) -> HeadDrafter | None:
    """The head of a plan, its steps measured; it is the target's to close."""
    if not _has_head(plan) or plan.draft_max == 0:
        return None
    assert isinstance(target, Followed)
    target.truncate(0)
    if plan.draft_model is None:
        head, chosen, made = target.open_head(), head_settings_of(plan), None
    else:
        spec, made = read_model_spec(plan.draft_model, heads=True), read_made_for(plan.draft_model)
        chosen = draft_settings_of(plan, spec)
        settings = _settings(plan, spec, chosen, plan.context_size)

        def progress(part: float) -> None:
            report("loading the head", part)

        head = target.open_head(partial(open_head_file, spec, settings, progress=progress))
    stored = stored_curve(spec, chosen)
    curve = _curve(head, report, stored, target)
    if curve is not stored and head.crowding == 1.0:
        keep_curve(spec, chosen, curve, replaced=True)
    promised = () if made is None else gains_of(made.report)
    return HeadDrafter(HeadText(head), curve, target.tokenizer.vocab_size, promised)


def _has_head(plan: Plan) -> bool:
    return HEAD in plan.drafter.split(",")


def _settings(plan: Plan, draft_spec: ModelSpec, chosen: Settings, context: int) -> LlamaSettings:
    return LlamaSettings(
        context_size=context,
        batch_size=DRAFT_MODEL_BATCH,
        max_nodes=DRAFT_MODEL_NODES,
        max_leaves=1,
        threads=chosen.threads,
        kv_type_k=chosen.kv_type_k,
        kv_type_v=chosen.kv_type_v,
        gpu_layers=chosen.gpu_layers,
        mapped=plan.draft_mapped,
        kernels=chosen.kernels,
        tied=draft_spec.tied_embeddings,
    )


def _open(
    draft_spec: ModelSpec, target: ModelSpec, settings: LlamaSettings, report: Progress
) -> LlamaBackend:
    return open_draft_model(
        draft_spec, target, settings, lambda part: report("loading the draft model", part)
    )


def _curve(
    backend: Backend,
    report: Progress,
    stored: CostCurve | None = None,
    target: Backend | None = None,
) -> CostCurve:
    """The times of a draft model's steps: what was stored, if it still holds.

    Behind steps of its `target`, if that is there.
    """

    def between() -> None:
        if target is not None:
            one_step(target, 1)

    if stored is not None and not measured_while_busy(backend, stored, between):
        return stored
    report("measuring step times", 0.0)
    curve = measure_curve(
        lambda nodes: one_step(backend, nodes), DRAFT_MODEL_NODES, seconds=_CURVE_SECONDS
    )
    measure_depths(backend, curve)
    if target is not None:
        curve = curve.scaled(times_behind(target, backend, curve))
    report("measuring step times", 1.0)
    return curve


def draft_step_ms(draft_spec: ModelSpec, target: ModelSpec, report: Progress) -> float:
    """Milliseconds that a draft model takes for a token on this device."""
    settings = LlamaSettings(
        context_size=_TIMED_CONTEXT,
        batch_size=DRAFT_MODEL_BATCH,
        max_nodes=DRAFT_MODEL_NODES,
        max_leaves=1,
        threads=host.usable_cores(),
    )
    with closing(_open(draft_spec, target, settings, report)) as backend:
        return _curve(backend, report).base[1]


def open_draft_model(
    draft_spec: ModelSpec,
    target: ModelSpec,
    settings: LlamaSettings,
    progress: Callable[[float], None] | None = None,
) -> LlamaBackend:
    """A draft model that reads the target's ids: a model with its vocabulary, or an early exit."""
    path = os.fspath(draft_spec.path)
    if read_exit(draft_spec) is None:
        return LlamaBackend(path, settings, progress=progress)
    return ExitBackend(path, settings, target, progress=progress)
