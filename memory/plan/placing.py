"""Where a run's cache, layers and steps lie, and in which types: all that is settled before sizes.

Each function takes the layout so far and returns the next one with the choice that made it. A type
of the cache that costs quality is never chosen unasked.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgespec.errors import DoesNotFitError, UnsupportedError
from edgespec.memory.bytes.config import HOST, KV_FLOATS, KV_TYPE_BYTES, MEBIBYTE, kv_name, kv_pair
from edgespec.memory.bytes.experts import (
    EVEN,
    PAGE,
    USUAL,
    Experts,
    Missing,
    counted,
    experts_of,
    power_law,
)
from edgespec.memory.bytes.footprint import kv_type_fits, multiplied_tensors
from edgespec.memory.device.disk import disk_bandwidth
from edgespec.memory.plan.layout import DRAFT_SIZES, Layout, Losses
from edgespec.memory.plan.options import ONNX
from edgespec.memory.plan.plan import Choice, Request
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.models.onnx.facts import EXACTLY_PACKED
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

# Taken by themselves where context is preferred, in this order. Keys are what is fragile: with
# Qwen2.5 1.5B q8_0/q4_0 loses 0.005 nats, q5_0 2.9 and q4_0 6.0 (docs/memory.md: three files).
SMALLER_KV_TYPES = ("q8_0", "q8_0/q4_0", "q5_0", "q4_0")
# KL divergence in nats from f16: about what 4-bit weights lose of a small model. A type that loses
# more is never chosen, and warned of where it is asked for.
MOST_KV_LOSS = 0.1


def kv_types(
    request: Request, specs: Sequence[ModelSpec], losses: Losses
) -> tuple[str, str, Choice]:
    """Types of K and V. Raises UnsupportedError for one that these models cannot have."""
    key, value = request.kv_types
    if request.backend == ONNX:
        if request.asks_kv_type and (key, value) != ("f32", "f32"):
            raise UnsupportedError(
                f"a KV cache of {kv_name(key, value)} is not possible with --backend onnx",
                hint="its attention keeps f32; use --backend llamacpp for other types",
            )
        reason = "what ONNX Runtime's attention computes with"
        return "f32", "f32", Choice("kv_type", "f32", reason)
    name = kv_name(key, value)
    for spec in specs:
        if not all(kv_type_fits(spec, kind) for kind in (key, value)):
            raise UnsupportedError(
                f"a KV cache of {name} needs heads of a multiple of 32 values; those of "
                f"{spec.path.name} have {min(spec.key_length)}",
                hint="use --kv-type f16",
            )
    reason = "half precision costs no measurable quality"
    if request.asks_kv_type:
        reason = (
            "as asked" if {key, value} <= {*KV_FLOATS} else f"as asked; {loss_of(name, losses)}"
        )
    return key, value, Choice("kv_type", name, reason)


def loss_of(kind: str, losses: Losses) -> str:
    """What a type of cache loses with the file of a plan, in words."""
    if kind not in losses:
        return "what it loses is measured by the first load"
    loss = losses[kind]
    said = f"loses {loss:.2g} nats against f16, measured"
    return said if loss <= MOST_KV_LOSS else f"{said}: answers are no longer this model's"


def with_exact_cache(layout: Layout, choice: Choice) -> tuple[Layout, Choice]:
    """For `--exact`: types with which a step of one token rounds like all others.

    edgespec's attention does with every type. llama.cpp's on the CPU sums a single row in two parts
    from 512 cells on, unless K and V have different types. bf16 for K costs nothing in decoding;
    reading a prompt loses its tiled path (1.25x slower at 800 tokens, 1.7x at 3000).
    """
    if not layout.request.exact or layout.backend == ONNX or choice.value != "f16":
        return layout, choice
    if layout.attends:
        reason = "--exact: edgespec's attention rounds all steps alike"
        return layout, Choice("kv_type", "f16", reason)
    reason = "--exact: makes one-token steps round like batches"
    return replace(layout, kv_type_k="bf16"), Choice("kv_type", "bf16/f16", reason)


def with_smaller_cache(layout: Layout, choice: Choice, losses: Losses) -> tuple[Layout, Choice]:
    """With `--prefer context` smaller types, where f16 does not reach all of it.

    q8_0 unless it was measured to lose too much; others only where they were measured not to, and
    those before them do not reach all of the context either. `choice` is the one so far.
    """
    request = layout.request
    is_free = request.prefer == "context" and not request.asks_kv_type and not request.exact
    if not is_free or layout.backend == ONNX:
        return layout, choice
    # With room for any draft: a larger type must not cost what a smaller one had room for.
    draft = request.draft_max or DRAFT_SIZES[-1] if layout.has_drafter else 0
    for kind in SMALLER_KV_TYPES:
        if layout.fits(layout.contexts.longest, layout.least_batch, draft):
            break
        if not may_choose(kind, layout.specs, losses):
            continue
        key, value = kv_pair(kind)
        layout = replace(layout, kv_type_k=key, kv_type_v=value)
        times = 2 * KV_TYPE_BYTES["f16"] / (KV_TYPE_BYTES[key] + KV_TYPE_BYTES[value])
        reason = f"--prefer context: {times:.1f} times the context of f16; {loss_of(kind, losses)}"
        choice = Choice("kv_type", kind, reason)
    return layout, choice


def may_choose(kind: str, specs: Sequence[ModelSpec], losses: Losses) -> bool:
    """Whether a cache of this type may be chosen or proposed where nobody asked for it."""
    loss = losses.get(kind, 0.0 if kind == "q8_0" else math.inf)
    fits = all(kv_type_fits(spec, one) for spec in specs for one in kv_pair(kind))
    return loss <= MOST_KV_LOSS and fits


def with_layers_placed(layout: Layout) -> tuple[Layout, Choice]:
    """All layers on the GPU where they fit, else the most that do, or as many as were asked for.

    Several devices share them by bytes and speed (`spread`).
    Raises UnsupportedError where they were asked for and there is no GPU.
    """
    asked = layout.request.gpu_layers
    has_devices = bool(layout.machine.accelerators) and layout.backend != ONNX
    if asked and asked > 0 and not has_devices:
        raise UnsupportedError(
            f"--gpu-layers {asked} is not possible: {_missing_gpu(layout)}",
            hint="`edgespec doctor` says what is missing; or leave the option out",
        )
    if layout.request.workers and layout.backend == ONNX:
        raise UnsupportedError(
            "--workers is not possible with ONNX Runtime", hint="use --backend llamacpp"
        )
    if layout.request.workers and layout.switch_spec is not None:
        raise UnsupportedError(
            "--workers is not possible with --switch", hint="leave one of them out"
        )
    if has_devices and layout.machine.is_split:
        layout = spread(layout)
    elif has_devices and asked is not None:
        layout = replace(layout, gpu_layers=asked)
    elif has_devices:
        layout = _on_gpu(layout)
    reason = _layers_reason(layout)
    return layout, Choice("gpu_layers", layout.gpu_layers, reason)


def _on_gpu(layout: Layout) -> Layout:
    """As many layers on the GPU as fit, or all but some experts.

    Whatever leaves less on the host for a token to read: that is what takes its time.
    """
    whole = replace(layout, gpu_layers=_most_on_gpu(layout))
    if whole.gpu_layers < 0 or not may_keep_experts(layout):
        return whole
    layers = range(layout.spec.num_layers + 1)
    all_there = replace(layout, gpu_layers=-1)
    least = bisect_left(
        layers, True, key=lambda count: _fits(replace(all_there, experts_here=count))
    )
    kept = replace(all_there, experts_here=min(least, layout.spec.num_layers))
    if least not in layers:  # not even without experts
        kept = replace(kept, gpu_layers=_most_on_gpu(kept))
    return min(whole, kept, key=lambda way: read_bytes(way).get(HOST, 0))


def _most_on_gpu(layout: Layout) -> int:
    """Layers that fit; -1 for all of them and the head."""
    everything = layout.spec.num_layers + 1

    def is_too_much(layers: int) -> bool:
        count = -1 if layers == everything else layers
        return not _fits(replace(layout, gpu_layers=count))

    if not is_too_much(everything):
        return -1
    return max(0, bisect_left(range(everything), True, 1, key=is_too_much) - 1)


def _fits(layout: Layout) -> bool:
    return layout.fits(*_least(layout))


def _missing_gpu(layout: Layout) -> str:
    if layout.backend == ONNX:
        return "layers are offloaded by llama.cpp alone"
    return layout.machine.missing_gpu


def _layers_reason(layout: Layout) -> str:
    asked, machine = layout.request.gpu_layers, layout.machine
    if machine.is_split and layout.backend != ONNX:
        if layout.devices:
            shares = ", ".join(f"{one.layers} on {one.name}" for one in layout.devices)
            host = layout.spec.num_layers + 1 - sum(layout.counts)
            how = "as asked" if asked is not None else "the fastest ones filled first"
            reason = f"{shares}, {host} here; {how}"
        else:
            room = "this machine has room for all, and steps take less time"
            reason = "as asked" if asked == 0 else room
    elif asked is not None:
        reason = "as asked"
    elif layout.backend == ONNX or not machine.accelerators:
        reason = _missing_gpu(layout)
    else:
        names = ", ".join(gpu.description for gpu in machine.accelerators)
        reason = f"{'all' if layout.gpu_layers < 0 else 'as many as'} fit into {names}"
    if layout.request.override_tensor and layout.backend != ONNX:
        return f"{reason}; tensors as --override-tensor says"
    if not layout.experts_here:
        return reason
    # What a token reads here with experts here, and what it would with whole layers elsewhere.
    override = replace(layout.request, override_tensor=())
    whole = replace(layout, request=override, experts_here=0, gpu_layers=0, counts=())
    whole, _ = with_layers_placed(whole)
    ours, other = (read_bytes(way).get(HOST, 0) >> 20 for way in (layout, whole))
    layers = sum(one.layers for one in whole.devices)
    return (
        f"{reason}; experts of the first {layout.experts_here} layers here: a token reads {ours} "
        f"MiB of this machine's memory, and {other} MiB with {layers} whole layers elsewhere "
        "(--n-cpu-moe 0)"
    )


def device_of(layout: Layout) -> Choice:
    """Where steps run, and why there."""
    reason = "as asked"
    if layout.request.device == "auto":
        reason = "follows from the number of layers on GPUs"
        if layout.backend == ONNX:
            reason = "ONNX Runtime's CPU kernels; --device asks for a GPU or an NPU"
    return Choice("device", layout.device, reason)


def kernels_of(layout: Layout) -> Choice:
    """Whether edgespec's own matrix kernels multiply, or the backend's.

    Raises UnsupportedError where ours were asked for and cannot be used.
    """
    unsupported, asked = layout.kernels_unsupported, layout.request.kernels
    value = "on" if layout.kernels else "off"
    if asked == "on" and unsupported:
        raise UnsupportedError(
            f"--kernels on is not possible: {unsupported}",
            hint="leave it out; `edgespec doctor` says what kernels there are",
        )
    if asked != "auto":
        return Choice("kernels", value, "as asked")
    reason = unsupported or "edgespec's own, which have this file's types"
    return Choice("kernels", value, reason)


def mapping_of(layout: Layout) -> Choice:
    """Whether the weights are used as they lie in their file, or copied into memory."""
    return Choice("mapped", "yes" if layout.mapped else "no", _mapped_reason(layout))


def _mapped_reason(layout: Layout) -> str:
    if layout.device in ("gpu", "npu") and layout.backend == ONNX:
        return "the provider makes a copy of its own for the device, which is not counted"
    if layout.spec.format == ONNX_FORMAT:
        return "weights are pages of the folder's file, beside copies as the kernels want them"
    if layout.backend == ONNX:
        kinds = sorted({t.type.name for t in layout.spec.tensors.values() if len(t.dims) > 1})
        changed = [kind for kind in kinds if kind not in EXACTLY_PACKED]
        note = f"; {', '.join(changed)} weights are kept in 8 bits" if changed else ""
        return f"packed weights are pages of the converted file{note}"
    if layout.mapped:
        return "weights are used as they lie in the file, whose pages are shared"
    reason = "weights are rewritten for this device; mapping the file would hold them twice"
    if layout.expert_bytes:
        return f"{reason}; experts are read from a file in the cache folder"
    if layout.keeps_packed:
        return f"{reason}; rewritten ones are pages of a file in the cache folder"
    return reason


# -- layers on several devices: the host, GPUs, workers --------------------------------
#
# A token passes through all of them, one after the other, so that a step takes the sum of what each
# one's bytes take there, and of the trips to workers. The fastest device is filled first, then the
# next one; the slower ones are left out where the rest fits without them. How many bytes a second a
# device moves is measured, by the worker itself; a GPU of this machine counts as faster than all.

EXPERTS = "exps."  # in names of tensors
_LAYER = re.compile(r"blk\.(\d+)\.")


def spread(layout: Layout) -> Layout:
    """With layers by accelerator: those asked for, or the fastest way that fits.

    Experts of some layers may lie here instead of whole layers. Where nothing fits, as much as fits
    on each device: the error says which one is full.
    """
    asked = layout.request.gpu_layers
    order = sorted(range(len(layout.machine.accelerators)), key=lambda i: -_speed(layout, i))
    everything = layout.spec.num_layers + 1
    if asked is not None:
        total = everything if asked < 0 else min(asked, everything)
        return _shared(layout, _asked_for(layout, order, total))
    ways = [_shared(layout, _filled(layout, order[:count])) for count in range(len(order) + 1)]
    if may_keep_experts(layout):
        ways += [_with_experts_here(layout, order[:count]) for count in range(1, len(order) + 1)]
    fitting = [way for way in ways if not any(_full(way, way.counts))]
    if not fitting:
        return ways[len(order)]
    return min(fitting, key=lambda way: step_s(way, way.counts))


def may_keep_experts(layout: Layout) -> bool:
    """Whether experts of some layers may lie here: there are any, and nobody said where."""
    asked = layout.request.override_tensor
    return asked is None and any(EXPERTS in name for name in layout.spec.tensors)


def _with_experts_here(layout: Layout, numbers: Sequence[int]) -> Layout:
    """All layers on these devices but for the experts of as few as possible.

    If there is no room even without experts: as many layers as fit.
    """

    def filled(count: int) -> Layout:
        kept = replace(layout, experts_here=count)
        return _shared(kept, _filled(kept, numbers))

    everything = layout.spec.num_layers + 1
    counts = range(everything)
    least = bisect_left(counts, True, key=lambda count: filled(count).gpu_layers == everything)
    return filled(min(least, layout.spec.num_layers))


def _shared(layout: Layout, counts: Sequence[int]) -> Layout:
    return replace(layout, gpu_layers=sum(counts), counts=tuple(counts))


def step_s(layout: Layout, counts: Sequence[int]) -> float:
    """Seconds of a step over one token, estimated: bytes over bandwidth, and trips.

    A layer on a worker whose experts lie here comes back in parts.
    """
    placed = _shared(layout, counts)
    seconds, first = 0.0, layout.spec.num_layers + 1 - sum(counts)
    read = read_bytes(placed)
    seconds += read.get(HOST, 0) / _speed(layout, None)
    for i, (label, count) in enumerate(zip(layout.machine.labels, counts, strict=True)):
        if count:
            # Only what is fetched has an answer: of a layer whose experts lie here its input, the
            # numbers of its experts and their weights. With 10 ms added to each way a step waited
            # 1.2 times, and 2.1 to 2.8 times for such a layer.
            trips = 1 + 3 * max(0, min(layout.experts_here - first, count))
            seconds += read.get(label, 0) / _speed(layout, i)
            seconds += trips * layout.machine.accelerators[i].latency_s
        first += count
    return seconds


def read_bytes(layout: Layout) -> dict[str, int]:
    """Bytes of weights that a step over one token reads, by label of the device.

    Of embeddings it reads a row, unless they are the head too, and of experts those it uses.
    """
    spec, found = layout.spec, dict[str, int]()
    places = _places(layout)
    used = spec.num_experts_used / spec.num_experts if spec.num_experts else 1.0
    for tensor in multiplied_tensors(spec):
        number = _LAYER.match(tensor.name)
        layer = min(int(number[1]), spec.num_layers) if number else spec.num_layers
        is_expert = EXPERTS in tensor.name
        label = HOST if is_expert and layer < layout.experts_here else places[layer]
        size = round(tensor.data_bytes * used) if is_expert else tensor.data_bytes
        found[label] = found.get(label, 0) + size
    return found


def _places(layout: Layout) -> list[str]:
    """Where each layer lies, and the head behind them."""
    shared = [one.label for one in layout.devices for _ in range(one.layers)]
    return [HOST] * (layout.spec.num_layers + 1 - len(shared)) + shared


def _speed(layout: Layout, number: int | None) -> float:
    """Bytes a second of an accelerator, or of the host, which None is; the host's where a worker's
    is not known."""
    host = layout.machine.bytes_per_s or 1.0
    if number is None:
        return host
    one = layout.machine.accelerators[number]
    return (one.bytes_per_s or host) if one.worker else math.inf


def _asked_for(layout: Layout, order: Sequence[int], total: int) -> tuple[int, ...]:
    """So many layers on the fastest devices with room; the last one takes what fits nowhere."""
    counts = [0] * len(order)
    for place, number in enumerate(order):
        left = total - sum(counts)
        counts[number] = _most(layout, counts, number, order[place + 1 :], left)
    counts[order[-1]] += total - sum(counts)
    return _eased(layout, counts, order, keeps_all=True)


def _filled(layout: Layout, numbers: Sequence[int]) -> tuple[int, ...]:
    """These devices, and the host, filled from the fastest one on; the host takes the rest."""
    counts = [0] * len(layout.machine.accelerators)
    left = layout.spec.num_layers + 1
    order = sorted([None, *numbers], key=lambda i: -_speed(layout, i))
    for place, number in enumerate(order):
        if number is None:
            left = _least_off_host(layout, counts, left)
        else:
            counts[number] = _most(layout, counts, number, order[place + 1 :], left)
            left -= counts[number]
    return _eased(layout, counts, [number for number in order if number is not None])


def _eased(
    layout: Layout, counts: list[int], order: Sequence[int], *, keeps_all: bool = False
) -> tuple[int, ...]:
    """One layer after the other moved from devices that are full to the next slower one, or home.

    A device that was filled as the last one had the head, which a later one took from it.
    """
    nexts: dict[int, int] = dict(itertools.pairwise(order))
    numbers = {label: number for number, label in enumerate(layout.machine.labels)}
    for _ in range(len(order) * sum(counts)):
        full = [numbers[label] for label in _full(layout, counts) if label != HOST]
        movable = [one for one in full if counts[one] and (one in nexts or not keeps_all)]
        if not movable:
            break
        counts[movable[0]] -= 1
        if movable[0] in nexts:
            counts[nexts[movable[0]]] += 1
    return tuple(counts)


def _most(
    layout: Layout, counts: Sequence[int], number: int, nexts: Sequence[int | None], left: int
) -> int:
    """Layers that fit on a device, of those that are left.

    The others are taken to be on the next device, which may have the head then.
    """
    label = layout.machine.labels[number]

    def is_too_much(count: int) -> bool:
        there = [*counts[:number], count, *counts[number + 1 :]]
        if nexts and nexts[0] is not None:
            there[nexts[0]] = left - count
        return label in _full(layout, there)

    return max(0, bisect_left(range(left + 1), True, key=is_too_much) - 1)


def _least_off_host(layout: Layout, counts: Sequence[int], left: int) -> int:
    """Layers that the host has no room for, of those that are left."""
    first = counts.index(min(counts)) if counts else 0  # the emptiest device

    def fits(count: int) -> bool:
        there = [other + count * (i == first) for i, other in enumerate(counts)]
        return HOST not in _full(layout, there)

    return bisect_left(range(left), True, key=fits)


def _full(layout: Layout, counts: Sequence[int]) -> Iterator[str]:
    """Labels of devices without room for so many layers; the host stands for a budget, too."""
    placed = _shared(layout, counts)
    for shortage in placed.shortages(placed.footprint(*_least(layout))):
        yield shortage.device or HOST


def _least(layout: Layout) -> tuple[int, int, int]:
    """The sizes that there has to be room for: context, batch and draft."""
    return layout.contexts.least, layout.least_batch, layout.request.draft_max or 0


# -- experts on disk: mixtures whose experts memory has no room for ---------------------
#
# All else is in memory: attention, shared experts, the cache. What a plan leaves of the budget goes
# to experts, and others are read from the packed file when a router chooses them.

_EXPERTS_KIND = "experts"
# How many times as much other texts read as the one that was counted.
_OTHER_TEXTS = 1.2


def with_experts_on_disk(layout: Layout) -> Layout:
    """A layout as it is, if it fits or could not read experts; else with the fewest in memory.

    These are all of one layer, which the tokens of a prompt use together.
    """
    is_elsewhere = layout.gpu_layers != 0 or bool(layout.overrides) or bool(layout.lora)
    # Other systems give memory back by larger pages, or not at once: nobody has tried them.
    gives_back = sys.platform == "linux" and mmap.PAGESIZE == PAGE
    is_off = layout.request.packed_file == "off" or not gives_back
    if not layout.spec.num_experts or is_elsewhere or is_off or layout.switch_spec is not None:
        return layout
    experts = experts_of(layout.spec) if layout.kernels else None
    if experts is None or layout.fits(layout.contexts.least, layout.least_batch, 0):
        return layout
    return replace(layout, expert_bytes=experts.layer_bytes)


def with_experts_kept(layout: Layout, excess_bytes: int) -> Layout:
    """A layout that keeps as many experts as its sizes leave room for."""
    kept = layout.expert_bytes + max(0, -excess_bytes)
    return replace(layout, expert_bytes=min(kept, _experts(layout.spec).nbytes))


def _experts(spec: ModelSpec) -> Experts:
    found = experts_of(spec)
    assert found is not None, "a layout reads them"
    return found


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """What steps read of experts, of which memory has so many bytes.

    `missing` say how evenly routers choose: least, as counted or as is usual, and most.
    """

    experts: Experts
    kept: int
    missing: tuple[Missing, Missing, Missing]
    bytes_per_s: float
    source: str

    def choice(self) -> Choice:
        """How many experts a plan keeps, with what the others cost."""
        few, usual, many = (
            self.experts.read_bytes(self.kept, one) / MEBIBYTE for one in self.missing
        )
        return Choice(
            "experts",
            f"{self.kept / self.experts.nbytes:.0%} in memory",
            f"all do not fit: {usual:.3g} MiB a token are read ({few:.3g} to {many:.3g}), "
            + self.source,
        )

    def added_to(self, speed: SpeedModel) -> SpeedModel:
        """A model of speeds whose steps take what reading takes on top."""

        def added(missing: Missing) -> CostCurve:
            read = (
                self.experts.read_bytes(self.kept, missing, size)
                for size in range(len(speed.curve.base))
            )
            return speed.curve.longer([1e3 * nbytes / self.bytes_per_s for nbytes in read])

        fast, usual, slow = map(added, self.missing)
        return replace(speed, curve=usual, likely=(slow, fast))


def reads_of(layout: Layout) -> ExpertReads:
    """What a layout reads, by counts of earlier runs of its file where there are any."""
    spec, experts = layout.spec, _experts(layout.spec)
    missing = power_law(USUAL / 2), power_law(USUAL), power_law(EVEN)
    source = "by how evenly routers are known to choose"
    if (found := _stored_counts(spec)) is not None:
        known = counted(*found, experts.token_bytes / experts.nbytes)
        missing = (
            lambda part: known(part) / _OTHER_TEXTS,
            known,
            lambda part: min(1.0, known(part) * _OTHER_TEXTS),
        )
        source = "as counted"
    slabs = spec.num_layers * spec.num_experts * 3  # gate, up and down
    # Where a disk cannot be measured: what a virtual one gave for pieces of 864 KiB.
    speed = disk_bandwidth(spec.path, experts.nbytes // slabs) or 550e6
    return ExpertReads(experts, layout.expert_bytes, missing, speed, source)


def require_speed(layout: Layout, speeds: tuple[float, float]) -> None:
    """Raises DoesNotFitError for a speed, at best, that nobody would wait for unasked."""
    if speeds[1] < 0.5 and layout.request.packed_file != "on":
        raise DoesNotFitError(
            f"its experts do not fit into memory, and reading them leaves {speeds[1]:.2f} tokens/s "
            f"at best, with {layout.expert_bytes // MEBIBYTE} MiB of "
            f"{_experts(layout.spec).nbytes // MEBIBYTE} in memory",
            hint="`--packed-file on` does so all the same; or use a smaller model file",
        )


def keep_counts(spec: ModelSpec, again: Sequence[int], first: Sequence[int]) -> None:
    """Store a run's uses of experts, as `ExpertCounts` has them, for later plans of this file."""
    least = 32 * spec.num_layers * spec.num_experts_used  # of so many tokens it is worth a count
    if sum(again) + sum(first) >= least:
        cache.store(_EXPERTS_KIND, spec.fingerprint, {"again": again, "first": first})


def _stored_counts(spec: ModelSpec) -> tuple[list[int], list[int]] | None:
    """What `keep_counts` stored; None where there is nothing, or something else."""
    document = cache.load(_EXPERTS_KIND, spec.fingerprint) or {}
    again, first = document.get("again"), document.get("first")
    if not (isinstance(again, list) and isinstance(first, list) and len(again) == len(first)):
        return None
    is_counted = all(isinstance(one, int) and one >= 0 for one in (*again, *first))
    return (again, first) if is_counted else None
