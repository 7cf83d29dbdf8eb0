"""Who may begin, and where: the sequences of a cache, its cells, and the prefixes it keeps.

Whoever begins is promised the cells for its prompt and its longest answer, so that nobody's answer
ends because of another's. Texts of answers that have ended stay in the cache as long as their cells
are not needed, least recently used first; who begins with the same tokens shares those cells.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.base import Backend, HoldsSequences
from edgespec.decode.decoding import Model
from edgespec.prefix import common_prefix_length

_GOES_ON = 8  # a text is another's continuation where so many times more is kept than lost


class Seat:
    """A sequence of the cache, with what drafts for whoever has it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.promised = 0  # cells; 0: nobody has it
        self.last_used = 0  # the larger the later

    @property
    def is_free(self) -> bool:
        return self.promised == 0

    @property
    def tokens(self) -> Sequence[int]:
        """What its cells hold."""
        return self.model.backend.tokens


class Seats:
    """All sequences of a cache.

    Args:
        models: one for each sequence, in the order of their numbers.
        cells: tokens that all of them together may hold.
    """

    def __init__(self, models: Sequence[Model], cells: int) -> None:
        self._seats = [Seat(model) for model in models]
        self._cells = cells
        self._moment = 0

    def __len__(self) -> int:
        return len(self._seats)

    def take(self, text: Sequence[int], need: int, reuse: bool) -> Seat | None:
        """A seat for a text that grows up to `need` tokens; None until there is room.

        With `reuse` the sequence holds what the cache has of the text, as far as it can be shared.
        """
        free = [seat for seat in self._seats if seat.is_free]
        promised = sum(seat.promised for seat in self._seats)
        if not free or promised + need > self._cells:
            return None
        seat = self._place(free, text, reuse)
        self._make_room(need, seat)
        seat.promised = need
        self._use(seat)
        return seat

    def spare(self, count: int) -> Backend | None:
        """A sequence that nobody has, emptied, and cells for `count` tokens; None without room."""
        free = [seat for seat in self._seats if seat.is_free]
        if not free or count + sum(seat.promised for seat in self._seats) > self._cells:
            return None
        seat = min(free, key=lambda one: (len(one.tokens) > 0, one.last_used))
        seat.model.backend.truncate(0)
        self._make_room(count, seat)
        self._use(seat)
        return seat.model.backend

    def give_back(self, seat: Seat) -> None:
        """Its answer has ended; what its cells hold stays, while there is room."""
        seat.promised = 0
        self._use(seat)

    def _use(self, seat: Seat) -> None:
        self._moment += 1
        seat.last_used = self._moment

    def _place(self, free: Sequence[Seat], text: Sequence[int], reuse: bool) -> Seat:
        """The free seat that holds the text's beginning, or the one used least recently."""
        oldest = min(free, key=lambda seat: (len(seat.tokens) > 0, seat.last_used))
        if not reuse:
            return oldest
        known = {seat: common_prefix_length(seat.tokens, text[:-1]) for seat in self._seats}
        best = max(free, key=lambda seat: known[seat])
        if known[best] >= max(1, _GOES_ON * (len(best.tokens) - known[best])):
            return best
        source = max(self._seats, key=lambda seat: known[seat])
        if known[source] > known[oldest]:
            self._share(source, oldest, known[source])
        return oldest

    def _share(self, source: Seat, target: Seat, length: int) -> None:
        whole = source.model.whole
        if isinstance(whole, HoldsSequences) and source.model.backend.capabilities.truncate:
            whole.share(source.model.number, target.model.number, length)

    def _make_room(self, need: int, seat: Seat) -> None:
        """Empty free seats until nobody who was promised cells can miss them."""
        others = sorted(self._seats, key=lambda one: one.last_used)
        idle = [one for one in others if one.is_free and one is not seat and len(one.tokens)]
        room = self._cells - need - sum(one.promised for one in others)
        held = sum(len(one.tokens) for one in idle)
        for one in idle:
            if held <= room:
                return
            held -= len(one.tokens)
            one.model.backend.truncate(0)
