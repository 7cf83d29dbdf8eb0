"""The planner: one budget in, one joint plan out.

Made from the file's metadata, the device and what was measured earlier, so it costs milliseconds
and loads nothing. The search is small on purpose:

1. settings that change what is computed (KV type, drafter) come from the request; as many layers as
   fit go to a GPU (`placing`)
2. context and drafts: the most that memory allows (`ContextSearch`, `Drafts`). A search and
   not an optimum for each budget, because more memory must never buy less context, a smaller draft
   or less speed
3. what is left goes to the prompt's batch, and where there are several users to the cells of all

Drafts may have sizes that are worth their memory, by predicted speed. Under a budget the largest is
the least that keeps 98% of the best predicted tokens/s (arXiv 2506.01986 calls it the lower bound
of memory that retains the speed-up). Of a model that keeps a state each draft takes one more
snapshot of it, and plain steps may take longer for these: there no drafts are one of the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.config import (
    CELL_PADDING,
    HOST,
    MEBIBYTE,
    WORKER,
    RunConfig,
    kv_name,
    kv_pair,
)
from edgespec.memory.bytes.snapshots import most_snapshots
from edgespec.memory.plan.layout import (
    BATCH_SIZES,
    DRAFT_SIZES,
    Layout,
    Shortage,
    largest_fitting,
    parts_on,
    smallest_batch,
    snapshots_of,
)
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.options import LLAMACPP
from edgespec.memory.plan.placing import (
    SMALLER_KV_TYPES,
    device_of,
    kernels_of,
    kv_types,
    loss_of,
    mapping_of,
    may_choose,
    reads_of,
    require_speed,
    with_exact_cache,
    with_experts_kept,
    with_experts_on_disk,
    with_layers_placed,
    with_smaller_cache,
)
from edgespec.memory.plan.plan import (
    Alternative,
    Choice,
    Plan,
    Request,
    component_bytes,
    drafter_of,
    threads_of,
    users_of,
)
from edgespec.memory.times import NO_DIFFERENCE, SpeedModel
from edgespec.models.spec import ModelSpec


def make_plan(
    spec: ModelSpec,
    request: Request,
    machine: Machine,
    speed_of: Callable[[RunConfig], SpeedModel],
    *,
    drafter_bytes: int = 0,
    draft_spec: ModelSpec | None = None,
    switch_spec: ModelSpec | None = None,
    max_step_of: Callable[[RunConfig], int | None] = lambda _config: None,
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
    losses = kv_losses or {}
    kv_type_k, kv_type_v, kv_type = kv_types(request, specs, losses)
    threads, drafter = threads_of(request), drafter_of(spec, request)
    users = users_of(specs, request, draft_spec)
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
        users=int(users.value),
        kv_losses=losses,
    )
    layout, gpu_layers = with_layers_placed(layout)
    layout, kv_type = with_exact_cache(layout, kv_type)
    layout, kv_type = with_smaller_cache(layout, kv_type, losses)
    layout = with_experts_on_disk(layout)
    choices = [kv_type, threads, drafter]
    if layout.draft_spec is not None:
        choices.append(Choice("draft_model", layout.draft_spec.path.name, "as asked"))
    choices += [gpu_layers, device_of(layout), kernels_of(layout)]
    if losses:
        measured = sorted(losses.items(), key=lambda one: one[1])
        value = ", ".join(f"{kind} {loss:.2g}" for kind, loss in measured)
        reason = "nats of KL divergence from f16, measured with this file"
        choices.append(Choice("kv_losses", value, reason))
    choices += [users] if request.users != 1 else []
    config = layout.config(layout.contexts.least, layout.least_batch, 0)
    known, reads = cache(speed_of), None
    if layout.expert_bytes:  # nearly as many as the plan keeps
        excess = layout.excess_bytes(layout.contexts.least, layout.least_batch, 0)
        reads = reads_of(with_experts_kept(layout, excess))

    def speed_with(draft_max: int) -> SpeedModel:
        speed = known(replace(config, snapshots=snapshots_of(spec, draft_max)))
        return reads.added_to(speed) if reads else speed

    again = partial(
        make_plan,
        spec,
        machine=machine,
        speed_of=speed_of,
        drafter_bytes=drafter_bytes,
        draft_spec=draft_spec,
        switch_spec=switch_spec,
        max_step_of=max_step_of,
        kv_losses=kv_losses,
    )
    return _sized(layout, Drafts(layout, speed_with, max_step_of(config)), choices, again)


def _sized(
    layout: Layout, drafts: Drafts, choices: Sequence[Choice], again: Callable[..., Plan]
) -> Plan:
    """The plan of a layout: its context, drafts and batch, as large as memory allows."""
    least = layout.contexts.least, layout.least_batch, drafts.sizes[0]
    first_states = (
        2  # behind a system prompt that conversations have in common, and the last message
    )
    layout = with_states(layout, *least, most=first_states)
    lacks_states = bool(layout.state_bytes) and layout.states < first_states
    search = ContextSearch(layout, drafts.sizes[:1] if lacks_states else drafts.sizes)
    context, draft_max = search.choose()
    batch = batch_of(layout, context, draft_max)
    sizes = [search.choice(context, draft_max), *drafts.choices(draft_max), batch]
    batch_size = max(int(batch.value), layout.max_nodes(draft_max))
    layout = with_states(layout, context, batch_size, draft_max)
    if layout.state_bytes:
        reason = f"of {layout.state_bytes / MEBIBYTE:.1f} MiB: conversations go on from there"
        sizes.append(Choice("states", layout.states, reason))
    if layout.users > 1:
        layout, cells = with_cells_for_all(layout, context, batch_size, draft_max)
        sizes.append(cells)
    if layout.expert_bytes:
        layout = with_experts_kept(layout, layout.excess_bytes(context, batch_size, draft_max))
        choices = [*choices, reads_of(layout).choice()]
        require_speed(layout, drafts.range_of(0))
    longest = layout.contexts.longest
    return Plan.of(
        layout.config(context, batch_size, draft_max),
        draft_max=draft_max,
        draft_model=layout.draft_spec.path if layout.draft_spec else None,
        draft_mapped=layout.draft_mapped,
        switch=layout.switch_spec.path if layout.switch_spec else None,
        switch_mapped=layout.switch_mapped,
        switch_snapshots=snapshots_of(layout.switch_spec, draft_max),
        remember=layout.request.remember,
        choices=(*choices, *sizes, mapping_of(layout)),
        components=layout.footprint(context, batch_size, draft_max),
        limit_bytes=layout.limit_bytes,
        available_bytes=layout.machine.free_bytes,
        plain_tokens_per_s=drafts.tokens_per_s(0),
        plain_range=drafts.range_of(0),
        tokens_per_s=drafts.tokens_per_s(draft_max),
        speed_range=drafts.range_of(draft_max),
        wanted_context=longest,
        wanted_drafts=min(drafts.sizes[-1], longest - 1),
        speed_source=drafts.speed_of(draft_max).source,
        kv_loss=layout.kv_losses.get(kv_name(layout.kv_type_k, layout.kv_type_v)),
        find_alternatives=partial(
            _alternatives, search, drafts, (context, batch_size, draft_max), again
        ),
    )


def _alternatives(
    search: ContextSearch, drafts: Drafts, sizes: tuple[int, int, int], again: Callable[..., Plan]
) -> Iterator[Alternative]:
    """What a person could prefer to a plan of these sizes; `again` plans another request.

    None for several users, who share the context.
    """
    layout, request = search.layout, search.layout.request
    context, batch, draft_max = sizes
    if layout.users > 1:
        return

    def alternative(name: str, options: str, **changes: Any) -> Iterator[Alternative]:
        with suppress(DoesNotFitError):
            plan = again(request=replace(request, **changes))
            nbytes = plan.predicted_peak_bytes + plan.predicted_gpu_bytes
            yield Alternative(name, options, nbytes, plan.context_size, plan.tokens_per_s)

    least, taken = layout.contexts.least, layout.nbytes(context, batch, draft_max)
    options = f"--ctx {least} --draft-max 0"
    for other in alternative("smaller", options, context_size=least, draft_max=0):
        if other.peak_bytes < taken:
            yield other
    longest = search.longest_context(draft_max, layout.contexts.trained)
    if longest > context:
        yield from alternative("longer context", f"--ctx {longest}", context_size=longest)
    if not request.budget_bytes or request.draft_max is not None or draft_max == search.drafts[-1]:
        return
    now = drafts.tokens_per_s(draft_max)
    for size in (context, layout.contexts.longest):  # a draft comes before a longer context, or not
        needed = -(-layout.nbytes(size, batch, search.drafts[-1]) // MEBIBYTE)
        if needed * MEBIBYTE > layout.machine.free_bytes:
            return
        options, budget = f"--budget {needed}MiB", needed * MEBIBYTE
        for other in alternative("faster", options, budget_bytes=budget):
            if other.tokens_per_s > 1.02 * now:
                yield other
                return


# -- how large drafts may be: sizes that are worth their memory, by predicted speed -----------

CHEAP = 1.02  # of the bytes with the smallest draft: hardly more
# Of these llama.cpp writes a part of all snapshots in every step.
_WRITES_ALL = ("qwen35", "kimi-k3")  # beginnings of architectures


def largest_cheap(layout: Layout, drafts: Sequence[int], smallest: int) -> int:
    """The largest of ascending drafts that takes hardly more memory than `smallest`."""
    least = layout.contexts.least, layout.least_batch
    enough = CHEAP * layout.nbytes(*least, smallest)
    larger = (draft for draft in reversed(drafts) if layout.nbytes(*least, draft) <= enough)
    return next(larger, smallest)


@dataclass(frozen=True)
class Drafts:
    """The sizes of drafts that a plan may have, and what they bring.

    Sizes are compared in the least context. `speed_of` predicts with room for drafts of at most a
    size, `max_step` is the most nodes of a step, if known.
    """

    layout: Layout
    speed_of: Callable[[int], SpeedModel]
    max_step: int | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ascending, each predicted to be faster than the last.

        The first one is what a plan has in any case: none, or what was asked for. The last one
        keeps nearly all of the speed. It is 0 because drafts seem not to pay only where plain steps
        pay for them, too: step times measured on a busy machine would then never be corrected, and
        the controller does not draft where it does not pay.
        """
        if not self.layout.has_drafter:
            return (0,)
        asked = self.layout.request.draft_max
        if asked is not None:
            return (asked,)
        most = min(self.max_step or 256, self.layout.contexts.least)
        usual: Sequence[int] = DRAFT_SIZES
        if self.layout.spec.keeps_state:  # each draft takes one more copy of the state
            most = min(most, 1 + most_snapshots(self.layout.spec))
            is_unknown = not self.speed_of(DRAFT_SIZES[0]).is_measured
            few = self.layout.spec.arch.startswith(_WRITES_ALL) and is_unknown
            usual = DRAFT_SIZES[: 1 if few else 2]
        sizes = [draft for draft in usual if draft < most]
        # A draft model that was named is loaded, or what does not fit is said.
        least = () if self.layout.draft_spec is not None and sizes else (0,)
        worthwhile = self._worthwhile(sizes)
        return least if least and self._slow_down(worthwhile) else (*least, *worthwhile)

    def tokens_per_s(self, draft_max: int) -> float:
        """Predicted speed with drafts of at most this size, halfway through the answer."""
        return self.speed_of(draft_max).tokens_per_s(draft_max, self.layout.request.depth)

    def range_of(self, draft_max: int) -> tuple[float, float]:
        """Between what `tokens_per_s` is likely to lie."""
        return self.speed_of(draft_max).range_of(draft_max, self.layout.request.depth)

    def _slow_down(self, sizes: Sequence[int]) -> bool:
        """Whether snapshots take more time than drafts of any of these sizes save.

        Not where somebody asks for a drafter.
        """
        is_open = self.layout.request.drafter == "auto" and self.layout.spec.keeps_state
        if not is_open or not all(self.speed_of(size).is_measured for size in sizes):
            return False
        best = max(map(self.tokens_per_s, sizes), default=0.0)
        return best * NO_DIFFERENCE < self.tokens_per_s(0)

    def _worthwhile(self, sizes: Sequence[int]) -> Sequence[int]:
        has_budget = bool(self.layout.request.budget_bytes)
        is_measured = all(self.speed_of(size).is_measured for size in sizes)
        if not is_measured and not has_budget:
            return sizes  # so that all sizes get measured
        speeds = {draft: self.tokens_per_s(draft) for draft in sizes}
        enough = max(speeds.values(), default=0.0) * self._kept_speed
        kept: list[int] = []
        for draft, speed in speeds.items():
            if not kept or speed > speeds[kept[-1]]:
                kept.append(draft)
            if speed >= enough:
                break
        cheap = 0 if has_budget or self.layout.spec.keeps_state else self._cheap(sizes)
        return kept if not kept or cheap <= kept[-1] else [*kept, cheap]

    def _cheap(self, sizes: Sequence[int]) -> int:
        """The largest draft for hardly any memory: some texts use more of it than most do."""
        return largest_cheap(self.layout, sizes, sizes[0]) if sizes else 0

    @property
    def _kept_speed(self) -> float:
        return 0.98 if self.layout.request.budget_bytes else 0.995

    def choices(self, draft_max: int) -> Iterator[Choice]:
        """The drafts of a plan, with the reason, and the snapshots that they take."""
        yield Choice("draft_max", draft_max, self._reason(draft_max))
        if self.layout.spec.has_snapshots and self.layout.has_drafter:
            yield Choice("snapshots", draft_max, self._price(draft_max))

    def _price(self, draft_max: int) -> str:
        """How much longer snapshots make plain steps, in words."""
        count = draft_max or DRAFT_SIZES[0]
        speeds = [self.speed_of(size) for size in (0, count)]
        if not all(speed.is_measured for speed in speeds):
            return "each is a copy of the recurrent state; what they cost is measured on first use"
        plain = [speed.tokens_per_s(0, self.layout.request.depth) for speed in speeds]
        price = f"plain steps take {plain[0] / plain[1]:.2f} times as long with {count} as without"
        return f"{price}: more than drafts save" if self.sizes == (0,) else price

    def _reason(self, draft_max: int) -> str:
        request = self.layout.request
        if not self.layout.has_drafter:
            return "no drafter"
        if request.draft_max is not None:
            return "as asked"
        if draft_max == 0:
            if self.sizes == (0,):
                return "snapshots of the recurrent state take more time than drafts save"
            return "the budget leaves no room for drafts"
        is_measured = self.speed_of(draft_max).is_measured
        if draft_max == self.sizes[-1] and not is_measured and not request.budget_bytes:
            if self.layout.spec.keeps_state:
                return "measured on first use; each takes a copy of the recurrent state"
            return "all sizes are measured on first use"
        gain = self.tokens_per_s(draft_max) / self.tokens_per_s(0)
        return f"{self._kept(draft_max)}; {gain:.2f}x of plain predicted"

    def _kept(self, draft_max: int) -> str:
        if draft_max < self.sizes[-1]:
            return "the most that fits"
        if not self.layout.request.budget_bytes and draft_max == self._cheap(DRAFT_SIZES):
            return f"the most that takes less than {CHEAP - 1:.0%} of the memory"
        return f"the least that keeps {self._kept_speed:.1%} of the predicted speed"


