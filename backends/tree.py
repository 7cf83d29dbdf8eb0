"""The draft tree: what is sent to the target in one verification step.

Node 0 is the root: the last token that was emitted and is not in the KV cache yet. Every other
node is a drafted continuation of its parent. Positions, masks and leaves follow from `parents`
and are never stored beside it. The tree knows nothing about drafters or backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.sampling.sampling import DraftDistribution


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node's parent is the one before it; a range says so at once."""
    if type(parents) is range and parents.step == 1:
        return not len(parents) or parents.start == -1
    return all(parent == node - 1 for node, parent in enumerate(parents))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in an order in which parents come before their children.

    >>> tree = DraftTree((11, 12, 13, 14), (-1, 0, 0, 1))   # 11 -> {12 -> 14, 13}
    >>> tree.depths(), tree.leaves(), tree.is_chain
    ([0, 1, 1, 2], [2, 3], False)
    """

    tokens: Sequence[int]  # [n]
    parents: Sequence[int]  # [n], parents[0] == -1 and parents[i] < i
    sources: Sequence[str] = ()  # [n], the drafter of each node, "" for the root; or empty
    distributions: Sequence[
        DraftDistribution | None
    ] = ()  # [n], what each was drawn from; empty: none was drawn

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A tree without branches: each token continues the one before it."""
        return cls(tokens, range(-1, len(tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return is_chain(self.parents)

    def depths(self) -> list[int]:
        """Distance of each node from the root, [n]."""
        depths = [0] * len(self.tokens)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return depths

    def leaves(self) -> list[int]:
        """Nodes without children, in node order."""
        inner = set(self.parents)
        return [node for node in range(len(self.tokens)) if node not in inner]

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def child(self, node: int, token: int) -> int:
        """The child of `node` that carries `token`, or -1."""
        tokens, parents = self.tokens, self.parents
        for i in range(node + 1, len(tokens)):
            if tokens[i] == token and parents[i] == node:
                return i
        return -1
