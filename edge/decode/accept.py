"""Which drafted tokens are kept: sample-and-match.

target token    what the sampler picks from the target's logits at a node
accepted        the drafted child that carries the target token; its own logits are read next
correction      the target token when no child carries it; a bonus when the node was a leaf

Every emitted token is picked from the target's own logits by the target's own sampler, so for
deterministic proposals the output has exactly the target's distribution, whatever was drafted
(algorithms: naive sampling, e.g. SpecInfer arXiv 2305.09781 section 4.3). With a sampler that
draws one random number a token, the same seed even gives the same tokens as plain decoding.
Trees with tokens drawn from a draft model need `edgespec.decode.verification`. Pure: no model
inside. `TypicalPick` is the one way to pick with which drafts change the output.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.backends.base import Logits
from edgespec.backends.tree import DraftTree
from edgespec.sampling.sampling import Sampler


def accept(
    tree: DraftTree,
    logits: Logits,
    pick: Callable[[Logits], int],
    hands_over: Callable[[Logits], bool] | None = None,
) -> tuple[list[int], list[int]]:
    """Walk the tree from the root while its children carry what `pick` picks.

    Args:
        tree: the verified tree.
        logits: one row per node, [n, V].
        pick: chooses the next token from a row, [V]; called once per emitted token, in order.
        hands_over: told each row before its token is picked; true ends the round there. None where
            one model writes alone.

    Returns:
        The nodes to commit (root first) and the tokens emitted. Both have the same length: the
        last token is a correction or a bonus and becomes the next root. Where the round was handed
        over the last node has no token.
    """
    node, path, emitted = 0, [], []
    last = len(tree.tokens) - 1  # which has no children
    while node >= 0:
        path.append(node)
        row = logits[node]
        if hands_over is not None and hands_over(row):
            break
        token = pick(row)
        emitted.append(token)
        node = tree.child(node, token) if node < last else -1
    return path, emitted


class TypicalPick:
    """Picks for `accept` in one tree, which may take a drafted token in place of the sampler's.

    Where no child of a node carries what the sampler chose, it is the likeliest child that typical
    acceptance takes (`Sampler.typical`), and the sampler's own where there is none. `num_taken`
    counts the tokens that the target would not have picked.
    """

    def __init__(self, tree: DraftTree, sampler: Sampler) -> None:
        self.num_taken = 0
        self._tree, self._sampler, self._node = tree, sampler, 0

    def __call__(self, row: Logits) -> int:
        tree, token = self._tree, self._sampler.choose(row)
        child = tree.child(self._node, token)
        if child < 0:
            children = [node for node, parent in enumerate(tree.parents) if parent == self._node]
            drafted = [tree.tokens[node] for node in children]
            taken = self._sampler.typical(row, drafted) if drafted else None
            if taken is not None:
                token, child = taken, tree.child(self._node, taken)
                self.num_taken += 1
        self._sampler.record(token)
        self._node = child
        return token


def cut(
    path: list[int], emitted: list[int], logits: Logits, hands_over: Callable[[Logits], bool]
) -> tuple[list[int], list[int]]:
    """What `accept` would have returned of a round that was accepted without `hands_over`.

    It is told no token, so where it ends a text depends on the tokens before that place alone, and
    those that are dropped may be drawn again by another distribution.
    """
    for place, node in enumerate(path):
        if hands_over(logits[node]):
            return path[: place + 1], emitted[:place]
    return path, emitted
