"""What a plan loads and where, and the bytes that takes by sizes of context, batch and draft."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import (
    GPU,
    HOST,
    KV_TYPE_BYTES,
    PIECE_TOKENS,
    WORKER,
    Device,
    RunConfig,
    padded,
)
from edgespec.memory.bytes.footprint import (
    GRAMMAR_STATE_BYTES,
    GRAMMAR_TOKEN_BYTES,
    RUNTIME_BYTES,
    SAMPLING_TOKEN_BYTES,
    Component,
    beside_another,
    footprint,
    has_packed_weights,
)
from edgespec.memory.bytes.head_footprint import (
    block_footprint,
    head_footprint,
    wanted_head,
)
from edgespec.memory.bytes.onnx_footprint import onnx_footprint
from edgespec.memory.bytes.projector import projector_parts
from edgespec.memory.bytes.requests import guests_bytes, requests_bytes
from edgespec.memory.bytes.simulation import Allocation, ContextRequest
from edgespec.memory.device.kernels import attends
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.options import LLAMACPP, ONNX, experts_on_host
from edgespec.memory.plan.plan import (
    ContextRange,
    Request,
    contexts_of,
    draft_config,
    most_leaves,
)
from edgespec.memory.store.packed import is_worth_keeping
from edgespec.models.adapter import adapters_of
from edgespec.models.projector import Projector, read_projector
from edgespec.models.spec import ModelSpec

BATCH_SIZES = (512, 256, 128, 64, 32)
DRAFT_SIZES = (3, 7, 15, 31)
_LATER = ("sampling", "schemas", "states")  # components that are not there while weights are read
Losses = Mapping[str, float]  # KL divergence in nats from f16, by type of cache


class Shortage(NamedTuple):
    """What may not suffice: how many bytes there are, on which device if on one, and are taken."""

    where: str
    there_bytes: int
    device: str
    taken_bytes: int

    @property
    def excess_bytes(self) -> int:
        """How much more is taken than there is; not positive where it suffices."""
        return self.taken_bytes - self.there_bytes


@dataclass(frozen=True)
class Layout:
    """Everything that decides how many bytes a run takes but the sizes that the planner searches.

    Of `context` and `batch` (tokens) and `draft_max` (tokens after the root), a draft of 0 loads
    neither the drafters' tables nor the draft model.
    """

    spec: ModelSpec
    machine: Machine
    request: Request
    threads: int
    kv_type_k: str
    kv_type_v: str
    drafter: str = "none"
    gpu_layers: int = 0  # on other devices; negative: all
    counts: tuple[int, ...] = ()  # of these by accelerator, where several share them
    experts_here: int = 0  # layers, the first ones, whose experts lie on the host
    drafter_bytes: int = 0  # ceiling of the drafters' tables
    draft_spec: ModelSpec | None = None
    switch_spec: ModelSpec | None = None
    users: int = 1  # generations that may run at once
    more_cells: int = 0  # of the cache that they share, than a context has
    states: int = 0  # of prefixes, that are kept
    expert_bytes: int = 0  # that memory has of experts, which a file has; 0: all are in memory
    kv_losses: Losses = field(default_factory=dict)  # as far as they were measured

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """The models that write."""
        return (self.spec,) if self.switch_spec is None else (self.spec, self.switch_spec)

    @property
    def backend(self) -> str:
        """llama.cpp unless the other one is asked for."""
        return ONNX if self.request.backend == ONNX else LLAMACPP

    @property
    def device(self) -> str:
        """Where steps run: "cpu", "gpu" or "npu"."""
        if self.request.device != "auto":
            return self.request.device
        is_gpu = self.backend == LLAMACPP and self.gpu_layers and self._uses_gpu
        return "gpu" if is_gpu else "cpu"

    @property
    def has_drafter(self) -> bool:
        """Whether anything drafts."""
        return self.drafter != "none"

    @property
    def has_head(self) -> bool:
        """Whether the head in the model's file drafts, too."""
        return "head" in self.drafter.split(",") and self.draft_spec is None

    @cached_property
    def contexts(self) -> ContextRange:
        """Which contexts there may be. Raises UnsupportedError where too much is asked for."""
        return contexts_of(self.specs, self.request)

    @cached_property
    def projector(self) -> Projector | None:
        """What sees images, if anything. Raises as `read_projector`."""
        path = self.request.mmproj
        return None if path is None else read_projector(Path(path))

    @cached_property
    def lora(self) -> tuple[tuple[Path, float], ...]:
        """The adapters, and the scales that they begin with. Raises as `adapters_of`."""
        if self.request.lora and self.backend == ONNX:
            raise UnsupportedError(
                "--lora is not possible: ONNX Runtime takes no adapters", hint="leave out --backend"
            )
        if self.request.lora and self.request.exact:
            raise UnsupportedError(
                "--exact is not possible with --lora: what an adapter adds is rounded otherwise in "
                "steps of several tokens",
                hint="leave out one of the two, or take a file that the adapter was merged into",
            )
        return adapters_of(self.request.lora, self.spec)

    @property
    def image_tokens(self) -> int | None:
        """Most tokens of an image; None leaves it to the projector."""
        asked, projector = self.request.image_max_tokens, self.projector
        if projector is None or projector.is_causal:
            return asked
        return min(asked or BATCH_SIZES[0], BATCH_SIZES[0])

    @property
    def least_batch(self) -> int:
        """Prompt tokens evaluated at once when memory is tight: an image, if it sees itself."""
        least, projector = self.request.draft_max or 0, self.projector
        if projector is not None and not projector.is_causal:
            least = max(least, projector.tokens(self.image_tokens) - 1)
        return smallest_batch(least)

    @property
    def wanted_batch(self) -> int:
        """Prompt tokens evaluated at once where memory is no limit: more would not be faster."""
        # A GPU is idle on smaller ones, and each batch reads nearly all experts of a file.
        if self.gpu_layers or self.expert_bytes:
            return BATCH_SIZES[0]
        # Prompt tokens a second with batches of 64, 128 and 512 on two cores: 0.80, 0.93 and 1 of
        # the best on a model 576 wide, 0.96, 1 and 0.94 on one 1536 wide.
        return 64 if self.spec.embedding_size >= 1024 else 128

    @property
    def limit_bytes(self) -> int:
        """What may be taken of the processor's memory."""
        free = self.machine.free_bytes
        return min(free, self.request.budget_bytes or free)

    # -- kernels ---------------------------------------------------------------------------

    @cached_property
    def kernels(self) -> bool:
        """Whether edgespec's own matrix kernels multiply: in llama.cpp, on the CPU."""
        return self.request.kernels != "off" and not self.kernels_unsupported

    @cached_property
    def kernels_unsupported(self) -> str:
        """What keeps them away, or ""."""
        if self.backend == ONNX:
            return "ONNX Runtime has its own"
        everything = self.spec.num_layers + 1
        if sum(one.layers for one in self.devices) >= everything and not self.overrides:
            return "all layers are on other devices"
        if self.machine.missing_kernels:
            return self.machine.missing_kernels
        return (
            "" if has_packed_weights(self.spec) else "this file's weights have none of their types"
        )

    @cached_property
    def keeps_packed(self) -> bool:
        """Whether packed weights are kept in a file, and mapped."""
        asked = self.request.packed_file
        return self.kernels and (
            self.expert_bytes > 0
            or asked == "on"
            or (asked == "auto" and is_worth_keeping(self.spec.path.name, self.spec.weight_bytes))
        )

    @cached_property
    def attends(self) -> bool:
        """Whether edgespec's own attention computes all layers of every model."""
        return self.kernels and all(
            attends(key, value)
            for spec in self.specs
            for key, value in set(zip(spec.key_length, spec.value_length, strict=True))
            if key  # latent attention has no values of its own, and too wide keys
        )

    # -- mapping ---------------------------------------------------------------------------

    @cached_property
    def mapped(self) -> bool:
        """Whether the file is mapped: not where it would lie beside a copy of its weights."""
        return self._maps_beside(self.spec)

    @property
    def switch_mapped(self) -> bool:
        """As `mapped`, for the model that takes turns with this one."""
        return self.switch_spec is not None and self._maps_beside(self.switch_spec)

    @property
    def draft_mapped(self) -> bool:
        """As `mapped`, for the draft model; llama.cpp runs it on either backend."""
        return self.draft_spec is not None and self._maps(self.draft_spec)

    def _maps_beside(self, spec: ModelSpec) -> bool:
        return self.backend == ONNX or self._maps(spec)

    def _maps(self, spec: ModelSpec) -> bool:
        """Whether llama.cpp reads these weights in the file: not where it makes copies anyway."""
        if self.machine.accelerators and self.gpu_layers:
            return self.machine.maps_files
        config = RunConfig(256, 32, 1, kernels=self.kernels)
        wanted = [ContextRequest(spec, config)]
        if spec is self.spec:  # as a plan that memory does not limit asks anyway
            drafts = self.has_drafter and not spec.keeps_state
            draft_max = self.request.draft_max or (DRAFT_SIZES[-1] if drafts else 0)
            context, batch = self.contexts.longest, self.wanted_batch
            config = self._config(context, batch, draft_max)
            wanted = [*self._wanted(config, draft_max).values()]
        elif spec.reads is not None:
            wanted = [ContextRequest(self.spec, config), wanted_head(spec, config, config)]
        of_spec = next(i for i, one in enumerate(wanted) if one.spec is spec)
        return not self.machine.sizes(wanted)[of_spec][HOST].packed

    # -- bytes -----------------------------------------------------------------------------

    def footprint(self, context: int, batch: int, draft_max: int) -> tuple[Component, ...]:
        """The components of a run; where GPU and processor share memory, all of them there.

        Raises BackendError where llama.cpp cannot load a file.
        """
        config = self.config(context, batch, draft_max)
        parts = (*self._model_parts(config, draft_max), *self._other_parts(context))
        later = sum(part.nbytes for part in parts if part.name in _LATER)
        parts = tuple(
            replace(part, nbytes=part.nbytes - later) if part.name == "loading" else part
            for part in parts
            if part.name != "loading" or part.nbytes > later
        )
        if not self.machine.is_one_pool:
            return parts
        return tuple(
            replace(part, device=HOST, name=f"{part.device}_{part.name}")
            if part.device.startswith(GPU)
            else part
            for part in parts
        )

    def _model_parts(self, config: RunConfig, draft_max: int) -> tuple[Component, ...]:
        """Of the models, the head and what drafts."""
        tables = self.drafter_bytes if draft_max else 0  # which all users share
        if self.backend == ONNX:
            return self._onnx_parts(config, tables, drafts=draft_max > 0)
        wanted = self._wanted(config, draft_max)
        answers = dict(zip(wanted, self.machine.sizes([*wanted.values()]), strict=True))
        parts = footprint(self.spec, config, answers["model"], drafter_bytes=tables)
        if "block" in answers:
            parts += block_footprint(self.spec, config, answers["block"])
        if "head" in answers:
            parts += head_footprint(self.spec, config, wanted["head"], answers["head"])
        if "draft" in answers:
            parts += _draft_parts(wanted["draft"], answers["draft"])
        if self.switch_spec is not None:
            small = wanted["switch"].config
            others = footprint(self.switch_spec, small, answers["switch"], drafter_bytes=tables)
            parts += beside_another("switch", self.switch_spec, others)
        return parts

    def _onnx_parts(self, config: RunConfig, tables: int, *, drafts: bool) -> tuple[Component, ...]:
        parts = onnx_footprint(self.spec, config, drafter_bytes=tables)
        if self.switch_spec is not None:
            others = onnx_footprint(self.switch_spec, config, drafter_bytes=tables)
            parts += beside_another("switch", self.switch_spec, others)
        if self.draft_spec is not None and drafts:
            wanted = ContextRequest(self.draft_spec, self._draft_config(config))
            parts += _draft_parts(wanted, self.machine.sizes([wanted])[0])
        return parts

    def _wanted(self, config: RunConfig, draft_max: int) -> dict[str, ContextRequest]:
        """The contexts that llama.cpp would have at once, by what each is for."""
        found = {"model": ContextRequest(self.spec, config)}
        if config.head:
            found["block"] = wanted_head(self.spec, config, config)
        if self.switch_spec is not None:
            snapshots = snapshots_of(self.switch_spec, draft_max)
            small = replace(
                config,
                mapped=self.switch_mapped,
                snapshots=snapshots,
                head=False,
                captured_layers=(),
                lora=(),
                overrides=(),
            )
            found["switch"] = ContextRequest(self.switch_spec, small)
        if (spec := self.draft_spec) is not None and draft_max:
            own = self._draft_config(config)
            if spec.reads is None:
                found["draft"] = ContextRequest(spec, own)
            else:
                found["head"] = wanted_head(spec, config, own)
        return found

    def _other_parts(self, context: int) -> Iterator[Component]:
        """What is there besides the models."""
        vocabulary = max(spec.vocab_size for spec in self.specs)
        keeps_to_form = self.request.keeps_to_form and self.backend != ONNX
        if self.request.interface_bytes:
            yield Component("interface", self.request.interface_bytes, is_ceiling=True)
        if self.request.serves:
            yield Component("requests", requests_bytes(context), is_ceiling=True)
            tried = vocabulary if keeps_to_form else 0
            yield Component("guests", guests_bytes(tried, context), is_ceiling=True)
        if not self.request.is_plain_greedy:
            yield Component("sampling", SAMPLING_TOKEN_BYTES * vocabulary, is_ceiling=True)
        if keeps_to_form:
            size = GRAMMAR_TOKEN_BYTES * vocabulary + GRAMMAR_STATE_BYTES * self.users
            yield Component("schemas", size, is_ceiling=True)
        if self.states:
            yield Component("states", self.states * self.state_bytes, is_ceiling=True)
        if self._disk_cache_bytes:
            yield Component("disk cache", self._piece_bytes(context), is_ceiling=True)
        if self.projector is not None:
            on_gpu = bool(self.gpu_layers and self.machine.accelerators and self._uses_gpu)
            serves = self.request.serves
            parts = projector_parts(self.projector, self.image_tokens, on_gpu=on_gpu, serves=serves)
            yield from parts
        # What the process holds beyond the runtime: a program around it, an engine that is open. An
        # onnxruntime that is loaded already counts twice on that backend.
        held = self.machine.process_bytes - RUNTIME_BYTES - self.request.interface_bytes
        if held > 0:
            yield Component("process", held)

    @property
    def _disk_cache_bytes(self) -> int:
        """Of disk, for prefixes of one model; none where two take turns, or without llama.cpp."""
        is_one = self.switch_spec is None and self.backend != ONNX
        return (self.request.disk_cache_bytes or 0) if is_one else 0

    def _piece_bytes(self, context: int) -> int:
        """What is in memory of a piece of the cache that is written or read, and of its index.

        llama.cpp copies a layer's keys or values at once: of a piece, or of a cache that cannot be
        split.
        """
        spec = self.spec
        is_whole = spec.keeps_state or spec.sliding_window or self._is_apart
        sizes = KV_TYPE_BYTES[self.kv_type_k], KV_TYPE_BYTES[self.kv_type_v]
        layers = zip(spec.num_kv_heads, spec.key_length, spec.value_length, strict=True)
        row = max(heads * max(key * sizes[0], value * sizes[1]) for heads, key, value in layers)
        cells = context if is_whole or self.projector else min(context, PIECE_TOKENS)
        # By tracemalloc for texts of 4,096 and 32,768 tokens: 2.0 MiB where a piece is checked (two
        # blocks) and up to 1.3 MiB of documents; 64 to 66 a token where a text is looked up.
        return round(row * cells) + 64 * context * self.users + (3 << 20)

    @cached_property
    def state_bytes(self) -> int:
        """Of a copy of what a prefix needs besides cells of attention in full; 0: nothing.

        What recurs is what a cache has whatever its length; of sliding layers the window's cells.
        A cache that is exact has its cells in the order of the text, which a copy does not keep.
        None is made for a text that nobody comes back to.
        """
        spec, nbytes = self.spec, 0.0
        if self.backend == ONNX or self.request.is_one_text:
            return 0
        if spec.keeps_state:
            shapes = (RunConfig(cells, 32, 1) for cells in (256, 512))
            answers = [self.machine.sizes([ContextRequest(spec, config)])[0] for config in shapes]
            short, long = (sum(one.cache for one in answer.values()) for answer in answers)
            nbytes += max(0, 2 * short - long)
        if spec.sliding_window and not self.request.exact:
            sizes = KV_TYPE_BYTES[self.kv_type_k], KV_TYPE_BYTES[self.kv_type_v]
            layers = zip(
                spec.is_sliding, spec.num_kv_heads, spec.key_length, spec.value_length, strict=True
            )
            nbytes += spec.sliding_window * (
                16  # that llama.cpp writes of a cell, besides values, when it copies a state
                + sum(
                    slides * heads * (key * sizes[0] + value * sizes[1])
                    for slides, heads, key, value in layers
                )
            )
        return round(nbytes) + 64 * spec.num_layers if nbytes else 0

    def nbytes(self, context: int, batch: int, draft_max: int) -> int:
        """Everything a budget covers: the processor's memory and the GPU's, not that of workers."""
        parts = self.footprint(context, batch, draft_max)
        return sum(part.nbytes for part in parts if not part.device.startswith(WORKER))

    def excess_bytes(self, context: int, batch: int, draft_max: int) -> int:
        """By how much it is too large for the budget or a device; not positive where it fits."""
        return max(
            one.excess_bytes for one in self._rooms(self.footprint(context, batch, draft_max))
        )

    def fits(self, context: int, batch: int, draft_max: int) -> bool:
        """Whether there is room for it, in the budget and on the devices."""
        return self.excess_bytes(context, batch, draft_max) <= 0

    def shortages(self, parts: Sequence[Component]) -> Iterator[Shortage]:
        """What does not suffice."""
        return (one for one in self._rooms(parts) if one.excess_bytes > 0)

    def _rooms(self, parts: Sequence[Component]) -> Iterator[Shortage]:
        local = sum(part.nbytes for part in parts if not part.device.startswith(WORKER))
        if self.request.budget_bytes:
            yield Shortage("budget", self.request.budget_bytes, "", local)
        rooms = {HOST: ("free", self.machine.free_bytes)}
        for label, one in zip(self.machine.labels, self.machine.accelerators, strict=True):
            where = f"free on worker {one.name}" if one.worker else "free on the GPU"
            if label != GPU and not one.worker:
                where = f"free on {one.name}"
            rooms[label] = (where, one.free_bytes)
        for label, (where, there) in rooms.items():
            yield Shortage(where, there, label, sum(p.nbytes for p in parts_on(label, parts)))

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that have any layers, or tensors of others."""
        everything = self.spec.num_layers + 1
        alone = everything if self.gpu_layers < 0 else min(self.gpu_layers, everything)
        counts = self.counts or (alone,)
        counts = (*counts, *[0] * (len(self.machine.accelerators) - len(counts)))
        named = zip(self.machine.labels, counts, self.machine.accelerators, strict=False)
        used = {label for _, label in self.overrides}
        return tuple(
            Device(label, count, one.name, one.worker, one.number, one.description, one.free_bytes)
            for label, count, one in named
            if count or label in used
        )

    @cached_property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """Tensors that do not lie where their layers do, as of `RunConfig`.

        Raises UnsupportedError for a device that is not there.
        """
        asked = self.request.override_tensor
        if self.backend == ONNX or (asked is None and not self.experts_here):
            return ()
        if asked is None:
            asked = (experts_on_host(self.experts_here),)
        places = {"CPU": HOST}
        for label, one in zip(self.machine.labels, self.machine.accelerators, strict=True):
            places[one.name] = label
        found = []
        for text in asked:
            pattern, _, name = text.rpartition("=")
            if name not in places:
                raise UnsupportedError(
                    f"--override-tensor names {name}, and there is no such device",
                    hint=f"use {', '.join(places)}",
                )
            found.append((pattern, places[name]))
        return tuple(found)

    @property
    def _uses_gpu(self) -> bool:
        return not self.counts or any(not one.worker for one in self.devices)

    @property
    def _is_apart(self) -> bool:
        """Whether each user has cells of its own: among others' sums would have another order."""
        return self.request.exact and self.users > 1

    def cells(self, context: int) -> int:
        """Tokens the cache has room for, of all users together."""
        if self._is_apart:
            return self.users * padded(context)
        return context + self.more_cells

    def max_nodes(self, draft_max: int) -> int:
        """Nodes of a step: the roots of all users, and one longest draft."""
        return draft_max + self.users

    def config(self, context: int, batch: int, draft_max: int) -> RunConfig:
        """How the model is loaded with these sizes."""
        return replace(self._config(context, batch, draft_max), mapped=self.mapped)

    def _config(self, context: int, batch: int, draft_max: int) -> RunConfig:
        """As `config`, which also says whether the file is mapped."""
        reads = self.draft_spec.reads if self.draft_spec is not None else None
        # Drafts are chains where `LlamaContext` finds so.
        has_head, spec = self.has_head or reads is not None, self.spec
        is_chained = spec.keeps_state or spec.sliding_window or has_head or self._is_apart
        return RunConfig(
            context_size=context,
            batch_size=max(batch, self.max_nodes(draft_max)),
            max_nodes=self.max_nodes(draft_max),
            max_leaves=1 if is_chained else most_leaves(self.drafter, draft_max),
            threads=self.threads,
            kv_type_k=self.kv_type_k,
            kv_type_v=self.kv_type_v,
            gpu_layers=self.gpu_layers,
            devices=self.devices,
            overrides=self.overrides,
            kernels=self.kernels,
            packed_file=self.keeps_packed,
            expert_bytes=self.expert_bytes,
            users=self.users,
            cells=self.cells(context),
            exact=self.request.exact,
            drafter=self.drafter,
            snapshots=snapshots_of(self.spec, draft_max),
            head=self.has_head and draft_max > 0,
            captured_layers=reads.layers if reads is not None and draft_max else (),
            drafts_itself="window" in self.drafter.split(",") and draft_max > 0,
            states=self.states,
            disk_cache_bytes=self._disk_cache_bytes,
            projector=self.projector.path if self.projector else None,
            image_tokens=self.image_tokens,
            lora=self.lora,
            backend=self.backend,
            device=self.device,
        )

    def _draft_config(self, config: RunConfig) -> RunConfig:
        assert self.draft_spec is not None
        return draft_config(config, self.draft_spec, self.spec, mapped=self.draft_mapped)


