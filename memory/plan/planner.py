"""The planner: one budget in, one joint plan out.

Made from the file's metadata, the device and what was measured
earlier, so it costs milliseconds and loads nothing. The search is small on purpose:

1. settings that change what is computed (KV type, drafter) come from the request; a type that
   costs quality is never chosen silently; as many layers as fit go to a GPU
2. context and drafts climb one ladder, as far as memory allows: the least context; the smallest
   draft, and larger ones that take hardly more; the context that is wanted; the other drafts, up to
   the least that keeps 98% of the best predicted tokens/s (arXiv 2506.01986 calls it the lower
   bound of memory that retains the speed-up)
3. what is left goes to the prompt's batch

A ladder and not an optimum for each budget, because more memory must never buy less context, a
smaller draft or less speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.footprint import kv_type_fits
from edgespec.memory.plan.layout import BATCH_SIZES, Layout, smallest_batch
from edgespec.memory.plan.plan import Alternative, Choice, Device, Goal, Plan, Settings
from edgespec.memory.plan.refusal import refusal
from edgespec.memory.plan.request import (
    CONTEXT_STEP,
    DEFAULT_CONTEXT,
    LLAMACPP,
    ONNX,
    Request,
    check,
    drafter_of,
    rounded,
    threads_of,
    wanted_context,
)
from edgespec.memory.times.speed import SpeedModel
from edgespec.models.onnx.packing import EXACTLY_PACKED
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

_LEAST_CONTEXT = 512  # offered unasked; a question and its answer
_DRAFT_SIZES = (3, 7, 15, 31)
_GPU_BATCH_SIZE = 512  # a GPU is idle on smaller ones
# Prompt tokens a second with batches of 64, 128 and 512 on two cores: 0.80, 0.93 and 1 of the best
# on a model 576 wide, 0.96, 1 and 0.94 on one 1536 wide.
_CPU_BATCH_SIZES = ((1024, 64), (0, 128))  # from this width on
_KEPT_SPEED = 0.98  # under a budget
_KEPT_SPEED_UNASKED = 0.995
_WORTH_TELLING = 1.02
_SMALLER_KV_TYPES = (("q8_0", "twice"), ("q4_0", "nearly four times"))
# KL divergence in nats that a cache type may cause where context is preferred: a twentieth of what
# 4-bit weights cost a small model.
_MOST_KV_LOSS = 0.01
_CHEAP = 1.02  # of the bytes with the smallest draft: hardly more
_LARGEST_STEP = 256
_MEBIBYTE = 1 << 20


def make_plan(
    spec: ModelSpec,
    request: Request,
    machine: Device,
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
    planner = _Planner(
        spec,
        request,
        machine,
        speed_of,
        drafter_bytes,
        draft_spec,
        switch_spec,
        max_step_of,
        kv_losses or {},
    )
    return planner.plan()


class _Planner:
    def __init__(
        self,
        spec: ModelSpec,
        request: Request,
        machine: Device,
        speed_of: Callable[[Settings], SpeedModel],
        drafter_bytes: int,
        draft_spec: ModelSpec | None,
        switch_spec: ModelSpec | None,
        max_step_of: Callable[[Settings], int | None],
        kv_losses: Mapping[str, float],
    ) -> None:
        check(request)
        self.spec, self.request, self.machine = spec, request, machine
        self.kv_losses = kv_losses
        self.choices: dict[str, Choice] = {}
        backend = ONNX if request.backend == ONNX else LLAMACPP
        specs = (spec,) if switch_spec is None else (spec, switch_spec)
        key_type, value_type = self._kv_types(backend, specs)
        threads = self._choose("threads", *threads_of(request))
        self.drafter = self._choose("drafter", *drafter_of(spec, request))
        drafts = self.drafter != "none"
        if draft_spec is not None and drafts:
            self._choose("draft_model", draft_spec.path.name, "as asked")
        self.layout = Layout(
            spec,
            machine,
            backend,
            threads,
            key_type,
            value_type,
            drafter_bytes=drafter_bytes if drafts else 0,
            draft_spec=draft_spec if drafts else None,
            switch_spec=switch_spec,
            interface_bytes=request.interface_bytes,
            is_plain_greedy=request.is_plain_greedy,
            budget_bytes=request.budget_bytes,
        )
        self.wanted_context, self.context_reason = wanted_context(self._shorter(), request)
        self._place_layers()
        self.device = self._choose("device", *self._device())
        self._take_smaller_cache()
        settings = Settings(
            threads,
            self.layout.key_type,
            self.layout.value_type,
            self.layout.gpu_layers,
            self.drafter,
            backend,
            backend == ONNX and request.exact,
            self.device if backend == ONNX else "cpu",
        )
        self.speed = speed_of(settings)
        self.max_step = max_step_of(settings) or _LARGEST_STEP
        self.drafts = self._ladder_of_drafts()

    # -- the plan --------------------------------------------------------------------------

    def plan(self) -> Plan:
        request = self.request
        least = self._least_context()
        batch = self._smallest_batch()
        context, draft_max = self._climb(least, batch)
        batch = self._batch_size(context, draft_max)
        self._choose("context_size", context, self._context_reason(context, draft_max))
        self._choose("draft_max", draft_max, self._draft_reason(draft_max))
        self._choose("batch_size", batch, self._batch_reason(batch))
        self._choose("mapped", int(self.layout.mapped), self._mapped_reason())
        depth, layout = self._depth(), self.layout
        return Plan(
            backend=layout.backend,
            device=self.device,
            context_size=context,
            batch_size=batch,
            threads=layout.threads,
            kv_type_k=layout.key_type,
            kv_type_v=layout.value_type,
            gpu_layers=layout.gpu_layers,
            draft_max=draft_max,
            drafter=self.drafter,
            draft_model=layout.draft_spec.path if layout.draft_spec else None,
            draft_mapped=layout.draft_mapped,
            switch=layout.switch_spec.path if layout.switch_spec else None,
            switch_mapped=layout.switch_mapped,
            exact=request.exact,
            remember=request.remember,
            mapped=layout.mapped,
            choices=tuple(self.choices.values()),
            components=layout.footprint(context, batch, draft_max),
            limit_bytes=layout.limit_bytes,
            available_bytes=self.machine.free_bytes,
            plain_tokens_per_s=self.speed.tokens_per_s(0, depth),
            tokens_per_s=self.speed.tokens_per_s(draft_max, depth),
            goal=self._goal(),
            speed_source=self.speed.source,
            alternatives=tuple(self._alternatives(context, batch, draft_max)),
        )

    def _alternatives(self, context: int, batch: int, draft_max: int) -> Iterator[Alternative]:
        """What a person could prefer: less memory, more context, more speed."""
        now, least = self.layout.nbytes(context, batch, draft_max), self._least_context()
        smaller = self._alternative("smaller", f"--ctx {least} --draft-max 0", least, 0)
        if smaller.peak_bytes < now:
            yield smaller
        longest = self._longest_context(self._smallest_batch(), draft_max, self._trained())
        if longest > context:
            yield self._alternative("longer context", f"--ctx {longest}", longest, draft_max)
        if self.request.budget_bytes and self.request.draft_max is None:
            faster = self._alternative("faster", "", context, self.drafts[-1])
            gain = faster.tokens_per_s / self.speed.tokens_per_s(draft_max, self._depth())
            if gain > _WORTH_TELLING and faster.peak_bytes <= self.machine.free_bytes:
                needed = -(-faster.peak_bytes // _MEBIBYTE)
                yield replace(faster, options=f"--budget {needed}MiB")

    def _alternative(self, name: str, options: str, context: int, draft_max: int) -> Alternative:
        return Alternative(
            name=name,
            options=options,
            peak_bytes=self.layout.nbytes(context, self._batch_size(context, draft_max), draft_max),
            context_size=context,
            tokens_per_s=self.speed.tokens_per_s(draft_max, self._depth()),
        )

    def _shorter(self) -> ModelSpec:
        """Of the models that write, the one made for less context."""
        return min(self.layout.specs, key=lambda spec: spec.context_length or DEFAULT_CONTEXT)

    # -- choices ---------------------------------------------------------------------------

    def _choose(self, name: str, value: Any, reason: str) -> Any:
        self.choices[name] = Choice(name, value, reason)
        return value

    def _kv_types(self, backend: str, specs: Sequence[ModelSpec]) -> tuple[str, str]:
        """Types of K and V. A type that costs quality is never chosen unasked."""
        request, kind = self.request, self.request.kv_type or "f16"
        if backend == ONNX:
            if request.kv_type not in (None, "f32"):
                raise UnsupportedError(
                    f"--kv-type {request.kv_type} is not possible with --backend onnx",
                    hint="its attention keeps f32; use --backend llamacpp for other types",
                )
            self._choose("kv_type", "f32", "what ONNX Runtime's attention computes with")
            return "f32", "f32"
        for spec in specs:
            if not kv_type_fits(spec, kind):
                raise UnsupportedError(
                    f"--kv-type {kind} needs heads of a multiple of 32 values; those of "
                    f"{spec.path.name} have {min(spec.key_length)}",
                    hint="use --kv-type f16",
                )
        if request.exact and kind == "f16":
            # llama.cpp's CPU attention sums a single row in two parts from 512 cells on, and
            # rounds differently from a batch, unless K and V have different types. bf16 for K
            # costs nothing in decoding; prefill loses its tiled path (1.25x slower at 800
            # tokens, 1.7x at 3000).
            self._choose("kv_type", "bf16/f16", "--exact: makes one-token steps round like batches")
            return "bf16", "f16"
        reason = "as asked" if request.kv_type else "half precision costs no measurable quality"
        self._choose("kv_type", kind, reason)
        return kind, kind

    def _take_smaller_cache(self) -> None:
        """With `--prefer context` smaller types, where f16 does not reach all of it.

        q8_0 unless it was measured to lose too much; q4_0 only where it was measured not to, and
        q8_0 does not reach all of the context either.
        """
        request = self.request
        if request.prefer != "context" or request.kv_type or request.exact:
            return
        if self.layout.backend == ONNX:
            return
        wanted = request.context_size or self._upper_context()
        # With room for any draft: a larger type must not cost what a smaller one had room for.
        draft = 0 if self.drafter == "none" else request.draft_max or _DRAFT_SIZES[-1]
        for kind, times in _SMALLER_KV_TYPES:
            if self.layout.fits(wanted, self._smallest_batch(), draft):
                return
            loss = self.kv_losses.get(kind, 0.0 if kind == "q8_0" else math.inf)
            fits = all(kv_type_fits(spec, kind) for spec in self.layout.specs)
            if loss > _MOST_KV_LOSS or not fits:
                continue
            self.layout = replace(self.layout, key_type=kind, value_type=kind)
            cost = "a small cost in quality"
            if kind in self.kv_losses:
                cost = f"a measured divergence of {self.kv_losses[kind]:.4f}"
            reason = f"--prefer context: {times} the context of f16, at {cost}"
            self._choose("kv_type", kind, reason)

    def _device(self) -> tuple[str, str]:
        """Where steps run, and why there."""
        asked = self.request.device
        if self.layout.backend == ONNX and asked == "auto":
            return "cpu", "ONNX Runtime's CPU kernels; --device asks for a GPU or an NPU"
        if self.layout.backend == LLAMACPP and asked == "auto":
            return ("gpu" if self.layout.gpu_layers else "cpu"), "where gpu layers puts them"
        return asked, "as asked"

    def _place_layers(self) -> None:
        """All layers on the GPU where they fit, else the most that do."""
        asked, onnx = self.request.gpu_layers, self.layout.backend == ONNX
        has_gpu = bool(self.machine.accelerators) and not onnx
        if asked and asked > 0 and not has_gpu:
            raise UnsupportedError(
                f"--gpu-layers {asked} is not possible: {self.layout.backend} has no GPU here",
                hint="`edgespec doctor` says how to build it with one; or leave the option out",
            )
        if has_gpu and asked is not None:
            self.layout = replace(self.layout, gpu_layers=asked)
        elif has_gpu:
            self._fill_gpu()
        self._choose("gpu_layers", self.layout.gpu_layers, self._gpu_reason())

    def _fill_gpu(self) -> None:
        least, batch = self._least_context(), self._smallest_batch()
        everything = self.spec.num_layers + 1
        for layers in range(everything, 0, -1):
            count = -1 if layers == everything else layers
            self.layout = replace(self.layout, gpu_layers=count)
            if self.layout.fits(least, batch, self.request.draft_max or 0):
                return
        self.layout = replace(self.layout, gpu_layers=0)

    def _gpu_reason(self) -> str:
        if self.request.gpu_layers is not None:
            return "as asked"
        if self.layout.backend == ONNX:
            return "layers are offloaded by llama.cpp alone"
        if not self.machine.accelerators:
            return "llama.cpp was built for the CPU alone, or sees no GPU"
        names = ", ".join(gpu.description for gpu in self.machine.accelerators)
        how_many = "all" if self.layout.gpu_layers < 0 else "as many as"
        return f"{how_many} fit into {names}"

    def _mapped_reason(self) -> str:
        if self.device in ("gpu", "npu") and self.layout.backend == ONNX:
            return "the provider makes a copy of its own for the device, which is not counted"
        if self.spec.format == ONNX_FORMAT:
            return "weights are pages of the folder's file, beside copies as the kernels want them"
        if self.layout.backend == ONNX:
            kinds = sorted({t.type.name for t in self.spec.tensors.values() if len(t.dims) > 1})
            changed = [kind for kind in kinds if kind not in EXACTLY_PACKED]
            note = f"; {', '.join(changed)} weights are kept in 8 bits" if changed else ""
            return f"packed weights are pages of the converted file{note}"
        if self.layout.mapped:
            return "weights are used as they lie in the file, whose pages are shared"
        return "weights are rewritten for this device; mapping the file would hold them twice"

    def _least_context(self) -> int:
        """Tokens without which the request makes no sense."""
        if self.request.context_size is not None:
            return self.request.context_size
        needed = self.request.prompt_tokens + self.request.max_tokens
        return min(self.wanted_context, max(_LEAST_CONTEXT, rounded(needed)))

    def _longest_context(self, batch: int, draft_max: int, upper: int | None = None) -> int:
        """The largest context up to `upper` (what is wanted) that fits, in steps of 256."""
        least = self._least_context()
        if self.request.context_size is not None and upper is None:
            return least
        limit = max(least, self._longest_wanted() if upper is None else upper)
        low, high = 0, -(-(limit - least) // CONTEXT_STEP)
        while low < high:
            middle = (low + high + 1) // 2
            if self.layout.fits(min(limit, least + middle * CONTEXT_STEP), batch, draft_max):
                low = middle
            else:
                high = middle - 1
        return min(limit, least + low * CONTEXT_STEP)

    def _goal(self) -> Goal:
        context = self._longest_wanted()
        draft = min(self.drafts[-1], context - 1)
        return Goal(context, draft, self.speed.tokens_per_s(draft, self._depth()))

    def _longest_wanted(self) -> int:
        """Tokens of context of a plan that memory does not limit."""
        asked = self.request.context_size
        return asked if asked is not None else max(self._least_context(), self._upper_context())

    def _upper_context(self) -> int:
        return self._trained() if self.request.prefer == "context" else self.wanted_context

    def _trained(self) -> int:
        return self._shorter().context_length or DEFAULT_CONTEXT

    def _context_reason(self, context: int, draft_max: int) -> str:
        if self.request.context_size is not None:
            return "as asked"
        if context == self._upper_context():
            if self.request.prefer == "context":
                return "all the model is made for, and it fits"
            return self.context_reason
        early = self._early_drafts(self._least_context(), self._smallest_batch())
        if draft_max < early[-1]:
            return "what is needed; a draft comes before more, and memory does not reach for it"
        return "the largest that fits"

    def _depth(self) -> int:
        """Tokens in the cache halfway through the answer: where speed is predicted."""
        request = self.request
        return request.prompt_tokens + (request.max_tokens or 256) // 2

    def _climb(self, least: int, batch: int) -> tuple[int, int]:
        """Context and draft: as far up the ladder as memory allows.

        Raises DoesNotFitError where the first step does not fit.
        """
        first, *early = self._early_drafts(least, batch)
        if not self.layout.fits(least, max(batch, first + 1), first):
            raise refusal(self.layout, replace(self.request, draft_max=first), least, batch)
        draft = self._largest_draft((first, *early), least, batch)
        if early and draft < early[-1]:
            return least, draft
        context = self._longest_context(batch, draft)
        if context == self._longest_wanted():
            draft = self._largest_draft(self.drafts, context, batch)
        return context, min(draft, context - 1)  # a step has to fit into the context

    def _largest_draft(self, drafts: Sequence[int], context: int, batch: int) -> int:
        """The last of ascending drafts that fits; the first one does."""
        fitting = (draft for draft in drafts if self.layout.fits(context, batch, draft))
        return max(drafts[0], max(fitting, default=0))

    def _early_drafts(self, least: int, batch: int) -> Sequence[int]:
        """Those that come before more context: the first, and what takes hardly more than it."""
        if self.request.prefer == "context":
            return self.drafts[:1]
        enough = _CHEAP * self.layout.nbytes(least, batch, self.drafts[:2][-1])
        return [d for d in self.drafts if self.layout.nbytes(least, batch, d) <= enough]

    def _ladder_of_drafts(self) -> tuple[int, ...]:
        """The drafts that a plan may have, ascending, each predicted to be faster than the last.

        The first one is what it has in any case: none, or what was asked for. The last one keeps
        nearly all of the speed. It is never 0 because drafts seem not to pay: step times measured
        on a busy machine would then never be corrected, and the controller does not draft where it
        does not pay.
        """
        if self.drafter == "none":
            return (0,)
        if self.request.draft_max is not None:
            return (self.request.draft_max,)
        most = min(self.max_step, self._least_context())
        sizes = [draft for draft in _DRAFT_SIZES if draft < most]
        # A draft model that was named is loaded, or what does not fit is said.
        least = () if self.layout.draft_spec is not None and sizes else (0,)
        return (*least, *self._worthwhile(sizes))

    def _worthwhile(self, sizes: Sequence[int]) -> Sequence[int]:
        if not self.speed.is_measured and not self.request.budget_bytes:
            return sizes  # so that all sizes get measured
        depth = self._depth()
        speeds = {draft: self.speed.tokens_per_s(draft, depth) for draft in sizes}
        enough = max(speeds.values(), default=0.0) * self._kept_speed
        kept: list[int] = []
        for draft, speed in speeds.items():
            if not kept or speed > speeds[kept[-1]]:
                kept.append(draft)
            if speed >= enough:
                break
        cheap = 0 if self.request.budget_bytes else self._cheap_draft(sizes)
        return kept if not kept or cheap <= kept[-1] else [*kept, cheap]

    def _cheap_draft(self, sizes: Sequence[int]) -> int:
        """The largest draft for hardly any memory: some texts use more of it than most do."""
        least = self._least_context(), self._smallest_batch()
        enough = _CHEAP * self.layout.nbytes(*least, min(sizes, default=0))
        return max((d for d in sizes if self.layout.nbytes(*least, d) <= enough), default=0)

    def _draft_reason(self, draft_max: int) -> str:
        if self.drafter == "none":
            return "no drafter"
        if self.request.draft_max is not None:
            return "as asked"
        depth = self._depth()
        gain = self.speed.tokens_per_s(draft_max, depth) / self.speed.tokens_per_s(0, depth)
        if draft_max == 0:
            return "the budget leaves no room for drafts"
        if draft_max < self.drafts[-1]:
            return f"the most that fits; {gain:.2f}x of plain predicted"
        if not self.speed.is_measured and not self.request.budget_bytes:
            return "all sizes are measured on first use"
        if not self.request.budget_bytes and draft_max == self._cheap_draft(_DRAFT_SIZES):
            kept = f"the most that takes less than {_CHEAP - 1:.0%} of the memory"
        else:
            kept = f"the least that keeps {self._kept_speed:.1%} of the predicted speed"
        return f"{kept}; {gain:.2f}x of plain predicted"

    @property
    def _kept_speed(self) -> float:
        return _KEPT_SPEED if self.request.budget_bytes else _KEPT_SPEED_UNASKED

    def _smallest_batch(self) -> int:
        return smallest_batch(self.request.draft_max or 0)

    def _batch_size(self, context: int, draft_max: int) -> int:
        """The batch for the prompt: larger ones read it faster and take more memory."""
        wanted = self._wanted_batch()
        for size in BATCH_SIZES:
            if draft_max < size <= wanted and self.layout.fits(context, size, draft_max):
                return size
        return self._smallest_batch()

    def _wanted_batch(self) -> int:
        if self.layout.gpu_layers:
            return _GPU_BATCH_SIZE
        width = self.spec.embedding_size
        return next(size for from_width, size in _CPU_BATCH_SIZES if width >= from_width)

    def _batch_reason(self, batch: int) -> str:
        if batch >= self._wanted_batch():
            return "reads prompts at nearly full speed in little memory"
        return "what the budget leaves; prompts are read more slowly"