# -- context and drafts ----------------------------------------------------------------


@dataclass(frozen=True)
class ContextSearch:
    """Contexts and drafts of a layout; `drafts` are ascending, and it has the first in any case.

    Its steps: the least context; the smallest draft, and larger ones that take hardly more; the
    context that is wanted; the other drafts.
    """

    layout: Layout
    drafts: Sequence[int]

    def choose(self) -> tuple[int, int]:
        """Context and draft: as far up as memory allows.

        Raises DoesNotFitError where the first step does not fit.
        """
        longest, last = self.layout.contexts.longest, self.drafts[-1]
        if self.layout.fits(longest, _largest_batch(self.layout, last), last):
            return longest, min(last, longest - 1)  # a step has to fit into the context
        least, early = self.layout.contexts.least, self._early_drafts
        if not self._fits(least, early[0]):
            raise does_not_fit(self.layout, least, self.layout.least_batch, early[0])
        draft = self._largest_draft(early, least)
        if draft < early[-1]:
            return least, draft
        context = self.longest_context(draft, longest)
        if context == longest:
            draft = self._largest_draft(self.drafts, context)
        return context, min(draft, context - 1)

    def longest_context(self, draft_max: int, most: int) -> int:
        """The largest context up to `most` that fits, in steps of 256; the least one does."""
        least = self.layout.contexts.least
        sizes = [*range(least, most, CELL_PADDING), most]
        batch = self.layout.least_batch
        fitting = largest_fitting(
            sizes, lambda size: self.layout.excess_bytes(size, batch, draft_max)
        )
        return fitting or least

    def choice(self, context: int, draft_max: int) -> Choice:
        """The context of a plan, with the reason."""
        reason = self.layout.contexts.reason
        if context < self.layout.contexts.longest:
            reason = "the largest that fits"
            if draft_max < self._early_drafts[-1]:
                reason = (
                    "what is needed; a draft comes before more, and memory does not reach for it"
                )
        return Choice("context_size", context, reason)

    @cached_property
    def _early_drafts(self) -> Sequence[int]:
        """Those that come before more context: the first, and what takes hardly more than it."""
        if self.layout.request.prefer == "context":
            return self.drafts[:1]
        last = largest_cheap(self.layout, self.drafts, self.drafts[:2][-1])
        return [draft for draft in self.drafts if draft <= last]

    def _largest_draft(self, drafts: Sequence[int], context: int) -> int:
        """The last of ascending drafts that fits; the first one does."""
        fitting = (draft for draft in reversed(drafts) if self._fits(context, draft))
        return next(fitting, drafts[0])

    def _fits(self, context: int, draft_max: int) -> bool:
        return self.layout.fits(context, self.layout.least_batch, draft_max)


