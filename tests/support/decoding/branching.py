"""A suffix drafter with branches: beside what most places say, what the others say."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from edgespec.drafting.proposal import EMPTY, Proposal, StepContext
from edgespec.drafting.suffix import SuffixDrafter


class Branching(SuffixDrafter):
    """Trees: up to `width` tokens behind each node, the likeliest paths first."""

    width = 3

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        tokens, parents, chances = list[int](), list[int](), list[float]()
        self._cells = []
        heap: list[tuple[float, int, int, int, Any]] = []
        node, chance, votes = -1, 1.0, self._votes()
        while True:
            path = _path(tokens, parents, node)
            for token, cell, agreeing in self._ballot(votes, path):
                below = chance * self._calibration.probability(cell)
                if below >= context.min_probability or node < 0:
                    heapq.heappush(heap, (-below, token, cell, node, agreeing))
            if not heap or len(tokens) == context.max_nodes:
                break
            negative, token, cell, parent, votes = heapq.heappop(heap)
            node, chance = len(tokens), -negative
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
            self._cells.append(cell)
        self._proposal = Proposal(tokens, parents, chances, (self.name,) * len(tokens))
        return self._proposal

    def _ballot(self, votes: Sequence[Any], path: Sequence[int]) -> list[tuple[int, int, Any]]:
        """What the votes say, the heaviest first."""
        found, left = list[tuple[int, int, Any]](), list(votes)
        while left and len(found) < self.width:
            token, cell, agreeing = self._elect(left, path)
            if not agreeing:
                break
            found.append((token, cell, agreeing))
            left = [vote for vote in left if vote not in agreeing]
        return found


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
