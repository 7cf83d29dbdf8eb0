"""Draft models: opened for their target, and the times of their steps measured once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from edgespec.backends.base import Backend, sequences_of
from edgespec.backends.llama.backend import LlamaBackend, LlamaSequence
from edgespec.backends.llama.early_exit import ExitBackend
from edgespec.backends.llama.head import BackendWithHead
from edgespec.backends.llama.head_files import open_head_file
from edgespec.backends.llama.window import Window
from edgespec.drafting.constants import WINDOW_FIRST, WINDOW_LAST
from edgespec.drafting.drafters import HEAD, WINDOW
from edgespec.drafting.drafters.model import (
    HeadDrafter,
    HeadText,
    ModelDrafter,
    WindowDrafter,
    WindowText,
    WritingDrafter,
)
from edgespec.drafting.drafters.translated import TranslatingDrafter, Translation
from edgespec.measure.timing import (
    expect_slopes,
    measure_curve,
    measured_while_busy,
    one_step,
    times_behind,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import DRAFT_MODEL_NODES, Plan, draft_config
from edgespec.memory.times.curve import CostCurve
from edgespec.models.early_exit import gains_of, read_exit, read_made_for
from edgespec.models.pairing import is_translated
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.stored import curve_at, draft_key, keep_curve

_CURVE_SECONDS = 0.4


def load_draft_model(
    target: Backend, spec: ModelSpec, plan: Plan, report: Progress
) -> Sequence[WritingDrafter]:
    """The draft model or head of a plan, its steps measured; a head is the target's to close.

    What drafts for each user: all of them with one model, whose cache has a sequence for each.
    """
    is_head, path = HEAD in plan.drafter.split(","), plan.draft_model
    if plan.draft_max == 0 or not (is_head or path is not None):
        return ()
    vocab_size = target.tokenizer.vocab_size
    told = "loading the head" if is_head else "loading the draft model"

    def progress(part: float) -> None:
        report(told, part)

    def measured(backend: Backend, draft_spec: ModelSpec | None) -> CostCurve:
        key = draft_key(spec, plan, draft_spec)
        stored = curve_at(key)
        curve = _curve(backend, report, stored, target, draft_spec)
        if curve is not stored:
            keep_curve(key, curve, replaced=True)
        return curve

    if path is None:
        assert isinstance(target, BackendWithHead)
        target.truncate(0)
        head = target.open_head()
        curve = measured(head, None)
        return (HeadDrafter(HeadText(head), curve, vocab_size),)
    draft_spec = read_model_spec(path, heads=True)
    config = draft_config(plan, draft_spec, spec, mapped=plan.draft_mapped)
    if is_head:
        assert isinstance(target, BackendWithHead)
        target.truncate(0)
        head = target.open_head(partial(open_head_file, draft_spec, config, progress=progress))
        made = read_made_for(path)
        promised = () if made is None else gains_of(made.report)
        curve = measured(head, draft_spec)
        return (HeadDrafter(HeadText(head), curve, vocab_size, promised),)
    with ExitStack() as opened:
        backend = opened.enter_context(
            closing(open_draft_model(draft_spec, spec, config, progress))
        )
        curve, early_exit = measured(backend, draft_spec), read_exit(draft_spec)
        texts, drafters = sequences_of(backend), list[WritingDrafter]()
        if is_translated(spec, draft_spec):
            templates = spec.chat_template, draft_spec.chat_template
            translation = Translation(target.tokenizer, backend.tokenizer, *templates)
            drafters += (TranslatingDrafter(one, curve, translation) for one in texts)
        else:
            readable = vocab_size if early_exit else backend.tokenizer.vocab_size
            drafters += (
                ModelDrafter(one, curve, vocab_size, readable, early_exit) for one in texts
            )
        opened.pop_all()
        return drafters


def windows_of(target: Backend, plan: Plan, curve: CostCurve) -> list[WritingDrafter]:
    """The target drafting for itself in each sequence of its cache, if the plan says so."""
    if WINDOW not in plan.drafter.split(",") or not plan.draft_max:
        return []
    vocab_size = target.tokenizer.vocab_size
    texts = (
        WindowText(Window(one, WINDOW_FIRST, WINDOW_LAST))
        for one in sequences_of(target)
        if isinstance(one, LlamaSequence)
    )
    return [WindowDrafter(text, curve, vocab_size) for text in texts]


def _curve(
    backend: Backend,
    report: Progress,
    stored: CostCurve | None,
    target: Backend,
    spec: ModelSpec | None,
) -> CostCurve:
    """The times of a draft model's steps behind those of its `target`; stored ones if they hold."""
    holds = stored is not None and not measured_while_busy(
        backend, stored, lambda: one_step(target, 1)
    )
    if stored is not None and holds and stored.contention <= backend.contention:
        return stored
    report("measuring step times", 0.0)
    curve = measure_curve(
        lambda nodes: one_step(backend, nodes), DRAFT_MODEL_NODES, seconds=_CURVE_SECONDS
    )
    if spec is not None and spec.reads is None:
        expect_slopes(curve, spec)
    curve = curve.scaled(times_behind(target, backend, curve)).uncontended(backend.contention)
    report("measuring step times", 1.0)
    return curve


def open_draft_model(
    draft_spec: ModelSpec,
    target: ModelSpec,
    config: RunConfig,
    progress: Callable[[float], None] | None = None,
) -> LlamaBackend:
    """A draft model that reads the target's ids: a model with its vocabulary, or an early exit."""
    path = os.fspath(draft_spec.path)
    if read_exit(draft_spec) is None:
        return LlamaBackend(path, config, progress=progress)
    return ExitBackend(path, config, target, progress=progress)
