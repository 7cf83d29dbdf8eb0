"""How many layers each of several devices takes: the host, GPUs, workers.

A token passes through all of them, one after the other, so that a step takes the sum of what each
one's bytes take there, and of the trips to workers. The fastest device is filled first, then the
next one; the slower ones are left out where the rest fits without them. How many bytes a second a
device moves is measured, by the worker itself; a GPU of this machine counts as faster than all.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from edgespec.memory.bytes.footprint import weights_parts
from edgespec.memory.bytes.shape import HOST
from edgespec.memory.bytes.simulation import Wanted
from edgespec.memory.plan.layout import Layout, Offloaded

_TRIPS = 2  # of a step to a worker: what it needs goes there, what it computed is fetched
_HOST = -1  # among the numbers of accelerators


def spread(layout: Layout) -> tuple[int, ...]:
    """Layers by accelerator: those asked for, or the fastest way that fits.

    Where nothing fits, as much as fits on each device: the refusal says which one is full.
    """
    asked = layout.request.gpu_layers
    order = sorted(range(len(layout.machine.accelerators)), key=lambda i: -_speed(layout, i))
    if asked is not None:
        everything = layout.spec.num_layers + 1
        return _asked_for(layout, order, everything if asked < 0 else min(asked, everything))
    ways = [_filled(layout, order[:count]) for count in range(len(order) + 1)]
    fitting = [way for way in ways if not _is_full(layout, way)]
    return min(fitting, key=lambda way: step_s(layout, way)) if fitting else ways[-1]


def step_s(layout: Layout, counts: Sequence[int]) -> float:
    """Seconds of a step over one token, estimated: bytes over bandwidth, and trips."""
    with_them = replace(layout, offloaded=Offloaded.shared(counts))
    nbytes: dict[str, int] = {}
    shape = with_them.shape(*_least(layout))
    (answer,) = layout.machine.sizes([Wanted(layout.spec, shape)])
    for part in weights_parts(layout.spec, shape, answer):
        nbytes[part.device] = nbytes.get(part.device, 0) + part.nbytes
    seconds = nbytes.pop(HOST) / _speed(layout, _HOST)
    for i, label in enumerate(layout.machine.labels):
        if label in nbytes:
            latency_s = layout.machine.accelerators[i].latency_s
            seconds += nbytes[label] / _speed(layout, i) + _TRIPS * latency_s
    return seconds


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
    placed = replace(layout, offloaded=Offloaded.shared(counts))
    for shortage in placed.shortages(placed.footprint(*_least(layout))):
        yield shortage.device or HOST


def _least(layout: Layout) -> tuple[int, int, int]:
    """The sizes that there has to be room for: context, batch and draft."""
    return layout.contexts.least, layout.least_batch, layout.request.draft_max or 0
