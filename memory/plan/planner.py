"""The planner: one budget in, one joint plan out.

Made from the file's metadata, the device and what was measured
earlier, so it costs milliseconds and loads nothing. The search is small on purpose:

1. settings that change what is computed (KV type, drafter) come from the request; as many layers as
   fit go to a GPU (`placing`)
2. context and drafts climb one ladder, as far as memory allows (`ladder`, `drafts`)
3. what is left goes to the prompt's batch (`batch`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from edgespec.memory.bytes.footprint import Component
from edgespec.memory.plan.batch import batch_of
from edgespec.memory.plan.drafts import Drafts
from edgespec.memory.plan.ladder import Ladder
from edgespec.memory.plan.layout import Layout, Sharing, snapshots_of
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.placing import (
    device_of,
    kernels_of,
    kv_types,
    mapping_of,
    with_exact_cache,
    with_layers_placed,
    with_smaller_cache,
)
from edgespec.memory.plan.plan import Alternative, Goal, Part, Plan
from edgespec.memory.plan.request import Choice, Request, drafter_of, threads_of, users_of
from edgespec.memory.plan.settings import Settings, settings_of
from edgespec.memory.plan.sharing import parts_of, with_cells_for_all
from edgespec.memory.times.speed import SpeedModel
from edgespec.models.spec import ModelSpec

_WORTH_TELLING = 1.02
_MEBIBYTE = 1 << 20


def make_plan(
    spec: ModelSpec,
    request: Request,
    machine: Machine,
    speed_of: Callable[[Settings], SpeedModel],
    *,
    drafter_bytes: int = 0,
    draft_spec: ModelSpec | None = None,
    switch_spec: ModelSpec | None = None,
    max_step_of: Callable[[Settings], int | None] = lambda _settings: None,
    kv_losses: Mapping[str, float] | None = None,
) -> Plan:
    """Choose all settings of a run.

    Args:
        speed_of: predicts decoding speed under some settings.
        drafter_bytes: ceiling of the drafter's tables.
        draft_spec: a model that drafts.
        switch_spec: a smaller model that takes turns with this one.
        max_step_of: most nodes a step may have (`--exact`: those that round alike), if known.
        kv_losses: KL divergence that cache types cause, as far as it was measured.

    Raises:
        UnsupportedError: an option is not possible with this model.
        DoesNotFitError: nothing that was asked for fits; says what would.
    """
    specs = (spec,) if switch_spec is None else (spec, switch_spec)
    kv_type_k, kv_type_v, kv_type = kv_types(request, specs)
    threads, drafter = threads_of(request), drafter_of(spec, request)
    users = users_of(specs, request)
    drafts = drafter.value != "none"
    layout = Layout(
        spec,
        machine,
        request,
        int(threads.value),
        kv_type_k,
        kv_type_v,
        str(drafter.value),
        drafter_bytes=drafter_bytes if drafts else 0,
        draft_spec=draft_spec if drafts else None,
        switch_spec=switch_spec,
        sharing=Sharing(int(users.value)),
    )
    layout, gpu_layers = with_layers_placed(layout)
    layout, kv_type = with_exact_cache(layout, kv_type)
    layout, kv_type = with_smaller_cache(layout, kv_type, kv_losses or {})
    choices = [kv_type, threads, drafter, *_draft_model(layout), gpu_layers, device_of(layout)]
    choices.append(kernels_of(layout))
    choices += [users] if request.users != 1 else []
    settings, known = settings_of(layout), cache(speed_of)

    def speed_with(draft_max: int) -> SpeedModel:
        return known(replace(settings, snapshots=snapshots_of(spec, draft_max)))

    return _sized(layout, Drafts(layout, speed_with, max_step_of(settings)), choices)


def _draft_model(layout: Layout) -> Iterator[Choice]:
    if layout.draft_spec is not None:
        yield Choice("draft_model", layout.draft_spec.path.name, "as asked")


def _sized(layout: Layout, drafts: Drafts, choices: Sequence[Choice]) -> Plan:
    """The plan of a layout: its context, drafts and batch, as large as memory allows."""
    ladder = Ladder(layout, drafts.sizes)
    context, draft_max = ladder.climb()
    batch = batch_of(layout, context, draft_max)
    sizes = [ladder.choice(context, draft_max), *drafts.choices(draft_max), batch]
    batch_size = max(int(batch.value), layout.max_nodes(draft_max))
    alternatives = _alternatives(ladder, drafts, context, batch_size, draft_max)
    if layout.users > 1:
        alternatives = iter(())  # these are of one user's context
        layout, cells = with_cells_for_all(layout, context, batch_size, draft_max)
        sizes.append(cells)
    components = layout.footprint(context, batch_size, draft_max)
    return Plan(
        backend=layout.backend,
        device=layout.device,
        context_size=context,
        batch_size=batch_size,
        threads=layout.threads,
        kv_type_k=layout.kv_type_k,
        kv_type_v=layout.kv_type_v,
        gpu_layers=layout.gpu_layers,
        draft_max=draft_max,
        drafter=layout.drafter,
        draft_model=layout.draft_spec.path if layout.draft_spec else None,
        draft_mapped=layout.draft_mapped,
        switch=layout.switch_spec.path if layout.switch_spec else None,
        switch_mapped=layout.switch_mapped,
        exact=layout.exact,
        remember=layout.request.remember,
        mapped=layout.mapped,
        kernels=layout.kernels,
        choices=(*choices, *sizes, mapping_of(layout)),
        components=components,
        limit_bytes=layout.limit_bytes,
        available_bytes=layout.machine.free_bytes,
        plain_tokens_per_s=drafts.tokens_per_s(0),
        tokens_per_s=drafts.tokens_per_s(draft_max),
        goal=_goal(layout, drafts),
        speed_source=drafts.speed_of(draft_max).source,
        alternatives=tuple(alternatives),
        users=layout.users,
        cells=layout.cells(context),
        parts=_parts(layout, context, components, drafts.speed_of(draft_max)),
        latency=layout.request.latency,
        shares=layout.shares,
        overrides=layout.overrides,
        snapshots=snapshots_of(layout.spec, draft_max),
        switch_snapshots=snapshots_of(layout.switch_spec, draft_max),
        projector=layout.projector.path if layout.projector else None,
        image_tokens=layout.image_tokens,
    )


def _parts(
    layout: Layout, context: int, components: Sequence[Component], speed: SpeedModel
) -> tuple[Part, ...]:
    if layout.users == 1:
        return ()
    cache_bytes = sum(part.nbytes for part in components if part.name.endswith("kv_cache"))
    return tuple(parts_of(layout, context, cache_bytes, speed))


def _goal(layout: Layout, drafts: Drafts) -> Goal:
    context = layout.contexts.longest
    draft_max = min(drafts.sizes[-1], context - 1)
    return Goal(context, draft_max, drafts.tokens_per_s(draft_max))


def _alternatives(
    ladder: Ladder, drafts: Drafts, context: int, batch_size: int, draft_max: int
) -> Iterator[Alternative]:
    """What a person could prefer: less memory, more context, more speed."""
    layout, contexts = ladder.layout, ladder.layout.contexts

    def alternative(name: str, options: str, context: int, draft_max: int) -> Alternative:
        batch_size = int(batch_of(layout, context, draft_max).value)
        nbytes = layout.nbytes(context, batch_size, draft_max)
        return Alternative(name, options, nbytes, context, drafts.tokens_per_s(draft_max))

    least = contexts.least
    smaller = alternative("smaller", f"--ctx {least} --draft-max 0", least, 0)
    if smaller.peak_bytes < layout.nbytes(context, batch_size, draft_max):
        yield smaller
    longest = ladder.longest_context(draft_max, contexts.trained)
    if longest > context:
        yield alternative("longer context", f"--ctx {longest}", longest, draft_max)
    if layout.request.budget_bytes and layout.request.draft_max is None:
        faster = alternative("faster", "", context, drafts.sizes[-1])
        gain = faster.tokens_per_s / drafts.tokens_per_s(draft_max)
        if gain > _WORTH_TELLING and faster.peak_bytes <= layout.machine.free_bytes:
            needed = -(-faster.peak_bytes // _MEBIBYTE)
            yield replace(faster, options=f"--budget {needed}MiB")
