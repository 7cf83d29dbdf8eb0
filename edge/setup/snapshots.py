"""What the snapshots of a recurrent state cost: plain steps with them and without.

A step may write a part of every snapshot, whatever it drafts. How much longer that makes plain
steps is measured once, in turns with a context that keeps none: the machine's speed drifts by more
than it is. So the step times of one number of snapshots tell of the others.
Imports no inference library and no numpy.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.memory.plan.layout import DRAFT_SIZES
from edgespec.memory.plan.settings import Settings
from edgespec.memory.times.curve import CostCurve
from edgespec.models.spec import ModelSpec
from edgespec.setup.stored import stored_curve, stored_snapshot_costs


def snapshot_cost(spec: ModelSpec, settings: Settings, count: int) -> float | None:
    """How many times as long plain steps take with so many snapshots as without; None: unknown.

    Each one costs as much as each of those that were measured.
    """
    costs = stored_snapshot_costs(spec, settings)
    if not count or not costs:
        return None if count else 1.0
    nearest = min(costs, key=lambda known: abs(known - count))
    return 1.0 + (costs[nearest] - 1.0) * count / nearest


def curve_with(spec: ModelSpec, settings: Settings) -> CostCurve | None:
    """Step times with the snapshots of `settings`, as far as anything was measured.

    Those without any are compared with those with some: both follow from the latter, so that only
    what was measured in turns makes a difference between them.
    """
    curve = stored_curve(spec, settings)
    if not spec.has_snapshots or (curve is not None and settings.snapshots):
        return curve
    for known in DRAFT_SIZES:
        found = stored_curve(spec, replace(settings, snapshots=known))
        theirs = snapshot_cost(spec, settings, known)
        ours = snapshot_cost(spec, settings, settings.snapshots)
        if found is not None and theirs is not None and ours is not None:
            return found.scaled(ours / theirs)
    return curve
