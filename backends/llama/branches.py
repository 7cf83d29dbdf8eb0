"""Sequence ids for the branches of draft trees, lent to whichever user's tree needs them.

An id shares the committed cells of the user it was lent to last, and only catches up when that
user's next tree needs it: a tree costs bookkeeping for the tokens since the last one and not for
the whole context. Which user an id belongs to changes as seldom as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Branch:
    """`shared` cells of user `owner`'s sequence are this one's, too."""

    sequence: int
    owner: int = -1
    shared: int = 0


class Branches:
    """The ids in `sequences`.

    Args:
        copy: lets a sequence (second) see the cells of another (first) from one position to
            another.
        remove: takes the cells from a position on from a sequence.
    """

    def __init__(
        self,
        sequences: Iterable[int],
        copy: Callable[[int, int, int, int], None],
        remove: Callable[[int, int], None],
    ) -> None:
        self._copy, self._remove = copy, remove
        self._branches = [_Branch(sequence) for sequence in sequences]

    def lend(self, owner: int, length: int, count: int, lent: set[int]) -> list[int]:
        """`count` ids that see the first `length` cells of `owner`; none of those in `lent`.

        They join `lent`, which has the ids of one step. There must be as many.
        """
        free = [branch for branch in self._branches if branch.sequence not in lent]
        free.sort(key=lambda branch: (branch.owner != owner, branch.owner >= 0))
        for branch in free[:count]:
            if branch.owner not in (owner, -1):
                self._remove(branch.sequence, 0)
                branch.shared = 0
            branch.owner = owner
            if branch.shared < length:
                self._copy(owner, branch.sequence, branch.shared, length)
                branch.shared = length
            lent.add(branch.sequence)
        return [branch.sequence for branch in free[:count]]

    def cut(self, owner: int, length: int) -> None:
        """Let the ids of `owner` see at most its first `length` cells."""
        for branch in self._branches:
            if branch.owner == owner:  # it may also see what a step left behind
                branch.shared = min(branch.shared, length)
                self._remove(branch.sequence, branch.shared)

    def forget(self, owner: int) -> None:
        """The cells of `owner` are gone, or other ones than they were."""
        self.cut(owner, 0)
        for branch in self._branches:
            branch.owner = -1 if branch.owner == owner else branch.owner
