"""What a draft model was worth on this device, kept between runs beside its other counts.

Imports no numpy, because plans are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from time import time
from typing import Any

from edgespec.drafting.calibration import merged_counts
from edgespec.memory.store.counts import added

# Rounds, the ms that they would have taken without the model, and the ms that it saved of these.
SAVINGS = ("rounds", "usual_ms", "saved_ms")
TIME = "time"  # of the last run that added to them, in seconds since the epoch
_LASTING_S = 30 * 24 * 3600.0  # texts change: after that long it is tried anew


def recalled(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """A document of `dated` without savings that are too old."""
    kept = dict(document or {})
    if not is_recent(kept.get(TIME)):
        for name in SAVINGS:
            kept.pop(name, None)
    return kept


def is_recent(seen: object) -> bool:
    """Whether a time of a document is so late that what it says decides."""
    return isinstance(seen, float) and 0.0 <= time() - seen <= _LASTING_S


def merged(
    now: Mapping[str, Any] | None, before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """The document to store: `now` is stored, and a process went from `before` to `after`.

    Counts and savings add up; what is a mean over time is that of `after`.
    """
    there = recalled(now)
    weighed = (*SAVINGS[1:], SAVINGS[0])  # rounds fade, and everything with them
    parts = [[_number(part.get(name)) for name in weighed] for part in (there, before, after)]
    savings = dict(zip(weighed, added(*parts), strict=True))
    return dated({**merged_counts(there, before, after), **savings}, there)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float) and isfinite(value) else 0.0


def dated(learned: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be stored after a run: as old as `before` if no round was added to it."""
    is_same = all(learned.get(name) == before.get(name) for name in SAVINGS)
    return {**learned, TIME: before.get(TIME, time()) if is_same else time()}