# -- the batch: larger ones read prompts faster and take more memory -------------------


def batch_of(layout: Layout, context: int, draft_max: int) -> Choice:
    """The largest batch that is of use and fits, with what the other sizes leave."""
    largest = _largest_batch(layout, draft_max)
    least = max(layout.least_batch, smallest_batch(draft_max))
    sizes = (size for size in BATCH_SIZES if least <= size <= largest)
    fitting = (size for size in sizes if layout.fits(context, size, draft_max))
    size = next(fitting, least)
    reason = "reads prompts at nearly full speed in little memory"
    if size < layout.wanted_batch:
        reason = "what the budget leaves; prompts are read more slowly"
    return Choice("batch_size", size, reason)


def _largest_batch(layout: Layout, draft_max: int) -> int:
    return max(layout.wanted_batch, layout.least_batch, smallest_batch(draft_max))


# -- states of prefixes ----------------------------------------------------------------


def with_states(
    layout: Layout, context: int, batch: int, draft_max: int, *, most: int = 1 << 30
) -> Layout:
    """As many states of prefixes as fit beside these sizes, where the model needs any to go back.

    Two come before drafts and more context, as all is read again in every turn without; others come
    last.
    """
    if not layout.state_bytes:
        return layout
    share = layout.spec.weight_bytes // 8 // layout.state_bytes  # for all together
    # Seven, and one for each user, whose last turn it is of.
    wanted = min(max(1 + layout.users, min(share, 7 + layout.users)), most)
    counts = range(wanted, layout.states, -1)
    fitting = (replace(layout, states=count) for count in counts)
    return next((one for one in fitting if one.fits(context, batch, draft_max)), layout)


