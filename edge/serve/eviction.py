"""Which model is loaded next, and which ones leave for it. No threads and no clock.

The rule, which docs/serve.md tells users:

1. The model is loaded whose first request has waited longest. All that wait for it begin together.
2. What has to leave is idle and not pinned, and of least value (`Values`). A model that answers
   never leaves. Where that is not enough, the next one in line is looked at.
3. A request that waited longer than its patience is not overtaken any more, and the models that
   are in its way take no new requests until they are idle. So nobody waits for ever.
4. Patience is a multiple of the time that the load takes, so that most of the time is not spent on
   loading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 60.0
_LOADS = 4.0  # times that a load takes, before a request that waits for it has the right of way

Fits = Callable[[Collection[str]], bool]  # whether these models may be there at once


@dataclass(slots=True)
class _Entry:
    nbytes: int
    reload_s: float
    uses: int = 0
    value: float = 0.0


class Values:
    """What the models that are loaded are worth, by GreedyDual-Size with a count of uses:

        value = inflation + reload seconds / bytes x uses

    P. Cao and S. Irani, "Cost-Aware WWW Proxy Caching Algorithms" (1997); the uses since the load
    are L. Cherkasova's (GreedyDual-Size-Frequency, 1998). `inflation` is the value of the last
    model that left for another: whatever nobody uses any more falls behind what came since.
    """

    def __init__(self) -> None:
        self.inflation = 0.0
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, nbytes: int, reload_s: float) -> None:
        """A model was loaded."""
        self._entries[name] = _Entry(max(1, nbytes), reload_s, value=self.inflation)

    def use(self, name: str) -> None:
        """A request got its model."""
        entry = self._entries[name]
        entry.uses += 1
        entry.value = self.inflation + entry.reload_s / entry.nbytes * entry.uses

    def of(self, name: str) -> float:
        """What a loaded model is worth: seconds per byte."""
        return self._entries[name].value

    def remove(self, name: str, *, evicted: bool) -> None:
        """A model left: for another one, or because nobody used it."""
        entry = self._entries.pop(name)
        if evicted:
            self.inflation = max(self.inflation, entry.value)


class Seen(NamedTuple):
    """A model at a moment; `since_s` is when the first request came that waits for it, if any."""

    name: str
    is_ready: bool
    is_busy: bool = False
    is_pinned: bool = False
    since_s: float | None = None
    reload_s: float = 0.0


class Step(NamedTuple):
    """What happens next: a load, after others have left; and who takes no requests meanwhile."""

    load: str | None = None
    leaving: tuple[str, ...] = ()
    drained: frozenset[str] = frozenset()


def patience_s(reload_s: float) -> float:
    """How long a request lets others go on before it."""
    return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, _LOADS * reload_s))


def next_step(models: Sequence[Seen], values: Values, fits: Fits, now_s: float) -> Step:
    """The rule above. `fits` takes the names of models that would be there at once."""
    ready = [one for one in models if one.is_ready]
    waiting = [one for one in models if not one.is_ready and one.since_s is not None]
    for wanted in sorted(waiting, key=lambda one: one.since_s or 0.0):
        idle = [one for one in ready if not one.is_busy]
        leaving = _leaving(wanted, idle, ready, values, fits)
        if leaving is not None:
            return Step(wanted.name, leaving)
        if now_s - (wanted.since_s or 0.0) >= patience_s(wanted.reload_s):
            drained = _leaving(wanted, ready, ready, values, fits) or ()
            return Step(drained=frozenset(drained))
    return Step()


def _leaving(
    wanted: Seen, candidates: Iterable[Seen], ready: Sequence[Seen], values: Values, fits: Fits
) -> tuple[str, ...] | None:
    """The least valuable candidates without which a model fits; None where they do not suffice."""
    may_leave = [one for one in candidates if not one.is_pinned]
    order = sorted(may_leave, key=lambda one: (values.of(one.name), one.name))
    there = {one.name for one in ready} | {wanted.name}
    gone: list[str] = []
    for one in order:
        if fits(there):
            break
        there.remove(one.name)
        gone.append(one.name)
    if not fits(there):
        return None
    for name in gone[::-1]:  # what turned out not to be in the way stays
        if fits(there | {name}):
            there.add(name)
            gone.remove(name)
    return tuple(gone)
