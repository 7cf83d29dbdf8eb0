"""Who may begin, and where: the sequences of a cache, its cells, and the prefixes it keeps.

Whoever begins is promised the cells for its prompt and its longest answer, so that nobody's answer
ends because of another's. Texts of answers that have ended stay in the cache as long as their cells
are not needed, least recently used first; who begins with the same tokens shares those cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from edgespec.backends.base import Backend, HoldsSequences
from edgespec.decode.decoding import Model
from edgespec.prefix import common_prefix_length

_GOES_ON = 8  # a text is another's continuation where so many times more is kept than lost
_Parts = list[tuple[int, int]]  # of a text, in order: the number of a part, and its cells


class Seat:
    """A sequence of the cache, with what drafts for whoever has it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.promised = 0  # cells; 0: nobody has it
        self.last_used = 0  # the larger the later
        # Parts that began in other seats, and the one that begins here.
        self.shared: _Parts = []
        self.own = 0

    @property
    def is_free(self) -> bool:
        return self.promised == 0

    @property
    def tokens(self) -> Sequence[int]:
        """What its cells hold."""
        return self.model.backend.tokens

    def parts(self, size: int) -> _Parts:
        """The parts of its first `size` cells."""
        found = []
        for number, length in [*self.shared, (self.own, size)]:
            if size > 0:
                found.append((number, min(length, size)))
                size -= length
        return found

    def held(self) -> _Parts:
        """The parts that it has, or may come to have."""
        return self.parts(self.promised or len(self.tokens))


class Seats:
    """All sequences of a cache.

    Args:
        models: one for each sequence, in the order of their numbers.
        cells: tokens that all of them together may hold.
        shares: whether sequences with the same beginning hold it in the same cells.
    """

    def __init__(self, models: Sequence[Model], cells: int, *, shares: bool = True) -> None:
        self._seats = [Seat(model) for model in models]
        self._cells, self._shares = cells, shares
        self._numbers = itertools.count(1)

    def take(self, text: Sequence[int], need: int, reuse: bool) -> Seat | None:
        """A seat for a text that grows up to `need` tokens; None until there is room.

        With `reuse` the sequence holds what the cache has of the text.
        """
        free = [seat for seat in self._seats if seat.is_free]
        if not free:
            return None
        seat, source, known = self._place(free, text, reuse)
        shared = source.parts(known) if self._shares or source is seat else []
        running = [part for one in self._seats if not one.is_free for part in one.held()]
        own = need - sum(length for _, length in shared)
        if _count([*running, *shared]) + own > self._cells:
            return None
        if source is not seat:
            self._share(source, seat, known)
        seat.shared, seat.own, seat.promised = shared, next(self._numbers), need
        self._make_room()
        seat.last_used = next(self._numbers)
        return seat

    def gains_by_waiting(self, text: Sequence[int], coming: Iterable[Sequence[int]]) -> bool:
        """Whether one of the texts that are being read will have more of `text` than is there."""
        known = max(common_prefix_length(seat.tokens, text[:-1]) for seat in self._seats)
        return any(common_prefix_length(other, text[:-1], known) > known for other in coming)

    def give_back(self, seat: Seat) -> None:
        """Its answer has ended; what its cells hold stays, while there is room."""
        seat.promised = 0
        seat.last_used = next(self._numbers)

    def spare(self, count: int) -> Backend | None:
        """A sequence that nobody has, emptied, and cells for `count` tokens; None without room."""
        seat = self.take((), count, reuse=False)
        if seat is None:
            return None
        seat.model.backend.truncate(0)
        self.give_back(seat)
        return seat.model.backend

    def _place(
        self, free: Sequence[Seat], text: Sequence[int], reuse: bool
    ) -> tuple[Seat, Seat, int]:
        """A free seat, the one that has most of the text, and how many tokens of it.

        The free one has most itself where the text goes on from there; else it is the one that was
        used least recently, and so far another conversation stays where it is.
        """
        oldest = min(free, key=lambda seat: (len(seat.tokens) > 0, seat.last_used))
        if not reuse:
            return oldest, oldest, 0
        known = {seat: common_prefix_length(seat.tokens, text[:-1]) for seat in self._seats}
        best = max(free, key=lambda seat: known[seat])
        if known[best] >= max(1, _GOES_ON * (len(best.tokens) - known[best])):
            return best, best, known[best]
        can_share = isinstance(oldest.model.whole, HoldsSequences)
        if not can_share or not oldest.model.backend.capabilities.truncate:
            return oldest, oldest, known[oldest]
        source = max(self._seats, key=lambda seat: (known[seat], seat is oldest))
        return oldest, source, known[source]

    def _share(self, source: Seat, target: Seat, length: int) -> None:
        whole = source.model.whole
        assert isinstance(whole, HoldsSequences), "sequences of one cache"
        whole.share(source.model.number, target.model.number, length)

    def _make_room(self) -> None:
        """Empty free seats until nobody who was promised cells can miss them."""
        for seat in sorted(self._seats, key=lambda one: one.last_used):
            if _count(part for one in self._seats for part in one.held()) <= self._cells:
                return
            if seat.is_free:
                seat.model.backend.truncate(0)
                seat.shared = []


def _count(parts: Iterable[tuple[int, int]]) -> int:
    """Cells of some parts, each counted once."""
    longest: dict[int, int] = {}
    for number, length in parts:
        longest[number] = max(length, longest.get(number, 0))
    return sum(longest.values())
