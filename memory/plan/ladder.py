"""The ladder of contexts and drafts that plans climb, as far as memory allows.

Its steps: the least context; the smallest draft, and larger ones that take hardly more; the context
that is wanted; the other drafts. A ladder and not an optimum for each budget, because more memory
must never buy less context, a smaller draft or less speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgespec.memory.plan.drafts import largest_cheap
from edgespec.memory.plan.layout import Layout, largest_fitting
from edgespec.memory.plan.refusal import refusal
from edgespec.memory.plan.request import CONTEXT_STEP, Choice

_DRAFT_FIRST = "what is needed; a draft comes before more, and memory does not reach for it"


@dataclass(frozen=True)
class Ladder:
    """Contexts and drafts of a layout; `drafts` are ascending, and it has the first in any case."""

    layout: Layout
    drafts: Sequence[int]

    def climb(self) -> tuple[int, int]:
        """Context and draft: as far up as memory allows.

        Raises DoesNotFitError where the first step does not fit.
        """
        least, early = self.layout.contexts.least, self._early_drafts
        if not self._fits(least, early[0]):
            raise refusal(self.layout, least, self.layout.least_batch, early[0])
        draft = self._largest_draft(early, least)
        if draft < early[-1]:
            return least, draft
        context = self.longest_context(draft, self.layout.contexts.longest)
        if context == self.layout.contexts.longest:
            draft = self._largest_draft(self.drafts, context)
        return context, min(draft, context - 1)  # a step has to fit into the context

    def longest_context(self, draft_max: int, most: int) -> int:
        """The largest context up to `most` that fits, in steps of 256; the least one does."""
        least = self.layout.contexts.least
        sizes = [*range(least, most, CONTEXT_STEP), most]
        batch = self.layout.least_batch
        fitting = largest_fitting(
            sizes, lambda size: self.layout.excess_bytes(size, batch, draft_max)
        )
        return fitting or least

    def choice(self, context: int, draft_max: int) -> Choice:
        """The context of a plan, with the reason."""
        reason = self.layout.contexts.reason
        if context < self.layout.contexts.longest:
            reason = "the largest that fits"
            if draft_max < self._early_drafts[-1]:
                reason = _DRAFT_FIRST
        return Choice("context_size", context, reason)

    @cached_property
    def _early_drafts(self) -> Sequence[int]:
        """Those that come before more context: the first, and what takes hardly more than it."""
        if self.layout.request.prefer == "context":
            return self.drafts[:1]
        last = largest_cheap(self.layout, self.drafts, self.drafts[:2][-1])
        return [draft for draft in self.drafts if draft <= last]

    def _largest_draft(self, drafts: Sequence[int], context: int) -> int:
        """The last of ascending drafts that fits; the first one does."""
        fitting = (draft for draft in reversed(drafts) if self._fits(context, draft))
        return next(fitting, drafts[0])

    def _fits(self, context: int, draft_max: int) -> bool:
        return self.layout.fits(context, self.layout.least_batch, draft_max)
