"""From a model file to an Engine: read, plan, load, measure what was not measured yet.

Draft models are opened for their target, and the times of their steps measured once.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any
from warnings import warn

from edgespec.backends.base import Backend, KeepsSnapshots, sequences_of
from edgespec.backends.llama.backend import LlamaBackend, LlamaSequence
from edgespec.backends.llama.early_exit import ExitBackend
from edgespec.backends.llama.head import BackendWithHead, RecurrentBackendWithHead, open_head_file
from edgespec.backends.llama.packed_weights import is_kept
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.backends.llama.window import Window
from edgespec.decode.engine import Engine
from edgespec.drafting import HEAD, MODEL, WINDOW, make_drafter
from edgespec.drafting.combined import CombinedDrafter, RoundHistory
from edgespec.drafting.constants import WINDOW_FIRST, WINDOW_LAST
from edgespec.drafting.model import (
    HeadDrafter,
    HeadText,
    ModelDrafter,
    WindowDrafter,
    WindowText,
    WritingDrafter,
)
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.drafting.translated import TranslatingDrafter, Translation
from edgespec.errors import DoesNotFitError, EdgespecWarning, UnsupportedError
from edgespec.measure.noise import largest_invariant_step, prefill_is_invariant, tested_depth
from edgespec.measure.timing import (
    contention_now,
    expect_slopes,
    measure_curve,
    one_step,
    snapshots_cost,
    some_tokens,
    times_behind,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device import host
from edgespec.memory.device.bandwidth import saw_step
from edgespec.memory.device.reservations import release
from edgespec.memory.plan.machine import reachable_bytes, reserve, reserve_unmapped
from edgespec.memory.plan.options import LLAMACPP, ONNX, LoadOptions, said_as_arguments
from edgespec.memory.plan.placing import keep_counts
from edgespec.memory.plan.plan import DRAFT_MODEL_NODES, Plan, Request, draft_config
from edgespec.memory.store import cache
from edgespec.memory.store.cells import PrefixStore
from edgespec.memory.store.texts import add_texts, remembered_texts
from edgespec.memory.times import CostCurve
from edgespec.models.chat import prepare_template
from edgespec.models.early_exit import gains_of, read_exit, read_made_for
from edgespec.models.embedded import embedded_model
from edgespec.models.heads import layers_to_read
from edgespec.models.hub.resolve import model_file
from edgespec.models.onnx.folder import read_model
from edgespec.models.pairing import is_translated
from edgespec.models.projector import read_projector
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, content_hash, read_model_spec
from edgespec.models.writing import reason
from edgespec.progress import Progress
from edgespec.setup import stored
from edgespec.setup.cache_types import know_cache_type, measure_smaller_types
from edgespec.setup.planning import make_run_plan, plan_or_say_what_fits, prepare_kernels
from edgespec.switching.engine import SwitchingEngine
from edgespec.switching.planning import SwitchPolicy, stored_switch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.memory.plan.options import LoadKeywords


_LOGGER = logging.getLogger("edgespec.setup")
# Together with warm-up and one large step too many these stay below two seconds.
_CURVE_SECONDS = 1.1
_TURNS = 4  # tokens of a mixture, so that a round reads more than a processor's caches have


def load(
    model: str | os.PathLike[str] | None = None,
    options: LoadOptions | None = None,
    *,
    switch_policy: SwitchPolicy | None = None,
    progress: Progress | None = None,
    **changes: Unpack[LoadKeywords],
) -> Engine:
    """Load a model: a GGUF file, or a folder that `edgespec models export` made.

    Args:
        model: path of it, or the name of one that is on this machine, such as "ollama:qwen3:4b" or
            "hf:OWNER/REPO"; None takes the embedded one of the `demo` extra.
        options: how to; the defaults of `LoadOptions` if None.
        switch_policy: which of two models writes when; None takes what was calibrated for the pair.
        progress: called while it works, with what it does and the part that is done.
        changes: fields of `LoadOptions`, in place of those of `options`.

    Raises:
        ModelNotFoundError, ModelFileError: no such file, or not a model.
        DoesNotFitError: what was asked for does not fit into the budget or free memory.
        UnsupportedError: an option cannot be honoured with this model.
        BackendError: llama.cpp failed, with its own words.
    """
    report = progress or (lambda _what, _fraction: None)
    asked = LoadOptions.of(options, **changes)
    with said_as_arguments():
        spec = _spec_of(model)
        chosen = plan_to_load(spec, Request.loading(asked), report)
        return load_plan(spec, chosen, progress=progress, switch_policy=switch_policy)


def plan(
    model: str | os.PathLike[str] | None = None,
    options: LoadOptions | None = None,
    **changes: Unpack[LoadKeywords],
) -> Plan:
    """What `load` would allocate and choose, and why; loads nothing.

    Arguments and errors as in `load`.
    """
    asked = LoadOptions.of(options, **changes)
    with said_as_arguments():
        return plan_or_say_what_fits(_spec_of(model), Request.loading(asked))


def _spec_of(model: str | os.PathLike[str] | None) -> ModelSpec:
    return read_model(embedded_model() if model is None else model_file(os.fspath(model)))


def plan_to_load(spec: ModelSpec, request: Request, report: Progress) -> Plan:
    """A plan that is loaded next: what it depends on is tried and timed first, once for a device.

    Its memory is reserved until the engine is closed or this process ends. Where another program
    was quicker, the plan is made anew with what is left. Raises as `make_run_plan`.
    """
    prepare_kernels(spec, request)
    may_be_smaller = request.prefer == "context" and not (request.asks_kv_type or request.exact)
    for _ in range(4):  # where other programs take what is free meanwhile
        plan = plan_or_say_what_fits(spec, request)
        while may_be_smaller and measure_smaller_types(spec, plan, report):
            plan = make_run_plan(spec, request)
        if reserve(plan):
            break
    else:
        raise _taken_meanwhile(plan)
    return plan


def load_plan(
    spec: ModelSpec,
    plan: Plan,
    *,
    progress: Progress | None = None,
    switch_policy: SwitchPolicy | None = None,
) -> Engine:
    """Load exactly `plan`. Raises as `load`."""
    report = progress or (lambda _what, _fraction: None)
    if not reserve(plan):
        raise _taken_meanwhile(plan)
    _LOGGER.info(
        "loading %s: %s, %d tokens of context, %d threads, kernels %s, drafter %s",
        *(spec.path.name, plan.backend, plan.context_size, plan.threads),
        *("on" if plan.kernels else "off", plan.drafter),
    )
    if spec.chat_template is not None:
        prepare_template(spec.chat_template)
    with ExitStack() as failed:
        failed.callback(release)
        know_cache_type(spec, plan, report)
        engine = failed.enter_context(closing(_load(spec, plan, report, switch_policy)))
        stored.close_at_exit(engine)
        failed.pop_all()
    return engine


def _load(
    spec: ModelSpec, plan: Plan, report: Progress, switch_policy: SwitchPolicy | None
) -> Engine:
    """The model of a plan, or the two that take turns."""
    if plan.switch is None:
        return _load_one(spec, plan, report)
    small_spec = read_model_spec(plan.switch)
    found = stored_switch(spec, small_spec)
    policy = switch_policy or (found.policy if found is not None else SwitchPolicy())
    with ExitStack() as opened:
        small = opened.enter_context(closing(_load_one(small_spec, plan.of_small(), report)))
        make = partial(SwitchingEngine, small=small, policy=policy)
        engine = opened.enter_context(closing(_load_one(spec, plan, report, make)))
        opened.pop_all()
        return engine


def _load_one(
    spec: ModelSpec, plan: Plan, report: Progress, make: Callable[..., Engine] = Engine
) -> Engine:
    """One model of a plan."""
    key = stored.settings_key(spec, plan)
    if plan.projector is not None:  # cells may be of images
        file = read_projector(plan.projector).file
        key += f" | {content_hash([(file.path, file.file_bytes)])} {plan.image_tokens}"
    for path, scale in plan.lora:
        key += f" | {content_hash([(path, path.stat().st_size)])} at {scale}"
    with ExitStack() as stack:  # what is open when a later step fails
        draft = _open_beside(spec, plan, stack)
        backend = stack.enter_context(closing(_BACKENDS[plan.backend](spec, plan, report)))
        if draft is not None:  # no step is made beside a load, whose thread it would wait for
            wait([draft])
        max_nodes, reuses_cache = backend.max_nodes, True
        if plan.exact:
            max_nodes = largest_exact_step(backend, spec, plan, report)
            reuses_cache = prefill_is_exact(backend, spec, plan, max_nodes)
        if backend.capabilities.rollback:
            # Takes what it needs now, not in mid-answer; one token alone wakes the fewest experts.
            alike = backend.max_nodes * some_tokens(backend, 1)
            one_step(backend, backend.max_nodes, alike)
        curve, plain_key = None, stored.plain_key(spec, plan)
        if plan.drafter != "none":
            curve = _curve(backend, spec, plan, report)
        elif not (stored.stored_curve(spec, plan) or stored.curve_at(plain_key)):
            # For plans, once, where a run without drafts comes first: a step over one token.
            report("measuring step times", 0.0)
            contention_now(backend)
            plain = _measured(backend, spec, plan, 1)
            stored.keep_curve(plain_key, plain.uncontended(backend.contention), replaced=True)
            report("measuring step times", 1.0)
        models: Sequence[WritingDrafter] = ()
        cost, vocab_size = 1.0, backend.tokenizer.vocab_size
        if curve is not None:
            if isinstance(backend, KeepsSnapshots):
                known = stored.stored_snapshot_costs(spec, plan).get(plan.snapshots)
                if known is None:  # measured in turns: whoever computes beside both
                    known = snapshots_cost(backend, curve.base[1])
                    stored.keep_snapshot_cost(spec, plan, plan.snapshots, known)
                cost = known
            models = load_draft_model(backend, spec, plan, report, draft)
            if not models and WINDOW in plan.drafter.split(",") and plan.draft_max:
                texts = [one for one in sequences_of(backend) if isinstance(one, LlamaSequence)]
                windows = [Window(one, WINDOW_FIRST, WINDOW_LAST) for one in texts]
                models = [WindowDrafter(WindowText(one), curve, vocab_size) for one in windows]
        for model in models:
            stack.callback(model.close)
        backend.truncate(0)  # timed steps that were not taken back, of which a head missed some
        learning = Learning(spec, plan, curve, models, vocab_size)
        engine = make(
            backend,
            curve=curve,
            drafter=learning.drafter,
            more_drafters=learning.more_drafters,
            max_nodes=max_nodes,
            history=learning.history,
            chat_template=spec.chat_template,
            tool_template=spec.tool_template,
            reuses_cache=reuses_cache,
            is_exact=plan.exact,
            snapshots_cost=1.0 if plan.drafter_is_asked else cost,
            cache_key=f"{key} | exact" if plan.exact else key,
            spec=spec,
            on_close=partial(_close, learning, backend, spec, plan),
        )
        if plan.disk_cache_bytes and reuses_cache:
            _keep_prefixes(engine, spec, plan)
        engine.slots.release_threads()  # from measuring: whoever generates may be another thread
        if isinstance(backend, LlamaBackend):
            backend.write_packed()
            if plan.expert_bytes:  # of timed steps nobody would learn
                backend.count_experts()
        stack.pop_all()
        return engine


def _keep_prefixes(engine: Engine, spec: ModelSpec, plan: Plan) -> None:
    """Keep what the cache holds on disk, where it can be written to."""
    try:
        store = PrefixStore(engine.cache_key, spec.path.name, plan.disk_cache_bytes)
    except OSError as problem:
        said = f"no prefixes are kept, {problem.filename} cannot be written: {reason(problem)}"
        warn(said, EdgespecWarning, stacklevel=2)
    else:
        engine.keep_prefixes(store)


def _close(learning: Learning, backend: Backend, spec: ModelSpec, plan: Plan) -> None:
    """Keep what a run has learned; its memory may be planned with again."""
    try:
        learning.keep()
        if plan.expert_bytes and isinstance(backend, LlamaBackend):
            counts = backend.expert_counts
            keep_counts(spec, [*counts.again], [*counts.first])
    finally:
        release()


def _llama_config(spec: ModelSpec, plan: Plan) -> RunConfig:
    """How llama.cpp loads the model of a plan."""
    read = layers_to_read(spec, plan.captured_layers)
    return replace(plan, tied=spec.tied_embeddings, captured_layers=read)


def _load_llamacpp(spec: ModelSpec, plan: Plan, report: Progress) -> Backend:
    config = _llama_config(spec, plan)
    has_head = HEAD in plan.drafter.split(",") and plan.draft_max > 0
    make: type[LlamaBackend] = BackendWithHead if has_head else LlamaBackend
    if plan.snapshots:
        make = RecurrentBackendWithHead if has_head else RecurrentBackend
    backend = make(spec.path, config, progress=lambda part: report("loading", part))
    if plan.packed_file:
        try:  # packed weights that are pages of a file are not reserved
            if backend.keeps_packed():
                reserve_unmapped(plan)
        except OSError as problem:
            place = cache.cache_directory()
            said = f"packed weights are not kept, {place} cannot be written: {reason(problem)}"
            warn(said, EdgespecWarning, stacklevel=2)
    return backend


def _load_onnx(spec: ModelSpec, plan: Plan, report: Progress) -> Backend:
    from edgespec.backends.ort.backend import OrtBackend
    from edgespec.backends.ort.cache import converted
    from edgespec.backends.ort.providers import choose, graphs_for
    from edgespec.models.onnx.facts import read_facts

    place = choose(plan.device)
    if spec.format == ONNX_FORMAT:
        return OrtBackend(spec, None, spec.path, plan, place)
    facts = read_facts(spec)
    folder = converted(
        spec,
        cache.cache_directory() / "onnx",
        host.cpu_name(),
        lambda fraction: report("converting for ONNX Runtime (once)", fraction),
        graphs_for(place, plan.context_size),
    )
    return OrtBackend(spec, facts, folder, plan, place)


# Adding a backend is a function and a line here.
_BACKENDS = {LLAMACPP: _load_llamacpp, ONNX: _load_onnx}


def _taken_meanwhile(plan: Plan) -> DoesNotFitError:
    """The error where other programs take memory faster than plans are made."""
    return DoesNotFitError(
        f"the plan needs {plan.predicted_peak_bytes >> 20} MiB, but only "
        f"{reachable_bytes() >> 20} MiB are free any more",
        hint="start it again: the plan will be made for what is free now",
    )


def _curve(backend: Backend, spec: ModelSpec, plan: Plan, report: Progress) -> CostCurve:
    """The stored curve, or a measurement of two to three seconds.

    A slow model leaves some sizes unmeasured: a later load goes on with those where they are many,
    and answers tell of others. How much longer steps take at depth is what is likely of the model,
    until answers tell. A curve that was measured beside other programs is kept without what these
    explain, and measured again by the first load that has all threads.
    """
    kept = stored.stored_curve(spec, plan)
    known = None if kept is None else kept.resized(backend.max_nodes)
    is_whole = known is not None and _is_whole(known)
    if known is not None and is_whole and known.contention == 1.0:
        return known
    report("measuring step times", 0.0)
    contention = contention_now(backend)
    if known is not None and contention < known.contention:
        kept = known = None
    elif known is not None and (is_whole or contention > known.contention):
        report("measuring step times", 1.0)
        return known
    known_now = None if known is None else known.contended(contention)
    curve = _measured(backend, spec, plan, backend.max_nodes, known_now)
    if known is None:
        expect_slopes(curve, spec)
    report("measuring step times", 1.0)
    if known is not None and backend.contention != contention:
        return known  # others began or ended in the middle of it
    curve = curve.uncontended(backend.contention)
    stored.keep_curve(stored.curve_key(spec, plan), curve, replaced=kept is None)
    if curve.contention == 1.0 and plan.backend == LLAMACPP and not plan.devices:
        saw_step(spec.bytes_per_token, curve.base[1] / 1e3)
    return curve


def _measured(
    backend: Backend, spec: ModelSpec, plan: Plan, max_nodes: int, known: CostCurve | None = None
) -> CostCurve:
    """Step times, without what steps wait for experts to be read, which plans add.

    The same token again and again wakes the same experts, which the processor's caches keep more of
    than of those of a text. So each step of a mixture has other tokens than the last one: of as
    many as memory has the experts of, and as make a round longer than any cache.
    """
    token_bytes = spec.expert_bytes * spec.num_experts_used // max(1, spec.num_experts)
    most = (plan.expert_bytes or spec.expert_bytes) // max(1, token_bytes)
    turns = itertools.cycle(range(max(1, min(_TURNS, most))))

    def step(nodes: int) -> None:
        one_step(backend, nodes, some_tokens(backend, nodes, next(turns)))

    def computing_s() -> float:
        assert isinstance(backend, LlamaBackend)
        return perf_counter() - int(backend.expert_counts.waited_ns) / 1e9 / plan.threads

    if plan.expert_bytes:
        for _ in range(_TURNS):  # experts are read
            step(1)
    clock = computing_s if plan.expert_bytes else perf_counter
    return measure_curve(step, max_nodes, seconds=_CURVE_SECONDS, known=known, clock=clock)


def _is_whole(curve: CostCurve) -> bool:
    """Whether one of its largest sizes was measured, and of others one for each four times as many.

    A load of Qwen2.5 1.5B has time for 1, 2, 3, 4, 8 and 32 nodes (two cores of a Xeon). The line
    from 8 to 32 is 2% off what 16 take, 11% for 12 and 27% for 20, and 16% for 35, which are the
    most for four users.
    """
    sizes = [size for size, ms in enumerate(curve.base) if size and ms < float("inf")]
    has_largest = max(sizes, default=0) >= 0.9 * (len(curve.base) - 1)
    return has_largest and all(b <= 4 * a for a, b in itertools.pairwise(sizes))


def largest_exact_step(
    backend: Backend, spec: ModelSpec, config: RunConfig, report: Progress
) -> int:
    """Nodes a step of `--exact` may have, so that it rounds as one-token steps do.

    Measured where no plan before had steps as large and a cache as deep. Raises UnsupportedError
    where no step of several tokens rounds alike.
    """
    largest, depth = backend.max_nodes, tested_depth(backend)
    if largest == 1:
        return 1
    known = [
        size
        for (tried, deep), size in stored.compared(spec, config, stored.STEPS).items()
        if deep >= depth and (tried >= largest or size < tried)
    ]
    if not known:
        told = "checking that batches round like single tokens"
        known = [largest_invariant_step(backend, progress=lambda part: report(told, part))]
        stored.keep_compared(spec, config, stored.STEPS, (largest, depth), known[0])
    size = min(known)
    if size == 1:
        raise UnsupportedError(
            "--exact is not possible: logits of this file change with the number of tokens in a "
            "step, on this device",
            hint="Q4_0, Q4_1 and Q8_0 files are batch-invariant on CPUs; or leave out --exact",
        )
    return min(size, largest)  # an earlier plan may have had larger steps


def prefill_is_exact(backend: Backend, spec: ModelSpec, config: RunConfig, step: int) -> bool:
    """Whether a conversation may keep its cache; where it may not, every turn is prefilled again.

    `step` is the most nodes of a step.
    """
    sizes = backend.batch_size, step, tested_depth(backend)
    known = stored.compared(spec, config, stored.PREFILLS).get(sizes)
    if known is None:
        known = prefill_is_invariant(backend, step)
        stored.keep_compared(spec, config, stored.PREFILLS, sizes, known)
    return bool(known)


class Learning:
    """One load of a model, from what earlier runs counted to what this one adds.

    Args:
        curve: step times, which the run goes on learning; None: there are no drafts.
        models: the opened draft model or head of the plan if there is one, or what each user has.
        vocab_size: of the model; a damaged text may have tokens that it does not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        curve: CostCurve | None,
        models: Sequence[WritingDrafter],
        vocab_size: int,
    ) -> None:
        self.more_drafters: list[CombinedDrafter] = []  # of further users
        self._spec, self._plan, self._curve = spec, plan, curve
        self._began_s = time()
        self._draft_spec: ModelSpec | None = None
        if plan.draft_model is not None:
            self._draft_spec = read_model_spec(plan.draft_model, heads=True)
        # A plan whose steps have no room for drafts loads no draft model.
        names = plan.drafter if models else plan.of_small().drafter
        mine, others = (models[0], models[1:]) if models else (None, ())
        self.drafter = drafter = make_drafter(names, mine) if curve is not None else None
        if plan.remember and self._suffix is None:
            said = "nothing is remembered: texts are kept for the suffix drafter, which is not used"
            warn(said, EdgespecWarning, stacklevel=2)
        if drafter is None:
            self.history = RoundHistory()
            return
        self.history = stored.stored_history(spec, names)
        learned: dict[str, Any] = {}
        if models:
            learned = stored.stored_learned(spec, plan, self._draft_spec)
        drafter.load_state({**stored.stored_calibration(spec), MODEL: learned, HEAD: learned})
        more: Sequence[WritingDrafter | None] = others or [None] * (plan.users - 1)
        made = (make_drafter(names, one) for one in more)
        self.more_drafters = [one for one in made if one is not None]
        for one in self.more_drafters:
            one.share_with(drafter)
        texts = remembered_texts(spec.fingerprint) if plan.remember else []
        drafter.recall([one for one in texts if max(one[1], default=0) < vocab_size])

    @property
    def _suffix(self) -> SuffixDrafter | None:
        """The suffix drafter, whose index has the texts of all users, if there is one."""
        found = self.drafter.member(SuffixDrafter.name) if self.drafter is not None else None
        return found if isinstance(found, SuffixDrafter) else None

    def keep(self) -> None:
        """Add what the run has learned to what is stored now, and free the draft model."""
        spec, plan, drafter = self._spec, self._plan, self.drafter
        try:
            # Steps that read experts are slower than what a plan adds reading to.
            if self._curve is not None and not plan.expert_bytes:
                stored.learn_curve(spec, plan, self._curve)
            if drafter is None:
                return
            state = drafter.state()
            stored.keep_calibration(spec, state)
            if plan.remember and self._suffix is not None:
                add_texts(spec.fingerprint, spec.path.name, self._suffix.written())
            for name in state.keys() & {MODEL, HEAD}:
                stored.keep_learned(spec, plan, self._draft_spec, state[name], self._began_s)
            if plan.draft_max:  # rounds that could not draft say nothing about others
                stored.keep_rounds(spec, drafter.name, self.history.rounds())
        finally:
            if drafter is not None:
                drafter.close()