# -- cells of several users ------------------------------------------------------------


def with_cells_for_all(
    layout: Layout, context: int, batch: int, draft_max: int
) -> tuple[Layout, Choice]:
    """As many cells as memory leaves, and what each user would get of them.

    Sizes are in tokens. Each answer is promised its cells before it begins, so with fewer of them
    fewer run at once, and none of them ends early.
    """
    if not layout.request.exact:
        most = (layout.users - 1) * context
        more = [*range(0, most, CELL_PADDING), most]

        def shared(size: int) -> Layout:
            return replace(layout, more_cells=size)

        fitting = largest_fitting(
            more, lambda size: shared(size).excess_bytes(context, batch, draft_max)
        )
        layout = shared(fitting or 0)
    cells = layout.cells(context)
    each = min(context, cells // layout.users)
    reason = f"{each} for each of {layout.users} users"
    if each < context:
        reason = (
            f"what memory leaves: {each} for each of {layout.users} users; who needs more waits"
        )
    return layout, Choice("cells", cells, reason)


# -- why a request does not fit, and what would: every way out is tried before it is named


def does_not_fit(layout: Layout, context: int, batch: int, draft_max: int) -> DoesNotFitError:
    """The error for a request that does not fit with these sizes (tokens)."""
    parts = layout.footprint(context, batch, draft_max)
    shortage = next(layout.shortages(parts))
    if shortage.device:  # each memory stands for itself
        parts = tuple(parts_on(shortage.device, parts))
    else:
        parts = tuple(part for part in parts if not part.device.startswith(WORKER))
    largest = sorted(component_bytes(parts).items(), key=lambda item: -item[1])[:4]
    named = ", ".join(f"{name.replace('_', ' ')} {-(-size // MEBIBYTE)}" for name, size in largest)
    total = -(-sum(part.nbytes for part in parts) // MEBIBYTE)
    both = "" if layout.switch_spec is None else "two models and "
    return DoesNotFitError(
        f"needs {total} MiB for {both}{context} tokens of context ({named} MiB); "
        f"{shortage.where}: {shortage.there_bytes // MEBIBYTE} MiB",
        hint="; ".join(_ways_out(layout, shortage, context, draft_max))
        or "use a smaller model file",
    )


def _ways_out(layout: Layout, shortage: Shortage, context: int, draft_max: int) -> Iterator[str]:
    """Options that help; a larger budget only where nothing else does.

    Other programs are named only where free memory is short: a budget they do not touch.
    """
    others = list(_other_options(layout, context, draft_max))
    yield from others
    reserved = layout.machine.reserved_bytes // MEBIBYTE
    if reserved and shortage.device == HOST:
        yield f"other programs of edgespec have reserved {reserved} MiB: stop one"
    if not others and layout.request.budget_bytes:
        needed = layout.nbytes(context, smallest_batch(draft_max), draft_max)
        if needed <= layout.machine.free_bytes:
            yield f"`--budget {-(-needed // MEBIBYTE)}MiB` is enough"


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
    if request.kv_types != ("f16", "f16") or request.exact or layout.backend != LLAMACPP:
        return
    for kind in SMALLER_KV_TYPES:
        key, value = kv_pair(kind)
        smaller = replace(layout, kv_type_k=key, kv_type_v=value)
        if not may_choose(kind, layout.specs, layout.kv_losses):
            continue
        if fitting := _largest_fitting_context(smaller, context + 1, draft_max):
            asked = (
                f"--kv-type {key}"
                if key == value
                else f"--cache-type-k {key} --cache-type-v {value}"
            )
            cost = loss_of(kind, layout.kv_losses)
            yield f"`{asked} --ctx {fitting}` fits: {cost}"
            return


def _largest_fitting_context(layout: Layout, below: int, draft_max: int) -> int:
    """Largest context under `below` that fits, in steps of 256; 0 if none.

    None that is too small for the prompt that was asked for.
    """
    batch, sizes = smallest_batch(draft_max), range(CELL_PADDING, below, CELL_PADDING)
    largest = largest_fitting(sizes, lambda size: layout.excess_bytes(size, batch, draft_max)) or 0
    return largest if largest >= layout.request.prompt_tokens else 0