def largest_fitting(sizes: Sequence[int], excess_bytes: Callable[[int], int]) -> int | None:
    """The largest of ascending sizes that fits, or None: asked of few, as each is simulated.

    What is allocated grows nearly linearly. The next size asked of is where a line between the two
    nearest ones crosses the limit; every third one is in the middle, should it not be a line.
    """
    if not sizes:
        return None
    low, high = 0, len(sizes) - 1
    if (above := excess_bytes(sizes[high])) <= 0:
        return sizes[high]
    if (below := excess_bytes(sizes[low])) > 0:
        return None
    for turn in itertools.count(1):
        if high - low == 1:
            break
        crossing = sizes[low] + (sizes[high] - sizes[low]) * -below // (above - below)
        middle = bisect_right(sizes, crossing) - 1 if turn % 3 else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        if (excess := excess_bytes(sizes[middle])) <= 0:
            low, below = middle, excess
        else:
            high, above = middle, excess
    return sizes[low]


def _draft_parts(wanted: ContextRequest, answer: Allocation) -> tuple[Component, ...]:
    return beside_another("draft", wanted.spec, footprint(wanted.spec, wanted.config, answer))


def snapshots_of(spec: ModelSpec | None, draft_max: int) -> int:
    """Copies of a recurrent state that drafts take, besides the one behind the last token."""
    return draft_max if spec is not None and spec.has_snapshots else 0


def smallest_batch(draft_max: int) -> int:
    """The least batch there is that has room for a step with this draft."""
    return next(size for size in reversed(BATCH_SIZES) if size > draft_max)


def parts_on(label: str, parts: Iterable[Component]) -> Iterator[Component]:
    """The components on a device, also those of a GPU in the processor's memory."""
    return (part for part in parts if part.device == label or part.name.startswith(f"{label}_"))
