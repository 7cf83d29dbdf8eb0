"""How large drafts may be: sizes that are worth their memory, by predicted speed.

Under a budget the largest is the least that keeps 98% of the best predicted tokens/s (arXiv
2506.01986 calls it the lower bound of memory that retains the speed-up). Of a model that keeps a
state each draft takes one more snapshot of it, and plain steps may take longer for these: there no
drafts are one of the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from edgespec.memory.bytes.snapshots import most_snapshots
from edgespec.memory.plan.layout import DRAFT_SIZES, Layout
from edgespec.memory.plan.request import Choice
from edgespec.memory.times.speed import NO_DIFFERENCE, SpeedModel

CHEAP = 1.02  # of the bytes with the smallest draft: hardly more
_KEPT_SPEED = 0.98  # under a budget
_KEPT_SPEED_UNASKED = 0.995
# Unasked, where each draft takes one more copy of a recurrent state. llama.cpp writes a part of all
# snapshots in every step of some kinds: few are tried before it was measured what that takes.
_MOST_STATES, _MOST_UNMEASURED = 7, 3
_WRITES_ALL = ("qwen35", "kimi-k3")  # beginnings of architectures


def largest_cheap(layout: Layout, drafts: Sequence[int], smallest: int) -> int:
    """The largest of ascending drafts that takes hardly more memory than `smallest`."""
    least = layout.contexts.least, layout.least_batch
    enough = CHEAP * layout.nbytes(*least, smallest)
    larger = (draft for draft in reversed(drafts) if layout.nbytes(*least, draft) <= enough)
    return next(larger, smallest)


@dataclass(frozen=True)
class Drafts:
    """The sizes of drafts that a plan may have, and what they bring.

    Sizes are compared in the least context. `speed_of` predicts with room for drafts of at most a
    size, `max_step` is the most nodes of a step, if known.
    """

    layout: Layout
    speed_of: Callable[[int], SpeedModel]
    max_step: int | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ascending, each predicted to be faster than the last.

        The first one is what a plan has in any case: none, or what was asked for. The last one
        keeps nearly all of the speed. It is 0 because drafts seem not to pay only where plain steps
        pay for them, too: step times measured on a busy machine would then never be corrected, and
        the controller does not draft where it does not pay.
        """
        if not self.layout.has_drafter:
            return (0,)
        asked = self.layout.request.draft_max
        if asked is not None:
            return (asked,)
        most = min(self.max_step or 256, self.layout.contexts.least)
        if self.layout.spec.keeps_state:
            most = min(most, 1 + self._most_states)
        sizes = [draft for draft in DRAFT_SIZES if draft < most]
        # A draft model that was named is loaded, or what does not fit is said.
        least = () if self.layout.draft_spec is not None and sizes else (0,)
        worthwhile = self._worthwhile(sizes)
        return least if least and self._slow_down(worthwhile) else (*least, *worthwhile)

    @property
    def _most_states(self) -> int:
        """Snapshots of a recurrent state that are kept unasked."""
        spec = self.layout.spec
        is_known = self.speed_of(_MOST_UNMEASURED).is_measured
        few = spec.arch.startswith(_WRITES_ALL) and not is_known
        return min(_MOST_UNMEASURED if few else _MOST_STATES, most_snapshots(spec))

    def tokens_per_s(self, draft_max: int) -> float:
        """Predicted speed with drafts of at most this size, halfway through the answer."""
        return self.speed_of(draft_max).tokens_per_s(draft_max, self.layout.request.depth)

    def range_of(self, draft_max: int) -> tuple[float, float]:
        """Between what `tokens_per_s` is likely to lie."""
        return self.speed_of(draft_max).range_of(draft_max, self.layout.request.depth)

    def _slow_down(self, sizes: Sequence[int]) -> bool:
        """Whether snapshots take more time than drafts of any of these sizes save.

        Not where somebody asks for a drafter.
        """
        is_open = self.layout.request.drafter == "auto" and self.layout.spec.keeps_state
        if not is_open or not all(self.speed_of(size).is_measured for size in sizes):
            return False
        best = max(map(self.tokens_per_s, sizes), default=0.0)
        return best * NO_DIFFERENCE < self.tokens_per_s(0)

    def _worthwhile(self, sizes: Sequence[int]) -> Sequence[int]:
        has_budget = bool(self.layout.request.budget_bytes)
        is_measured = all(self.speed_of(size).is_measured for size in sizes)
        if not is_measured and not has_budget:
            return sizes  # so that all sizes get measured
        speeds = {draft: self.tokens_per_s(draft) for draft in sizes}
        enough = max(speeds.values(), default=0.0) * self._kept_speed
        kept: list[int] = []
        for draft, speed in speeds.items():
            if not kept or speed > speeds[kept[-1]]:
                kept.append(draft)
            if speed >= enough:
                break
        cheap = 0 if has_budget or self.layout.spec.keeps_state else self._cheap(sizes)
        return kept if not kept or cheap <= kept[-1] else [*kept, cheap]

    def _cheap(self, sizes: Sequence[int]) -> int:
        """The largest draft for hardly any memory: some texts use more of it than most do."""
        return largest_cheap(self.layout, sizes, sizes[0]) if sizes else 0

    @property
    def _kept_speed(self) -> float:
        return _KEPT_SPEED if self.layout.request.budget_bytes else _KEPT_SPEED_UNASKED

    def choices(self, draft_max: int) -> Iterator[Choice]:
        """The drafts of a plan, with the reason, and the snapshots that they take."""
        yield Choice("draft_max", draft_max, self._reason(draft_max))
        if self.layout.spec.has_snapshots and self.layout.has_drafter:
            yield Choice("snapshots", draft_max, self._price(draft_max))

    def _price(self, draft_max: int) -> str:
        """What plain steps pay for snapshots."""
        count = draft_max or DRAFT_SIZES[0]
        speeds = [self.speed_of(size) for size in (0, count)]
        if not all(speed.is_measured for speed in speeds):
            return "each is a copy of the recurrent state; what they cost is measured on first use"
        plain = [speed.tokens_per_s(0, self.layout.request.depth) for speed in speeds]
        price = f"plain steps take {plain[0] / plain[1]:.2f} times as long with {count} as without"
        return f"{price}: more than drafts save" if self.sizes == (0,) else price

    def _reason(self, draft_max: int) -> str:
        request = self.layout.request
        if not self.layout.has_drafter:
            return "no drafter"
        if request.draft_max is not None:
            return "as asked"
        if draft_max == 0:
            if self.sizes == (0,):
                return "snapshots of the recurrent state take more time than drafts save"
            return "the budget leaves no room for drafts"
        is_measured = self.speed_of(draft_max).is_measured
        if draft_max == self.sizes[-1] and not is_measured and not request.budget_bytes:
            if self.layout.spec.keeps_state:
                return "measured on first use; each takes a copy of the recurrent state"
            return "all sizes are measured on first use"
        gain = self.tokens_per_s(draft_max) / self.tokens_per_s(0)
        return f"{self._kept(draft_max)}; {gain:.2f}x of plain predicted"

    def _kept(self, draft_max: int) -> str:
        if draft_max < self.sizes[-1]:
            return "the most that fits"
        if not self.layout.request.budget_bytes and draft_max == self._cheap(DRAFT_SIZES):
            return f"the most that takes less than {CHEAP - 1:.0%} of the memory"
        return f"the least that keeps {self._kept_speed:.1%} of the predicted speed"
