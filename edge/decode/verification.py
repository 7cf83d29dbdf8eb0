"""Which drafted tokens are kept when some were drawn from a draft model: traversal verification.

distribution    q, what a node's token was drawn from; a point mass for a deterministic node (a
                suffix match, a table, a top-k choice)
weight          of a node: the chance that the path down to it, or a longer one, is accepted
rest            of a node: what its next tokens still owe the target after its rejected children
residual token  what is drawn from the rest of the last accepted node; a bonus at a leaf

Leaves are judged first, so a long path may be accepted whose prefix alone would have been
rejected (arXiv 2505.12398, stated there for one draft model; on a chain it is block verification,
arXiv 2403.10444). Here every node has a distribution of its own. With p the target's at node v, w
its weight and m = w p its rest before any child was judged, for each child x, in node order:

    weight of x   min(1, m(x) / q(x))
    judge x       with its children, the same way
    x rejected    r = max(m - q, 0),  R = sum r,  w <- R / (R + 1 - w),  m <- r / (R + 1 - w)

After its last child v is accepted with chance w, and the next token is drawn from m / w. The root
has the weight 1. A tree of point masses gives the same distribution of the same lengths as
sample-and-match (`accept` in `step.py`), which needs fewer of the target's rows and keeps the
seed's tokens: use that one for them.

Why it is lossless. Take any tree with its tokens and add one node as the last child of v, its
token drawn from q. Where v used to be accepted with w and to go on with p, the new child is
accepted with q(x) min(1, m(x) / q(x)) = min(q, m) and goes on with the target; v itself gives the
rest, m - min(q, m). Together that is m again, and nothing else in the tree notices. So no added
node changes the distribution of the output *given the tokens that were there before*, and a tree
that is grown node by node, by whatever rule, has that of the root alone: the target's. That needs:

    1. Whether a node is added, where, and its distribution depend only on tokens drawn before it.
       Growing where the tokens so far look good is fine; so is stopping, or not drawing, because of
       them.
    2. What was drawn stays. Dropping a sampled node because of its own token, or of tokens drawn
       later (as when a size is chosen for a whole proposal after drawing it), biases the output.
    3. Siblings are numbered in the order in which they were added.
    4. A distribution is the one given what was drawn before: without replacement,
       `without` the siblings (`sampling.py`).

A deterministic token may be chosen, or merged, because of what was drawn: if it repeats an earlier
sibling it adds nothing, the sibling keeps its distribution, and both share what grows below. A
sampled sibling after a deterministic one is best drawn without that token; if the deterministic
tokens are known beforehand, the sampled sibling is better drawn first and without them, since more
is then accepted.

Pure: no model inside, and no random generator either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import DraftDistribution, DraftTree, Logits
from edgespec.sampling.sampling import Sampler, TargetDistribution


def accept_sampled(
    tree: DraftTree,
    distributions: Sequence[DraftDistribution | None],
    target: Callable[[int], TargetDistribution],
    dice: Sampler,
) -> tuple[list[int], list[int]]:
    """Judge a tree with sampled nodes, leaves first.

    Args:
        tree: the verified tree, grown by the rules above.
        distributions: by node, what its token was drawn from [V] given its earlier siblings,
            summing to 1; None for a deterministic node, and for the root. Never written to.
        target: the target's distribution at a node, summing to 1, ids in any order, as
            `Sampler.unsorted_distribution` gives it. Asked for when it is needed, and written on;
            one row for each node of a path is kept at a time. With penalties use sample-and-match.
        dice: draws independently of the tokens of the tree: not with a generator of the same seed.

    Returns:
        The nodes to commit (root first) and the tokens emitted. Both have the same length: the
        last token is the residual token and becomes the next root.
    """
    assert len(distributions) == len(tree)
    children = _children(tree, distributions)

    def judge(node: int, weight: float) -> tuple[int, int] | None:
        """The last accepted node, here or below, and the residual token; None if rejected."""
        rest = _Rest(weight, lambda: target(node))
        for child in children[node]:
            token, distribution = tree.tokens[child], distributions[child]
            child_weight = rest.child_weight(token, distribution)
            # Nothing below a weight of 0 can be accepted, and nothing there need be computed.
            found = judge(child, child_weight) if child_weight > 0.0 else None
            if found is not None:
                return found
            rest.remove(token, distribution)
        if rest.weight >= 1.0 or dice.accepts(rest.weight):
            return node, rest.draw(dice)
        return None

    found = judge(0, 1.0)
    assert found is not None  # the root's weight stays 1
    path = tree.path(found[0])
    return path, [*(tree.tokens[node] for node in path[1:]), found[1]]


def _children(
    tree: DraftTree, distributions: Sequence[DraftDistribution | None]
) -> list[list[int]]:
    """By node, its children in node order."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree)):
        siblings = children[tree.parents[node]]
        repeats = any(tree.tokens[sibling] == tree.tokens[node] for sibling in siblings)
        assert distributions[node] is not None or not repeats, "a repeated token has to be merged"
        siblings.append(node)
    return children


class _Rest:
    """The weight of a node and the mass its next tokens still owe, m = scale * mass."""

    def __init__(self, weight: float, target: Callable[[], TargetDistribution]) -> None:
        self.weight = weight
        self._target = target
        self._ids: NDArray[np.int64] | None = None
        self._mass: NDArray[np.float64] | None = None  # [k], computed when first needed
        self._scale = weight

    def child_weight(self, token: int, distribution: DraftDistribution | None) -> float:
        """Chance to accept a child that carries `token`, or a node below it."""
        mass, place = self._open(), self._place(token)
        owed = 0.0 if place is None else self._scale * float(mass[place])
        if distribution is None:
            return min(1.0, owed)
        drawn = float(distribution[token])
        assert drawn > 0.0, "a token was drawn that its distribution does not have"
        return min(1.0, owed / drawn)

    def remove(self, token: int, distribution: DraftDistribution | None) -> None:
        """The child was rejected: take away what its distribution gives to each token."""
        mass = self._open()
        if distribution is None:
            place = self._place(token)
            if place is not None:
                mass[place] = 0.0
            owed = self._scale * float(mass.sum())
        else:
            if self._scale != 1.0:
                mass *= self._scale
            mass -= distribution if self._ids is None else distribution[self._ids]
            np.maximum(mass, 0.0, out=mass)
            self._scale = 1.0
            owed = float(mass.sum())
        total = owed + (1.0 - self.weight)
        if total > 0.0:
            self.weight = owed / total
            self._scale /= total
        else:
            # The child's weight was 1 but for rounding: begin again with what the target says.
            self._mass, self._scale = None, self.weight

    def draw(self, dice: Sampler) -> int:
        index = dice.draw(self._open())
        return index if self._ids is None else int(self._ids[index])

    def _open(self) -> NDArray[np.float64]:
        if self._mass is None:
            self._ids, self._mass = self._target()
        return self._mass

    def _place(self, token: int) -> int | None:
        """Where `token` stands in the mass; None where the target forbids it."""
        if self._ids is None:
            return token
        places = np.flatnonzero(self._ids == token)
        return int(places[0]) if places.size else None


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
    path: list[int], emitted: list[int], logits: Logits, switches_model: Callable[[Logits], bool]
) -> tuple[list[int], list[int]]:
    """What `accept` would have returned of a round that was accepted without `switches_model`.

    It is told no token, so where it ends a text depends on the tokens before that place alone, and
    those that are dropped may be drawn again by another distribution.
    """
    for place, node in enumerate(path):
        if switches_model(logits[node]):
            return path[: place + 1], emitted[:place]
    return path, emitted
