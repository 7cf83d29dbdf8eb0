"""From a model file to an Engine: read, plan, load, measure what was not measured yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.backends.base import Backend
from edgespec.backends.llama.backend import LlamaBackend, LlamaSettings
from edgespec.decode.engine import Engine
from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.measure.noise import largest_invariant_step, prefill_is_invariant, tested_depth
from edgespec.measure.timing import measure_depths, measure_reads, measured_while_busy, one_step
from edgespec.memory.device import device
from edgespec.memory.plan.plan import Plan, Settings, reachable_bytes
from edgespec.memory.plan.request import LLAMACPP, ONNX, Request
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve, measure_curve
from edgespec.models.embedded import embedded_model
from edgespec.models.onnx.folder import read_model
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec
from edgespec.progress import Progress
from edgespec.setup.draft_loading import load_draft_model
from edgespec.setup.learning import Learning
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import (
    KnownStep,
    keep_curve,
    keep_known_step,
    keep_prefill,
    keep_reads,
    known_prefill,
    known_step,
    settings_key,
    settings_of,
    stored_curve,
    stored_reads,
)
from edgespec.switching.engine import SwitchingEngine
from edgespec.switching.planning import stored
from edgespec.switching.policy import SwitchPolicy

# Together with warm-up and one large step too many these stay below two seconds.
_CURVE_SECONDS = 1.1


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    budget_bytes: int | None = None,
    prefer: str = "speed",
    backend: str = "auto",
    device: str = "auto",
    context_size: int | None = None,
    threads: int | None = None,
    kv_type: str | None = None,
    gpu_layers: int | None = None,
    drafter: str = "auto",
    draft_model: str | os.PathLike[str] | None = None,
    switch: str | os.PathLike[str] | None = None,
    switch_policy: SwitchPolicy | None = None,
    draft_max: int | None = None,
    exact: bool = False,
    remember: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """Load a model: a GGUF file, or a folder that `edgespec models export` made.

    Without a path it is the embedded one of the `demo` extra.

    Args:
        budget_bytes: most memory the whole process may take; None takes what is free.
        prefer: "speed", "context" or "quality": what a tight budget is spent on.
        backend: "auto", "llamacpp" or "onnx" (ONNX Runtime; converts the file on first use).
        device: "auto", "cpu", "gpu" or "npu"; with llama.cpp a GPU is what `gpu_layers` offloads
            to, an NPU is reached through ONNX Runtime alone.
        context_size: tokens of context; None lets the planner choose.
        threads: most CPU threads; None takes the physical cores this process may use. Steps take
            fewer while other programs compute.
        kv_type: f16, q8_0 or q4_0.
        gpu_layers: layers on the GPU; None takes all of them where llama.cpp has one.
        drafter: "auto", "none" or a list of `edgespec.drafting.drafters.NAMES`, such as
            "suffix,recycling".
        draft_model: a smaller GGUF model with the same vocabulary, or an early exit of this one,
            which with `drafter="auto"` is used unless measured times say that it does not pay.
        switch: a smaller GGUF model with the same vocabulary, which writes where it is sure: faster
            where the pair allows it, and lossy.
        switch_policy: which of the two writes when; None takes what was calibrated for the pair.
        draft_max: most tokens drafted at once.
        exact: only settings in which a token's logits do not depend on what else is in its step.
        remember: keep generated texts in the cache directory, to draft from them later.
        progress: called while it works.

    Raises:
        ModelNotFoundError, ModelFileError: no such file, or not a model.
        DoesNotFitError: what was asked for does not fit into the budget or free memory.
        UnsupportedError: an option cannot be honoured with this model.
        BackendError: llama.cpp failed, with its own words.
    """
    spec, chosen = _plan(
        model,
        budget_bytes=budget_bytes,
        prefer=prefer,
        backend=backend,
        device=device,
        context_size=context_size,
        threads=threads,
        kv_type=kv_type,
        gpu_layers=gpu_layers,
        drafter=drafter,
        draft_model=draft_model,
        switch=switch,
        draft_max=draft_max,
        exact=exact,
        remember=remember,
    )
    return load_plan(spec, chosen, progress=progress, switch_policy=switch_policy)


def plan(
    model: str | os.PathLike[str] | None = None,
    *,
    budget_bytes: int | None = None,
    prefer: str = "speed",
    backend: str = "auto",
    device: str = "auto",
    context_size: int | None = None,
    threads: int | None = None,
    kv_type: str | None = None,
    gpu_layers: int | None = None,
    drafter: str = "auto",
    draft_model: str | os.PathLike[str] | None = None,
    switch: str | os.PathLike[str] | None = None,
    draft_max: int | None = None,
    exact: bool = False,
) -> Plan:
    """What `load` would allocate and choose, and why; loads nothing.

    Arguments and errors as in `load`.
    """
    _, chosen = _plan(
        model,
        budget_bytes=budget_bytes,
        prefer=prefer,
        backend=backend,
        device=device,
        context_size=context_size,
        threads=threads,
        kv_type=kv_type,
        gpu_layers=gpu_layers,
        drafter=drafter,
        draft_model=draft_model,
        switch=switch,
        draft_max=draft_max,
        exact=exact,
    )
    return chosen


def _plan(
    model: str | os.PathLike[str] | None,
    *,
    draft_model: str | os.PathLike[str] | None,
    switch: str | os.PathLike[str] | None,
    **options: Any,
) -> tuple[ModelSpec, Plan]:
    spec = read_model(model if model is not None else embedded_model())
    draft = None if draft_model is None else Path(draft_model)
    small = None if switch is None else Path(switch)
    return spec, make_run_plan(spec, Request(draft_model=draft, switch=small, **options))


def load_plan(
    spec: ModelSpec,
    plan: Plan,
    *,
    progress: Progress | None = None,
    switch_policy: SwitchPolicy | None = None,
) -> Engine:
    """Load exactly `plan`. Raises as `load`."""
    report = progress or (lambda _what, _fraction: None)
    _require_memory(plan)
    if plan.switch is None:
        return _load_one(spec, plan, report)
    small_spec = read_model_spec(plan.switch)
    found = stored(spec, small_spec)
    policy = switch_policy or (found.policy if found is not None else SwitchPolicy())
    with ExitStack() as opened:
        small = opened.enter_context(closing(_load_one(small_spec, plan.of_small(), report)))
        make = partial(SwitchingEngine, small=small, policy=policy)
        engine = opened.enter_context(closing(_load_one(spec, plan, report, make)))
        assert isinstance(engine, SwitchingEngine)
        if engine.prices is not None:
            large, small_curve = engine.prices.large, engine.prices.small
            engine.prices = replace(
                engine.prices,
                large_reads=_reads(engine.backend, large, spec, plan, report),
                small_reads=_reads(small.backend, small_curve, small_spec, plan.of_small(), report),
            )
        opened.pop_all()
        return engine


def _reads(
    backend: Backend, curve: CostCurve, spec: ModelSpec, plan: Plan, report: Progress
) -> CostCurve:
    """What reading takes that a model has missed: stored, or measured now.

    As fast as the curve's steps are, which may have been measured at another moment.
    """
    found = stored_reads(spec, settings_of(plan))
    if found is None:
        report("measuring step times", 0.0)
        found = measure_reads(backend, curve)
        if backend.crowding == 1.0:
            keep_reads(spec, settings_of(plan), found)
        report("measuring step times", 1.0)
    reads = found.at_the_level_of(curve)
    reads.depth_ms, reads.depth_node_ms = curve.depth_ms, curve.depth_node_ms
    return reads


def _load_one(
    spec: ModelSpec, plan: Plan, report: Progress, make: Callable[..., Engine] = Engine
) -> Engine:
    """One model of a plan."""
    settings = settings_of(plan)
    key = settings_key(spec, settings)
    with ExitStack() as stack:  # what is open when a later step fails
        backend = stack.enter_context(closing(_BACKENDS[plan.backend](spec, plan, report)))
        max_nodes, reuses_cache = backend.max_nodes, True
        if plan.exact:
            max_nodes = _largest_exact_step(backend, spec, settings, report)
            reuses_cache = _prefill_is_exact(backend, spec, settings, max_nodes)
        if backend.capabilities.rollback:
            one_step(backend, backend.max_nodes)  # takes what it needs now, not in mid-answer
        curve = _curve(backend, spec, plan, report) if plan.drafter != "none" else None
        model = load_draft_model(backend, spec, plan, report) if curve is not None else None
        if model is not None:
            stack.callback(model.close)
        learning = Learning(spec, plan, curve, model, backend.tokenizer.vocab_size)
        engine = make(
            backend,
            curve=curve,
            drafter=learning.drafter,
            max_nodes=max_nodes,
            history=learning.history,
            chat_template=spec.chat_template,
            reuses_cache=reuses_cache,
            cache_key=f"{key} | exact" if plan.exact else key,
            on_close=learning.keep,
        )
        stack.pop_all()
        return engine


def _load_llamacpp(spec: ModelSpec, plan: Plan, report: Progress) -> Backend:
    settings = LlamaSettings(
        context_size=plan.context_size,
        batch_size=plan.batch_size,
        max_nodes=plan.draft_max + 1,
        # Suffix drafts are chains; what other drafters propose may branch anywhere.
        max_leaves=max(1, plan.draft_max) if plan.drafter != "suffix" else 1,
        threads=plan.threads,
        kv_type_k=plan.kv_type_k,
        kv_type_v=plan.kv_type_v,
        gpu_layers=plan.gpu_layers,
        mapped=plan.mapped,
    )
    return LlamaBackend(spec.path, settings, progress=lambda fraction: report("loading", fraction))


def _load_onnx(spec: ModelSpec, plan: Plan, report: Progress) -> Backend:
    from edgespec.backends.ort.backend import OrtBackend, OrtSettings
    from edgespec.backends.ort.cache import converted
    from edgespec.backends.ort.providers import choose, graphs_for
    from edgespec.models.onnx.facts import read_facts

    place = choose(plan.device)
    settings = OrtSettings(
        context_size=plan.context_size,
        batch_size=plan.batch_size,
        max_nodes=plan.draft_max + 1,
        threads=plan.threads,
        pads_single=plan.exact,
    )
    if spec.format == ONNX_FORMAT:
        return OrtBackend(spec, None, spec.path, settings, place)
    facts = read_facts(spec)
    folder = converted(
        spec,
        cache.cache_directory() / "onnx",
        device.cpu_name(),
        lambda fraction: report("converting for ONNX Runtime (once)", fraction),
        graphs_for(place, plan.context_size),
    )
    return OrtBackend(spec, facts, folder, settings, place)


# Adding a backend is a function and a line here.
_BACKENDS = {LLAMACPP: _load_llamacpp, ONNX: _load_onnx}


def _require_memory(plan: Plan) -> None:
    """Refuse cleanly where another process took the memory since the plan was made."""
    free = reachable_bytes()
    if plan.predicted_peak_bytes > free:
        raise DoesNotFitError(
            f"the plan needs {plan.predicted_peak_bytes >> 20} MiB, but only {free >> 20} MiB are "
            f"free any more",
            hint="start it again: the plan will be made for what is free now",
        )


def _curve(backend: Backend, spec: ModelSpec, plan: Plan, report: Progress) -> CostCurve:
    """The stored curve, or a measurement of two to three seconds.

    A slow model leaves some sizes unmeasured. Each later load goes on with those and, as long as
    there are some, with how much longer steps take at depth where that was not found.
    """
    settings = settings_of(plan)
    stored = stored_curve(spec, settings)
    if stored is not None and measured_while_busy(backend, stored):
        stored = None
    known = None if stored is None else stored.resized(backend.max_nodes)
    if known is not None and float("inf") not in known.base[1:]:
        return known
    report("measuring step times", 0.0)
    curve = measure_curve(
        lambda nodes: one_step(backend, nodes),
        backend.max_nodes,
        seconds=_CURVE_SECONDS,
        known=known,
    )
    if not curve.knows_depth:
        measure_depths(backend, curve)
    if backend.crowding > 1.0:  # of this moment: measured again by the next load
        return curve.crowded(1.0 / backend.crowding)
    keep_curve(spec, settings, curve, replaced=stored is None)
    report("measuring step times", 1.0)
    return curve


def _largest_exact_step(
    backend: Backend, spec: ModelSpec, settings: Settings, report: Progress
) -> int:
    """Nodes a step may have with `--exact`; measured once for these settings.

    Again where this plan has larger steps than were tried, or a context that goes deeper.
    """
    largest, depth = backend.max_nodes, tested_depth(backend)
    if largest == 1:
        return 1
    known = known_step(spec, settings)
    if known is None or known.depth < depth or not (known.is_limit or known.tried >= largest):
        size = largest_invariant_step(
            backend,
            progress=lambda part: report("checking that batches round like single tokens", part),
        )
        known = KnownStep(size, largest, depth)
        keep_known_step(spec, settings, known)
    if known.largest_step == 1:
        raise UnsupportedError(
            "--exact is not possible: logits of this file change with the number of tokens in a "
            "step, on this device",
            hint="Q4_0, Q4_1 and Q8_0 files are batch-invariant on CPUs; or leave out --exact",
        )
    return min(known.largest_step, largest)  # an earlier plan may have had larger steps


def _prefill_is_exact(backend: Backend, spec: ModelSpec, settings: Settings, step: int) -> bool:
    """Whether a conversation may keep its cache with `--exact`; measured once for these settings.

    Where it may not, every turn is prefilled again.
    """
    compared = [backend.batch_size, step, tested_depth(backend)]
    known = known_prefill(spec, settings, compared)
    if known is None:
        known = prefill_is_invariant(backend, step)
        keep_prefill(spec, settings, compared, known)
    return known
