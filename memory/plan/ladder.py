"""The ladder of contexts and drafts that plans climb, as far as memory allows.

Its steps: the least context; the smallest draft, and larger ones that take hardly more; the context
that is wanted; the other drafts. A ladder and not an optimum for each budget, because more memory
must never buy less context, a smaller draft or less speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgespec.memory.plan.drafts import CHEAP
from edgespec.memory.plan.layout import Layout
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
        larger = [*range(least + CONTEXT_STEP, most, CONTEXT_STEP), most]
        fitting = bisect_left(larger, True, key=lambda size: not self._fits(size, draft_max))
        return larger[fitting - 1] if fitting else least

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
        least = self.layout.contexts.least, self.layout.least_batch
        nbytes = [self.layout.nbytes(*least, draft) for draft in self.drafts]
        enough = CHEAP * nbytes[:2][-1]
        return [draft for draft, size in zip(self.drafts, nbytes, strict=True) if size <= enough]

    def _largest_draft(self, drafts: Sequence[int], context: int) -> int:
        """The last of ascending drafts that fits; the first one does."""
        return max(draft for draft in drafts if draft == drafts[0] or self._fits(context, draft))

    def _fits(self, context: int, draft_max: int) -> bool:
        return self.layout.fits(context, self.layout.least_batch, draft_max)
