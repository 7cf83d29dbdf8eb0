"""The cells of several users: one cache, from one context for all to a whole context for each."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from edgespec.memory.plan.layout import Layout, Sharing
from edgespec.memory.plan.request import CONTEXT_STEP, Choice


def with_cells_for_all(
    layout: Layout, context: int, batch: int, draft_max: int
) -> tuple[Layout, Choice]:
    """As many cells as memory leaves, and what each user would get of them.

    Sizes are in tokens. Each answer is promised its cells before it begins, so with fewer of them
    fewer run at once, and none of them ends early.
    """
    if not layout.exact:
        most = (layout.users - 1) * context
        more = [*range(0, most, CONTEXT_STEP), most]

        def shared(size: int) -> Layout:
            return replace(layout, sharing=Sharing(layout.users, size))

        fitting = bisect_left(
            more, True, 1, key=lambda size: not shared(size).fits(context, batch, draft_max)
        )
        layout = shared(more[fitting - 1])
    cells = layout.cells(context)
    each = min(context, cells // layout.users)
    reason = f"{each} for each of {layout.users} users"
    if each < context:
        reason = (
            f"what memory leaves: {each} for each of {layout.users} users; who needs more waits"
        )
    return layout, Choice("cells", cells, reason)
