"""Drafts that are drawn, and the law of what a round emits with them.

An experiment grows a tree and judges it; distributions are compared to rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import numpy as np
from all_dice import Row, outcomes

from edgespec.backends.base import DraftDistribution, DraftTree
from edgespec.decode.step import accept
from edgespec.decode.verification import accept_sampled
from edgespec.sampling.sampling import Sampler, TargetDistribution, without

# Distributions [V] by the tokens after the root.
Model = Callable[[tuple[int, ...]], Row]
ROOT = 7


def table(kind: str, size: int, seed: int) -> Model:
    """A random distribution for every prefix, rough, with zeros, or one-hot."""

    @cache
    def distribution(prefix: tuple[int, ...]) -> Row:
        rng = np.random.default_rng((seed, *prefix, len(prefix)))
        weights = rng.exponential(size=size) ** 1.5
        if kind == "zeros":
            weights[rng.permutation(size)[: size // 2]] = 0.0
        if kind == "one-hot":
            weights = np.eye(size)[rng.integers(size)]
        distribution: Row = weights / weights.sum()
        distribution.flags.writeable = False
        return distribution

    return distribution


# Target and draft model. The third draft model is the target, the fifth is never right at first.
MODELS: dict[str, tuple[Model, Model]] = {
    "rough": (table("rough", 3, 1), table("rough", 3, 2)),
    "another": (table("rough", 3, 3), table("rough", 3, 4)),
    "equal": (table("rough", 3, 5), table("rough", 3, 5)),
    "zeros": (table("zeros", 4, 6), table("zeros", 4, 7)),
    "p one-hot": (table("one-hot", 3, 8), table("rough", 3, 9)),
    "q one-hot": (table("rough", 3, 10), table("one-hot", 3, 11)),
    "both one-hot": (table("one-hot", 3, 12), table("one-hot", 3, 13)),
    "p with zeros": (table("zeros", 3, 14), table("rough", 3, 15)),
    "q with zeros": (table("rough", 4, 16), table("zeros", 4, 17)),
}


# ------------------------------------------------------------------------------ growing


class TreeBuilder:
    """A tree that grows node by node, and remembers the distribution of each."""

    def __init__(self, model: Model, dice: Sampler) -> None:
        self.model = model
        self.dice = dice
        self.tokens, self.parents = [ROOT], [-1]
        self.distributions: list[DraftDistribution | None] = [None]

    def text(self, node: int) -> tuple[int, ...]:
        """The tokens after the root."""
        return tuple(self.tokens[i] for i in self.tree.path(node)[1:])

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)

    def distribution(self, parent: int, excluded: Sequence[int] = ()) -> Row | None:
        """What the next child is drawn from without replacement."""
        distribution: DraftDistribution | None = self.model(self.text(parent))
        siblings = [self.tokens[i] for i, p in enumerate(self.parents) if p == parent]
        for token in (*siblings, *excluded):
            distribution = None if distribution is None else without(distribution, token)
        return None if distribution is None else distribution.astype(np.float64)

    def draw(
        self, parent: int, *, replace: bool = False, excluded: Sequence[int] = ()
    ) -> int | None:
        """Add a sampled child; None where nothing is left to draw."""
        distribution = (
            self.model(self.text(parent)) if replace else self.distribution(parent, excluded)
        )
        return (
            None
            if distribution is None
            else self._add(parent, self.dice.draw(distribution), distribution)
        )

    def put(self, parent: int, token: int) -> int:
        """Add a deterministic child, or find the one that has the token."""
        node = self.tree.child(parent, token)
        return self._add(parent, token, None) if node < 0 else node

    def _add(self, parent: int, token: int, distribution: Row | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.distributions.append(distribution)
        return len(self.tokens) - 1


Grower = Callable[[TreeBuilder], None]


def chain(length: int) -> Grower:
    def grow(builder: TreeBuilder) -> None:
        node = 0
        for _ in range(length):
            node = builder.draw(node) or 0
            assert node

    return grow


def sampled_tree(parents: Sequence[int], *, replace: bool) -> Grower:
    """A shape that does not depend on the tokens, but for nodes that cannot be drawn."""

    def grow(builder: TreeBuilder) -> None:
        nodes: list[int | None] = [0]
        for place in parents:
            parent = nodes[place]
            nodes.append(None if parent is None else builder.draw(parent, replace=replace))

    return grow


def given_tree(nodes: Sequence[tuple[int, int]]) -> Grower:
    """Deterministic nodes as pairs of parent and token."""

    def grow(builder: TreeBuilder) -> None:
        for parent, token in nodes:
            builder.put(parent, token)

    return grow


def given_before_sampled(builder: TreeBuilder) -> None:
    """A suffix match with a sampled continuation, then sampled siblings of both kinds."""
    match = builder.put(0, 1)
    builder.draw(match)
    builder.put(match, 0)
    sibling = builder.draw(0)
    if sibling is not None:
        builder.put(sibling, 2)


def given_after_sampled(builder: TreeBuilder) -> None:
    """A match after a sampled sibling: merged if it repeats it, with its own continuation."""
    sampled = builder.draw(0)
    assert sampled is not None
    builder.draw(sampled)
    match = builder.put(0, 1)
    builder.put(builder.put(match, 1), 0)
    builder.draw(0)


def given_known_beforehand(builder: TreeBuilder) -> None:
    """Two matches, and a token drawn from what they leave, which is judged first."""
    sampled = builder.draw(0, excluded=(0, 1))
    builder.put(0, 0)
    match = builder.put(0, 1)
    for node in (match, sampled):
        if node is not None:
            builder.draw(node)


def by_value(builder: TreeBuilder, num_nodes: int = 4) -> None:
    """Always the place with the highest estimate, until none is worth it (DySpec 2410.11744).

    Where a token is drawn next, and whether, depends on all tokens drawn before.
    """
    reached = {0: 1.0}  # estimated chance that a node is reached
    places = {0: 1.0}  # by parent, the chance that none of its children so far is the one
    for _ in range(num_nodes):
        parent = max(places, key=lambda node: reached[node] * places[node])
        value = reached[parent] * places[parent]
        distribution = builder.distribution(parent)
        if value < 0.2 or distribution is None:
            break
        node = builder.draw(parent)
        assert node is not None
        chance = float(distribution[builder.tokens[node]])
        reached[node], places[node] = value * chance, 1.0
        places[parent] *= 1.0 - chance


def by_tokens(builder: TreeBuilder) -> None:
    """Shape, order and deterministic tokens all follow what was drawn."""
    first = builder.draw(0)
    assert first is not None
    if builder.tokens[first] == 0:
        second = builder.draw(0)
        below = builder.draw(first)
        if second is not None and below is not None and builder.tokens[below] == 1:
            builder.put(second, builder.tokens[second])
            builder.draw(second)
            builder.draw(first)
    else:
        builder.put(0, 2)
        builder.put(first, builder.tokens[first] - 1)
        builder.draw(0)


GROWERS: dict[str, Grower] = {
    "root": chain(0),
    "chain of 1": chain(1),
    "chain of 3": chain(3),
    "siblings": sampled_tree((0, 0), replace=False),
    "all siblings": sampled_tree((0, 0, 0), replace=False),
    "tree": sampled_tree((0, 0, 1, 1), replace=False),
    "breadth first": sampled_tree((0, 0, 2, 1), replace=False),
    "independent siblings": sampled_tree((0, 0, 0), replace=True),
    "independent tree": sampled_tree((0, 1, 0, 1, 3), replace=True),
    "given chain": given_tree([(0, 1), (1, 2), (2, 0)]),
    "given tree": given_tree([(0, 1), (0, 2), (1, 0), (1, 1), (3, 2), (2, 2)]),
    "given before sampled": given_before_sampled,
    "given after sampled": given_after_sampled,
    "given known beforehand": given_known_beforehand,
    "by value": by_value,
    "by tokens": by_tokens,
}

# ------------------------------------------------------------------------------ distributions

Rule = Callable[
    [DraftTree, "Sequence[DraftDistribution | None]", Callable[[int], TargetDistribution], Sampler],
    list[int],
]


def traversal(
    tree: DraftTree,
    distributions: Sequence[DraftDistribution | None],
    target: Callable[[int], TargetDistribution],
    dice: Sampler,
) -> list[int]:
    path, emitted = accept_sampled(tree, distributions, target, dice)
    assert path == tree.path(path[-1])
    assert emitted[:-1] == [tree.tokens[node] for node in path[1:]]
    assert len(emitted) == len(path)
    return emitted


def token_level(
    tree: DraftTree,
    distributions: Sequence[DraftDistribution | None],
    target: Callable[[int], TargetDistribution],
    dice: Sampler,
) -> list[int]:
    """The rule it is compared with: rejection child by child (RRS, without replacement RRSw)."""
    node, emitted = 0, list[int]()
    while True:
        rest = target(node)[1]
        for child in range(node + 1, len(tree)):
            if tree.parents[child] != node:
                continue
            token, distribution = tree.tokens[child], distributions[child]
            q = np.eye(rest.size)[token] if distribution is None else distribution
            if dice.accepts(min(1.0, rest[token] / q[token])):
                break
            rest = np.maximum(rest - q, 0.0)
            rest /= rest.sum()
        else:
            return [*emitted, dice.draw(rest)]
        emitted.append(token)
        node = child


def sample_and_match(
    tree: DraftTree,
    distributions: Sequence[DraftDistribution | None],
    target: Callable[[int], TargetDistribution],
    dice: Sampler,
) -> list[int]:
    """Logits of node i are the number i."""
    logits = np.arange(len(tree), dtype=np.float32).reshape(-1, 1)
    return accept(tree, logits, lambda row: dice.draw(target(int(row[0]))[1]))[1]


def dense_target(model: Model, builder: TreeBuilder) -> Callable[[int], TargetDistribution]:
    return lambda node: (None, model(builder.text(node)).copy())


def sparse_target(model: Model, builder: TreeBuilder) -> Callable[[int], TargetDistribution]:
    """Only the possible tokens, best first."""

    def target(node: int) -> TargetDistribution:
        distribution = model(builder.text(node))
        ids = np.argsort(-distribution)[: np.count_nonzero(distribution)]
        return ids, distribution[ids]

    return target


def emissions(
    models: tuple[Model, Model],
    grow: Grower,
    rule: Rule = traversal,
    target: Callable[[Model, TreeBuilder], Callable[[int], TargetDistribution]] = dense_target,
) -> dict[tuple[int, ...], float]:
    """Emitted tokens of one round, and their probability."""

    def experiment(dice: Sampler) -> tuple[int, ...]:
        builder = TreeBuilder(models[1], dice)
        grow(builder)
        return tuple(rule(builder.tree, builder.distributions, target(models[0], builder), dice))

    distribution: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for probability, emitted in outcomes(experiment):
        distribution[emitted] += probability
    return distribution


def chance_of(model: Model, tokens: Sequence[int], start: int = 0) -> float:
    """Chance that the model goes on like this after the first `start` tokens."""
    return math.prod(float(model(tuple(tokens[:i]))[tokens[i]]) for i in range(start, len(tokens)))


def law_error(target: Model, distribution: dict[tuple[int, ...], float]) -> float:
    """Largest error of a text's probability, when the target completes what a round emitted."""
    length = max(map(len, distribution))
    texts: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for emitted, probability in distribution.items():
        for ending in product(range(target(()).size), repeat=length - len(emitted)):
            text = (*emitted, *ending)
            texts[text] += probability * chance_of(target, text, len(emitted))
    every = product(range(target(()).size), repeat=length)
    return max(abs(texts[text] - chance_of(target, text)) for text in every)


def mean_length(distribution: dict[tuple[int, ...], float]) -> float:
    """Expected tokens a round, the target's own included."""
    return math.fsum(len(emitted) * probability for emitted, probability in distribution.items())