def _open_beside(spec: ModelSpec, plan: Plan, opened: ExitStack) -> Future[LlamaBackend] | None:
    """The draft model of a plan, read while its target is; None where it is loaded behind that.

    Of weights that are mapped little is read: a load is one thread that fills tables of a
    vocabulary. A target that is packed first has all threads, and gets its memory first. `opened`
    closes what was read.
    """
    path = plan.draft_model
    is_model = path is not None and HEAD not in plan.drafter.split(",") and plan.draft_max > 0
    is_mapped = plan.packed_file and is_kept(spec.path, _llama_config(spec, plan))
    if path is None or not (is_model and is_mapped):
        return None
    draft_spec = read_model_spec(path, heads=True)
    config = draft_config(plan, draft_spec, spec, mapped=plan.draft_mapped)
    thread = ThreadPoolExecutor(1, "edgespec-draft")
    opening = thread.submit(open_draft_model, draft_spec, spec, config)
    thread.shutdown(wait=False)

    def close() -> None:
        if opening.exception() is None:
            opening.result().close()

    opened.callback(close)
    return opening


def load_draft_model(
    target: Backend,
    spec: ModelSpec,
    plan: Plan,
    report: Progress,
    opening: Future[LlamaBackend] | None = None,
) -> Sequence[WritingDrafter]:
    """The draft model or head of a plan, its steps measured; a head is the target's to close.

    What drafts for each user: all of them with one model, whose cache has a sequence for each. It
    may be `opening` already.
    """
    is_head, path = HEAD in plan.drafter.split(","), plan.draft_model
    if plan.draft_max == 0 or not (is_head or path is not None):
        return ()
    vocab_size = target.tokenizer.vocab_size
    told = "loading the head" if is_head else "loading the draft model"

    def progress(part: float) -> None:
        report(told, part)

    def measured(backend: Backend, draft_spec: ModelSpec | None) -> CostCurve:
        key = stored.draft_key(spec, plan, draft_spec)
        kept = stored.curve_at(key)
        curve = _draft_curve(backend, report, kept, target, draft_spec)
        if curve is not kept:
            stored.keep_curve(key, curve, replaced=True)
        return curve

    if path is None:
        assert isinstance(target, BackendWithHead)
        head = target.open_head()
        curve = measured(head, None)
        return (HeadDrafter(HeadText(head), curve, vocab_size),)
    draft_spec = read_model_spec(path, heads=True)
    config = draft_config(plan, draft_spec, spec, mapped=plan.draft_mapped)
    if is_head:
        assert isinstance(target, BackendWithHead)
        head = target.open_head(partial(open_head_file, draft_spec, config, progress=progress))
        made = read_made_for(path)
        promised = () if made is None else gains_of(made.report)
        curve = measured(head, draft_spec)
        return (HeadDrafter(HeadText(head), curve, vocab_size, promised),)
    with ExitStack() as opened:
        backend = opened.enter_context(
            closing(
                open_draft_model(draft_spec, spec, config, progress)
                if opening is None
                else opening.result()
            )
        )
        curve, early_exit = measured(backend, draft_spec), read_exit(draft_spec)
        backend.write_packed()
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


def _draft_curve(
    backend: Backend,
    report: Progress,
    kept: CostCurve | None,
    target: Backend,
    spec: ModelSpec | None,
) -> CostCurve:
    """The times of a draft model's steps behind those of its `target`; `kept` ones if they hold."""
    if kept is not None and kept.contention <= backend.contention:
        return kept
    report("measuring step times", 0.0)
    curve = measure_curve(lambda nodes: one_step(backend, nodes), DRAFT_MODEL_NODES, seconds=0.4)
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
