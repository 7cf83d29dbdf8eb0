"""The batch in which a prompt is read: larger ones read it faster and take more memory."""

from __future__ import annotations

from edgespec.memory.plan.layout import BATCH_SIZES, Layout
from edgespec.memory.plan.request import Choice

_GPU_SIZE = 512  # a GPU is idle on smaller ones
# Prompt tokens a second with batches of 64, 128 and 512 on two cores: 0.80, 0.93 and 1 of the best
# on a model 576 wide, 0.96, 1 and 0.94 on one 1536 wide.
_CPU_SIZES = ((1024, 64), (0, 128))  # from this width on


def batch_of(layout: Layout, context: int, draft_max: int) -> Choice:
    """The largest batch that is of use and fits, with what the other sizes leave."""
    wanted = _wanted(layout)
    for size in BATCH_SIZES:
        if draft_max < size <= wanted and layout.fits(context, size, draft_max):
            break
    else:
        size = layout.least_batch
    reason = "reads prompts at nearly full speed in little memory"
    if size < wanted:
        reason = "what the budget leaves; prompts are read more slowly"
    return Choice("batch_size", size, reason)


def _wanted(layout: Layout) -> int:
    if layout.gpu_layers:
        return _GPU_SIZE
    width = layout.spec.embedding_size
    return next(size for from_width, size in _CPU_SIZES if width >= from_width)
