"""Acceptance probabilities by counting.

A drafter describes each node it proposes by a small integer (its `cell`: how long the match was,
how many earlier places agree, ...). Counting how often nodes of a cell were right gives their
probability. Three levels are shrunk into each other, because fine cells are rarely seen:

    p_coarse = (hits + 1 * prior) / (tries + 1)      of the group the cell belongs to
    p_cell   = (hits + k_cell * p_coarse) / (tries + k_cell)
    p        = (recent hits + k_recent * p_cell) / (recent tries + k_recent)

which are posterior means of Beta distributions. `recent` counts fade (half-life of about 7
trials) and are forgotten with each new text: some texts repeat themselves far more than others.

A table may begin with counts of other models (`priors.py`). They stand for at most a few tries of
each cell, so that what is counted here soon says more, and are never stored with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from edgespec.drafting import constants

Counts = Mapping[int, tuple[float, float]]  # hits and tries by cell


class Calibration:
    """Hit and miss counts by cell, by group of cells, and lately.

    Args:
        num_cells: how many different cells there are.
        groups: the group of each cell, [num_cells].
        recents: the class of recent counts each cell shares, [num_cells].
        priors: probability of each group before anything was counted.
        known: what other models counted.
    """

    def __init__(
        self,
        num_cells: int,
        groups: Sequence[int],
        recents: Sequence[int],
        priors: Sequence[float],
        known: Counts | None = None,
    ) -> None:
        self._groups, self._recents = groups, recents
        self._known_hits = [0.0] * num_cells
        self._known_tries = [constants.CELL_STRENGTH] * num_cells  # those of the group included
        self._hits = [0.0] * num_cells
        self._tries = [0.0] * num_cells
        self._group_hits = [constants.GROUP_STRENGTH * prior for prior in priors]
        self._group_tries = [constants.GROUP_STRENGTH] * len(priors)
        self.forget_recent()
        for cell, (hits, tries) in (known or {}).items():
            weight = min(1.0, constants.PRIOR_TRIES / tries)
            self._known_hits[cell] = weight * hits
            self._known_tries[cell] += weight * tries
            self._group_hits[groups[cell]] += weight * hits
            self._group_tries[groups[cell]] += weight * tries

    def for_another_text(self) -> Calibration:
        """The same counts, whichever of both they are added to, but for those of lately."""
        other = copy(self)
        other.forget_recent()
        return other

    def probability(self, cell: int) -> float:
        """Chance that a node of this cell is right, given that its parent was."""
        group, recent = self._groups[cell], self._recents[cell]
        coarse = self._group_hits[group] / self._group_tries[group]
        hits = self._hits[cell] + self._known_hits[cell] + constants.CELL_STRENGTH * coarse
        fine = hits / (self._tries[cell] + self._known_tries[cell])
        return (self._recent_hits[recent] + constants.RECENT_STRENGTH * fine) / (
            self._recent_tries[recent] + constants.RECENT_STRENGTH
        )

    def group_probability(self, group: int) -> float:
        """Chance that a node of this group is right, whatever its cell."""
        return self._group_hits[group] / self._group_tries[group]

    def count(self, cell: int, hit: bool) -> None:
        """Record that a node of this cell, whose parent was right, was right or wrong."""
        recent = self._recents[cell]
        self._recent_hits[recent] = constants.RECENT_DECAY * self._recent_hits[recent] + hit
        self._recent_tries[recent] = constants.RECENT_DECAY * self._recent_tries[recent] + 1.0
        self._add(cell, hit, 1.0)
        if self._tries[cell] > constants.MOST_TRIES:
            self._add(cell, -0.5 * self._hits[cell], -0.5 * self._tries[cell])

    def _add(self, cell: int, hits: float, tries: float) -> None:
        """Add to a cell and so to its group: a group holds what its cells do, and its prior."""
        group = self._groups[cell]
        self._hits[cell] += hits
        self._tries[cell] += tries
        self._group_hits[group] += hits
        self._group_tries[group] += tries

    def fade(self, tries: float) -> None:
        """Let the counts of each cell stand for at most so many tries."""
        for cell, counted in enumerate(self._tries):
            if counted > tries:
                part = 1.0 - tries / counted
                self._add(cell, -part * self._hits[cell], -part * counted)

    def forget_recent(self) -> None:
        """Start a new text."""
        self._recent_hits = [0.0] * (max(self._recents) + 1)
        self._recent_tries = [0.0] * (max(self._recents) + 1)

    def as_json(self) -> dict[str, Any]:
        """The counts that were touched, for the next run."""
        cells = {
            str(cell): [round(self._hits[cell], 3), round(self._tries[cell], 3)]
            for cell in range(len(self._tries))
            if self._tries[cell] > 0
        }
        return {"num_cells": len(self._tries), "cells": cells}

    def load_json(self, document: Any) -> None:
        """Take over counts of an earlier run; a document of another layout is ignored."""
        if not isinstance(document, dict) or document.get("num_cells") != len(self._tries):
            return
        for name, counts in pairs_of(document.get("cells")).items():
            cell = int(name) if name.isdecimal() and len(name) < 9 else len(self._tries)
            hits, tries = (round(count, 3) for count in counts)
            if cell < len(self._tries) and tries <= 2 * constants.MOST_TRIES - self._tries[cell]:
                self._add(cell, hits, tries)  # "1" and "01" are one cell


def pairs_of(cells: Any) -> dict[str, tuple[float, float]]:
    """Hits and tries by cell, as far as they are such."""
    found = {}
    for name, counts in (cells if isinstance(cells, dict) else {}).items():
        try:
            hits, tries = (float(count) for count in counts)
        except (TypeError, ValueError, OverflowError):
            continue
        if 0.0 <= hits <= tries < float("inf"):
            found[name] = hits, tries
    return found
