"""How many layers each of several devices takes: the host, GPUs, workers.

A token passes through all of them, one after the other, so that a step takes the sum of what each
one's bytes take there, and of the trips to workers. The fastest device is filled first, then the
next one; the slower ones are left out where the rest fits without them. How many bytes a second a
device moves is measured, by the worker itself; a GPU of this machine counts as faster than all.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from edgespec.memory.bytes.footprint import multiplied_tensors
from edgespec.memory.bytes.shape import HOST
from edgespec.memory.plan.layout import Layout, Offloaded

# Times that a step waits for a worker: only what is fetched has an answer. Of a layer whose experts
# lie here that are its input, the numbers of its experts and their weights. With 10 ms added to
# each way 1.2 were measured, and 2.1 to 2.8 for such a layer.
_TRIPS, _TRIPS_OF_EXPERTS = 1, 3
_HOST = -1  # among the numbers of accelerators
EXPERTS = "exps."  # in names of tensors
_LAYER = re.compile(r"blk\.(\d+)\.")


def spread(layout: Layout) -> Layout:
    """With layers by accelerator: those asked for, or the fastest way that fits.

    Experts of some layers may lie here instead of whole layers. Where nothing fits, as much as fits
    on each device: the refusal says which one is full.
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
    fitting = [way for way in ways if not _is_full(way, way.offloaded.counts)]
    if not fitting:
        return ways[len(order)]
    return min(fitting, key=lambda way: step_s(way, way.offloaded.counts))


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
    return replace(layout, offloaded=Offloaded.shared(counts))


def step_s(layout: Layout, counts: Sequence[int]) -> float:
    """Seconds of a step over one token, estimated: bytes over bandwidth, and trips.

    A layer on a worker whose experts lie here comes back in parts.
    """
    placed = _shared(layout, counts)
    seconds, first = 0.0, layout.spec.num_layers + 1 - sum(counts)
    read = read_bytes(placed)
    seconds += read.get(HOST, 0) / _speed(layout, _HOST)
    for i, (label, count) in enumerate(zip(layout.machine.labels, counts, strict=True)):
        if count:
            trips = _TRIPS + _TRIPS_OF_EXPERTS * max(0, min(layout.experts_here - first, count))
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
    shared = [one.label for one in layout.shares for _ in range(one.layers)]
    return [HOST] * (layout.spec.num_layers + 1 - len(shared)) + shared


def _speed(layout: Layout, number: int) -> float:
    """Bytes a second of an accelerator or the host; the host's where a worker's is not known."""
    host = layout.machine.bytes_per_s or 1.0
    if number == _HOST:
        return host
    one = layout.machine.accelerators[number]
    return (one.bytes_per_s or host) if one.worker else math.inf


def _asked_for(layout: Layout, order: Sequence[int], total: int) -> tuple[int, ...]:
    """So many layers on the fastest devices with room; the last one takes what fits nowhere."""
    counts = [0] * len(order)
    for number in order:
        counts[number] = _most(layout, counts, number, total - sum(counts))
    counts[order[-1]] += total - sum(counts)
    return _eased(layout, _topped_up(layout, counts, order), order, keeps_all=True)


def _filled(layout: Layout, numbers: Sequence[int]) -> tuple[int, ...]:
    """These devices, and the host, filled from the fastest one on; the host takes the rest."""
    counts = [0] * len(layout.machine.accelerators)
    left = layout.spec.num_layers + 1
    for number in sorted([_HOST, *numbers], key=lambda i: -_speed(layout, i)):
        if number == _HOST:
            left = _least_off_host(layout, counts, left)
        else:
            counts[number] = _most(layout, counts, number, left)
            left -= counts[number]
    by_speed = sorted(numbers, key=lambda i: -_speed(layout, i))
    return _eased(layout, _topped_up(layout, counts, by_speed), by_speed)


def _topped_up(layout: Layout, counts: list[int], order: Sequence[int]) -> list[int]:
    """Layers moved to faster devices that have room since the head is on another one.

    Each was filled as the last one, with the head. One layer stays with every device that has any.
    """
    for faster, slower in itertools.pairwise(order):
        label = layout.machine.labels[faster]
        ways = [_moved(counts, faster, slower, count) for count in range(counts[slower])]
        fitting = bisect_left(ways, True, key=partial(_lacks_room, layout, label))
        counts = ways[fitting - 1] if fitting else counts
    return counts


def _lacks_room(layout: Layout, label: str, counts: Sequence[int]) -> bool:
    return label in _full(layout, counts)


def _moved(counts: Sequence[int], to: int, giver: int, count: int) -> list[int]:
    change = {to: count, giver: -count}
    return [other + change.get(i, 0) for i, other in enumerate(counts)]


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


def _most(layout: Layout, counts: Sequence[int], number: int, left: int) -> int:
    """Layers that fit on a device, of those that are left."""
    label = layout.machine.labels[number]
    sizes = range(left + 1)

    def is_too_much(count: int) -> bool:
        there = [count if i == number else other for i, other in enumerate(counts)]
        return label in _full(layout, there)

    return max(0, bisect_left(sizes, True, key=is_too_much) - 1)


def _least_off_host(layout: Layout, counts: Sequence[int], left: int) -> int:
    """Layers that the host has no room for, of those that are left."""
    first = 0 if not counts else _emptiest(counts)

    def fits(count: int) -> bool:
        there = [other + count * (i == first) for i, other in enumerate(counts)]
        return HOST not in _full(layout, there)

    return bisect_left(range(left), True, key=fits)


def _emptiest(counts: Sequence[int]) -> int:
    return min(range(len(counts)), key=lambda i: counts[i])


def _is_full(layout: Layout, counts: Sequence[int]) -> bool:
    return any(_full(layout, counts))


def _full(layout: Layout, counts: Sequence[int]) -> Iterator[str]:
    """Labels of devices without room for so many layers; the host stands for a budget, too."""
    placed = _shared(layout, counts)
    for shortage in placed.shortages(placed.footprint(*_least(layout))):
        yield shortage.device or HOST


def _least(layout: Layout) -> tuple[int, int, int]:
    """The sizes that there has to be room for: context, batch and draft."""
    return layout.contexts.least, layout.least_batch, layout.request.draft_max or 0
