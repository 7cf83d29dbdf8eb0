"""The cells of several users: one cache, from one context for all to a whole context for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from edgespec.memory.plan.layout import Layout, Sharing
from edgespec.memory.plan.plan import Part
from edgespec.memory.plan.request import CONTEXT_STEP, Choice
from edgespec.memory.times.speed import SpeedModel


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


def parts_of(layout: Layout, context: int, cache_bytes: int, speed: SpeedModel) -> Iterator[Part]:
    """What each user gets of a cache and of the steps, where one is answered, two, and so on."""
    cells = layout.cells(context)
    for users in range(1, layout.users + 1):
        each = min(context, cells // users)
        total = speed.plain_tokens_per_s(users, layout.request.depth)
        yield Part(users, each, cache_bytes * each // cells, total / users, total)
