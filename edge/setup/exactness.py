"""Which steps `--exact` may take: measured once for a plan's sizes, and known from then on."""

from __future__ import annotations

from edgespec.backends.base import Backend
from edgespec.errors import UnsupportedError
from edgespec.measure.noise import largest_invariant_step, prefill_is_invariant, tested_depth
from edgespec.memory.plan.settings import Settings
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress
from edgespec.setup.stored import (
    KnownStep,
    keep_known_step,
    keep_prefill,
    known_prefill,
    known_steps,
)


def largest_exact_step(
    backend: Backend, spec: ModelSpec, settings: Settings, report: Progress
) -> int:
    """Nodes a step may have, so that it rounds as one-token steps do.

    Measured where no plan before had steps as large and a cache as deep. Raises UnsupportedError
    where no step of several tokens rounds alike.
    """
    largest, depth = backend.max_nodes, tested_depth(backend)
    if largest == 1:
        return 1
    known = [one for one in known_steps(spec, settings) if one.covers(largest, depth)]
    if not known:
        size = largest_invariant_step(
            backend,
            progress=lambda part: report("checking that batches round like single tokens", part),
        )
        known = [KnownStep(size, largest, depth)]
        keep_known_step(spec, settings, known[0])
    size = min(one.largest_step for one in known)
    if size == 1:
        raise UnsupportedError(
            "--exact is not possible: logits of this file change with the number of tokens in a "
            "step, on this device",
            hint="Q4_0, Q4_1 and Q8_0 files are batch-invariant on CPUs; or leave out --exact",
        )
    return min(size, largest)  # an earlier plan may have had larger steps


def prefill_is_exact(backend: Backend, spec: ModelSpec, settings: Settings, step: int) -> bool:
    """Whether a conversation may keep its cache; where it may not, every turn is prefilled again.

    `step` is the most nodes of a step.
    """
    compared = backend.batch_size, step, tested_depth(backend)
    known = known_prefill(spec, settings, compared)
    if known is None:
        known = prefill_is_invariant(backend, step)
        keep_prefill(spec, settings, compared, known)
    return known
