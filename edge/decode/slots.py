"""Who may begin, and where: the sequences of a cache, its cells, and the prefixes it keeps.

Whoever begins is promised the cells for its prompt and what answers take as a rule, and more while
it writes. Who cannot have more waits, with its sequence kept. Nobody begins or goes on where not
all of them could write their longest answers one after the other (the banker's algorithm: Dijkstra,
EWD 108): so one can always go on, and nobody's answer ends because of another's. Texts of answers
that have ended stay in the cache as long as their cells are not needed, least recently used first;
who begins with the same tokens, under the same salt, shares those cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from edgespec.backends.base import (
    Adapts,
    Backend,
    HoldsSequences,
    KeepsStates,
    ReleasesThreads,
    sequences_of,
)
from edgespec.errors import ContextFullError
from edgespec.prefix import common_prefix_length

_Parts = list[tuple[int, int]]  # of a text, in order: the number of a part, and its cells


class Slot:
    """A sequence of the cache."""

    def __init__(self, number: int, backend: Backend) -> None:
        self.number, self.backend = number, backend
        self.promised = 0  # cells; 0: nobody has it
        self.most = 0  # cells that its text may come to need
        self.last_used = 0  # the larger the later
        self.prompt = 0  # tokens of the last text that began here
        self.salt = ""  # of the text in its cells: no other salt's texts match it
        # Parts that began in other slots, and the one that begins here.
        self.shared: _Parts = []
        self.own = 0

    @property
    def is_free(self) -> bool:
        return self.promised == 0

    @property
    def tokens(self) -> Sequence[int]:
        """What its cells hold."""
        return self.backend.tokens

    @property
    def goes_back(self) -> bool:
        """Whether it may hold a part of what another sequence has."""
        return self.backend.capabilities.truncate or isinstance(self.backend, KeepsStates)

    def common(self, text: Sequence[int], salt: str) -> int:
        """How many tokens of a text with this salt it has."""
        return common_prefix_length(self.tokens, text) if self.salt == salt else 0

    def reach(self, text: Sequence[int], salt: str, *, shared: bool = False) -> int:
        """As many of them as it can go back to, or let another one share."""
        length = self.common(text, salt)
        if isinstance(self.backend, KeepsStates):
            return self.backend.reach(length, shared=shared)
        return length

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


class Slots:
    """All sequences of a backend's cache."""

    def __init__(self, whole: Backend) -> None:
        self._whole = whole
        self._slots = [Slot(number, one) for number, one in enumerate(sequences_of(whole))]
        self.count = len(self._slots)
        self._cells, self.shares = whole.context_size, False
        if isinstance(whole, HoldsSequences):
            # Whether sequences with the same beginning hold it in the same cells.
            self._cells, self.shares = whole.cells, whole.shares_cells
        self._numbers = itertools.count(1)
        # Of the model's adapters, in the next step; empty where there are none.
        self.scales = tuple(whole.scales) if isinstance(whole, Adapts) else ()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def has_free(self) -> bool:
        """Whether there is a sequence that nobody has."""
        return any(slot.is_free for slot in self._slots)

    def adapt(self, scales: tuple[float, ...]) -> None:
        """Let the next steps have these scales of the model's adapters."""
        if isinstance(self._whole, Adapts) and scales != self.scales:
            self._whole.adapt(scales)
            self.scales = scales

    def release_threads(self) -> None:
        """The calling thread, which made steps, makes none soon."""
        if isinstance(self._whole, ReleasesThreads):
            self._whole.release_threads()

    def take(
        self,
        text: Sequence[int],
        need: int,
        reuse: bool,
        salt: str = "",
        *,
        most: int | None = None,
    ) -> Slot | None:
        """A slot for a text that grows to `need` tokens or up to `most`; None until there is room.

        With `reuse` the sequence holds what the cache has of the text under the same salt.
        """
        free = [slot for slot in self._slots if slot.is_free]
        if not free:
            return None
        slot, source, known = self._place(free, text, reuse, salt)
        shared = source.parts(known) if self.shares or source is slot else []
        own, left = need - sum(length for _, length in shared), (most or need) - need
        if not self._is_safe((left, [*shared, (-1, own)])):
            return None
        if slot.salt != salt:
            slot.backend.truncate(0)
            slot.salt = salt
        if source is not slot:
            assert isinstance(self._whole, HoldsSequences), "sequences of one cache"
            self._whole.share(source.number, slot.number, known)
        slot.shared, slot.own, slot.promised = shared, next(self._numbers), need
        slot.most = most or need
        slot.prompt = len(text)
        self._make_room()
        slot.last_used = next(self._numbers)
        return slot

    def grow(self, slot: Slot, need: int) -> bool:
        """Promise a slot the cells of `need` tokens, at most all it may need; False: it waits."""
        if min(need, slot.most) <= slot.promised:
            return True
        before = slot.promised
        for promised in (need + 64, need):  # more than it needs, so that steps come between looks
            slot.promised = min(promised, slot.most)
            if self._is_safe():
                self._make_room()
                return True
        slot.promised = before
        return False

    def _is_safe(self, *others: tuple[int, _Parts]) -> bool:
        """Whether all texts, and others, could be written to their ends, one after the other.

        Each may need so many cells more, and has some parts now.
        """
        running = [(one.most - one.promised, one.held()) for one in self._slots if not one.is_free]
        texts = sorted([*running, *others], key=lambda text: text[0])
        left = [parts for _, parts in texts]
        for more, _ in texts:
            if _count(part for parts in left for part in parts) + more > self._cells:
                return False
            del left[0]
        return True

    def too_few(self, text: Sequence[int], limit: int) -> ContextFullError:
        """The error where a text never fits."""
        return ContextFullError(
            f"the prompt has {len(text)} tokens and its answer up to {limit}, and the cache has "
            f"room for {self._cells}",
            hint="lower max_tokens, raise --ctx, or shorten the prompt",
        )

    def gains_by_waiting(
        self, text: Sequence[int], coming: Iterable[Sequence[int]], salt: str = ""
    ) -> bool:
        """Whether a text of this salt that is being read will have more of `text` than is there."""
        known = max(slot.common(text[:-1], salt) for slot in self._slots)
        return any(common_prefix_length(other, text[:-1], known) > known for other in coming)

    def hold(self, slot: Slot, count: int) -> bool:
        """Promise a slot `count` cells that no other one has; False, as before, without room."""
        before = slot.shared, slot.promised, slot.most
        slot.shared, slot.promised, slot.most = [], max(slot.promised, count), max(slot.most, count)
        if not self._is_safe():
            slot.shared, slot.promised, slot.most = before
            return False
        self._make_room()
        return True

    def give_back(self, slot: Slot) -> None:
        """Its answer has ended; what its cells hold stays, while there is room."""
        slot.promised = 0
        slot.last_used = next(self._numbers)

    def spare(self, count: int, salt: str = "") -> Backend | None:
        """A sequence that nobody has, emptied, and cells for `count` tokens; None without room."""
        slot = self.take((), count, reuse=False, salt=salt)
        if slot is None:
            return None
        slot.backend.truncate(0)
        self.give_back(slot)
        return slot.backend

    def _place(
        self, free: Sequence[Slot], text: Sequence[int], reuse: bool, salt: str
    ) -> tuple[Slot, Slot, int]:
        """A free slot, the one that has most of the text, and how many tokens of it.

        The free one has most itself where the text goes on from there; else it is the one that was
        used least recently, and so far another conversation stays where it is.
        """
        oldest = min(free, key=lambda slot: (len(slot.tokens) > 0, slot.last_used))
        if not reuse:
            return oldest, oldest, 0
        text = text[:-1]  # the last token's logits are wanted
        known = {slot: slot.reach(text, salt) for slot in self._slots}
        best = max(free, key=lambda slot: known[slot])
        # A text is another's continuation where eight times more is kept than lost, and all of its
        # prompt but what opens the answer: conversations may have a long system prompt in common.
        is_kept = known[best] >= max(1, 8 * (len(best.tokens) - known[best]))
        if is_kept and best.common(text, salt) >= best.prompt - 16:
            return best, best, known[best]
        if self.count == 1 or not oldest.goes_back:
            return oldest, oldest, known[oldest]
        for slot in self._slots:
            if slot is not oldest:
                known[slot] = slot.reach(text, salt, shared=True)
        source = max(self._slots, key=lambda slot: (known[slot], slot is oldest))
        return oldest, source, known[source]

    def _make_room(self) -> None:
        """Empty free slots until nobody who was promised cells can miss them."""
        for slot in sorted(self._slots, key=lambda one: one.last_used):
            if _count(part for one in self._slots for part in one.held()) <= self._cells:
                return
            if slot.is_free:
                slot.backend.truncate(0)
                slot.shared = []


def _count(parts: Iterable[tuple[int, int]]) -> int:
    """Cells of some parts, each counted once."""
    longest: dict[int, int] = {}
    for number, length in parts:
        longest[number] = max(length, longest.get(number, 0))
    return sum(longest.values())
