"""Verification of sampled drafts, proved by enumeration: every draw and every coin is followed.

An experiment grows a tree and judges it, asking `dice` for everything random. `outcomes` runs it
once for each sequence of answers and gives the exact chance of each, so laws are compared to
rounding. The last tests draw with the real sampler through the fake backend.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.accept import accept
from edgespec.tree import DraftTree
from edgespec.verification import Dice, DraftLaw, TargetLaw, accept_sampled, without

Row = NDArray[np.float64]
# Distributions [V] by the tokens after the root.
Model = Callable[[tuple[int, ...]], Row]
T = TypeVar("T")
ROOT = 7

# ------------------------------------------------------------------------------ enumeration


class AllDice:
    """Answers as scripted, then with the first possible answer, and multiplies the chances."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.answers: list[int] = []
        self.last: list[int] = []  # by question, the last possible answer
        self.chances: list[Row] = []
        self.probability = 1.0

    def accepts(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return self._answer(np.array([1.0 - probability, probability])) == 1

    def draw(self, weights: Row) -> int:
        assert weights.min() >= 0.0
        return self._answer(weights / weights.sum())

    def _answer(self, chances: Row) -> int:
        place = len(self.answers)
        answer = self._script[place] if place < len(self._script) else _after(chances, -1)
        self.answers.append(answer)
        self.chances.append(chances)
        self.probability *= float(chances[answer])
        return answer

    def following(self) -> list[int] | None:
        """The script of the next outcome, or None after the last."""
        for place in reversed(range(len(self.answers))):
            answer = _after(self.chances[place], self.answers[place])
            if answer >= 0:
                return [*self.answers[:place], answer]
        return None


def _after(chances: Row, answer: int) -> int:
    """The next answer that is possible at all, or -1."""
    return next((i for i in range(answer + 1, chances.size) if chances[i] > 0.0), -1)


def outcomes(experiment: Callable[[Dice], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of an experiment and its probability."""
    script: list[int] | None = []
    while script is not None:
        dice = AllDice(script)
        outcome = experiment(dice)
        yield dice.probability, outcome
        script = dice.following()


def test_the_dice_follow_every_outcome() -> None:
    def experiment(dice: Dice) -> tuple[int, ...]:
        first = dice.draw(np.array([1.0, 0.0, 3.0]))
        return (first, dice.accepts(0.25)) if first else (first,)

    found = {outcome: probability for probability, outcome in outcomes(experiment)}
    assert found == {(0,): 0.25, (2, 0): 0.5625, (2, 1): 0.1875}


# ------------------------------------------------------------------------------ models


def table(kind: str, size: int, seed: int) -> Model:
    """A random distribution for every prefix, rough, with zeros, or one-hot."""

    @cache
    def law(prefix: tuple[int, ...]) -> Row:
        rng = np.random.default_rng((seed, *prefix, len(prefix)))
        weights = rng.exponential(size=size) ** 1.5
        if kind == "zeros":
            weights[rng.permutation(size)[: size // 2]] = 0.0
        if kind == "one-hot":
            weights = np.eye(size)[rng.integers(size)]
        law: Row = weights / weights.sum()
        law.flags.writeable = False
        return law

    return law


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


class Growth:
    """A tree that grows node by node, and remembers the law of each."""

    def __init__(self, model: Model, dice: Dice) -> None:
        self.model = model
        self.dice = dice
        self.tokens, self.parents = [ROOT], [-1]
        self.laws: list[DraftLaw | None] = [None]

    def text(self, node: int) -> tuple[int, ...]:
        """The tokens after the root."""
        return tuple(self.tokens[i] for i in self.tree.path(node)[1:])

    @property
    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents)

    def law(self, parent: int, excluded: Sequence[int] = ()) -> Row | None:
        """What the next child is drawn from without replacement."""
        law: DraftLaw | None = self.model(self.text(parent))
        siblings = [self.tokens[i] for i, p in enumerate(self.parents) if p == parent]
        for token in (*siblings, *excluded):
            law = None if law is None else without(law, token)
        return None if law is None else law.astype(np.float64)

    def draw(
        self, parent: int, *, replace: bool = False, excluded: Sequence[int] = ()
    ) -> int | None:
        """Add a sampled child; None where nothing is left to draw."""
        law = self.model(self.text(parent)) if replace else self.law(parent, excluded)
        return None if law is None else self._add(parent, self.dice.draw(law), law)

    def put(self, parent: int, token: int) -> int:
        """Add a deterministic child, or find the one that has the token."""
        node = self.tree.child(parent, token)
        return self._add(parent, token, None) if node < 0 else node

    def _add(self, parent: int, token: int, law: Row | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        return len(self.tokens) - 1


Grower = Callable[[Growth], None]


def chain(length: int) -> Grower:
    def grow(growth: Growth) -> None:
        node = 0
        for _ in range(length):
            node = growth.draw(node) or 0
            assert node

    return grow


def sampled_tree(parents: Sequence[int], *, replace: bool) -> Grower:
    """A shape that does not depend on the tokens, but for nodes that cannot be drawn."""

    def grow(growth: Growth) -> None:
        nodes: list[int | None] = [0]
        for place in parents:
            parent = nodes[place]
            nodes.append(None if parent is None else growth.draw(parent, replace=replace))

    return grow


def given_tree(nodes: Sequence[tuple[int, int]]) -> Grower:
    """Deterministic nodes as pairs of parent and token."""

    def grow(growth: Growth) -> None:
        for parent, token in nodes:
            growth.put(parent, token)

    return grow


def given_before_sampled(growth: Growth) -> None:
    """A suffix match with a sampled continuation, then sampled siblings of both kinds."""
    match = growth.put(0, 1)
    growth.draw(match)
    growth.put(match, 0)
    sibling = growth.draw(0)
    if sibling is not None:
        growth.put(sibling, 2)


def given_after_sampled(growth: Growth) -> None:
    """A match after a sampled sibling: merged if it repeats it, with its own continuation."""
    sampled = growth.draw(0)
    assert sampled is not None
    growth.draw(sampled)
    match = growth.put(0, 1)
    growth.put(growth.put(match, 1), 0)
    growth.draw(0)


def given_known_beforehand(growth: Growth) -> None:
    """Two matches, and a token drawn from what they leave, which is judged first."""
    sampled = growth.draw(0, excluded=(0, 1))
    growth.put(0, 0)
    match = growth.put(0, 1)
    for node in (match, sampled):
        if node is not None:
            growth.draw(node)


def by_value(growth: Growth, num_nodes: int = 4) -> None:
    """Always the place with the highest estimate, until none is worth it (DySpec 2410.11744).

    Where a token is drawn next, and whether, depends on all tokens drawn before.
    """
    reached = {0: 1.0}  # estimated chance that a node is reached
    places = {0: 1.0}  # by parent, the chance that none of its children so far is the one
    for _ in range(num_nodes):
        parent = max(places, key=lambda node: reached[node] * places[node])
        value = reached[parent] * places[parent]
        law = growth.law(parent)
        if value < 0.2 or law is None:
            break
        node = growth.draw(parent)
        assert node is not None
        chance = float(law[growth.tokens[node]])
        reached[node], places[node] = value * chance, 1.0
        places[parent] *= 1.0 - chance


def by_tokens(growth: Growth) -> None:
    """Shape, order and deterministic tokens all follow what was drawn."""
    first = growth.draw(0)
    assert first is not None
    if growth.tokens[first] == 0:
        second = growth.draw(0)
        below = growth.draw(first)
        if second is not None and below is not None and growth.tokens[below] == 1:
            growth.put(second, growth.tokens[second])
            growth.draw(second)
            growth.draw(first)
    else:
        growth.put(0, 2)
        growth.put(first, growth.tokens[first] - 1)
        growth.draw(0)


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

# ------------------------------------------------------------------------------ laws

Rule = Callable[[DraftTree, Sequence[DraftLaw | None], Callable[[int], TargetLaw], Dice], list[int]]


def traversal(
    tree: DraftTree,
    laws: Sequence[DraftLaw | None],
    target: Callable[[int], TargetLaw],
    dice: Dice,
) -> list[int]:
    path, emitted = accept_sampled(tree, laws, target, dice)
    assert path == tree.path(path[-1])
    assert emitted[:-1] == [tree.tokens[node] for node in path[1:]]
    assert len(emitted) == len(path)
    return emitted


def token_level(
    tree: DraftTree,
    laws: Sequence[DraftLaw | None],
    target: Callable[[int], TargetLaw],
    dice: Dice,
) -> list[int]:
    """The rule it is compared with: rejection child by child (RRS, without replacement RRSw)."""
    node, emitted = 0, list[int]()
    while True:
        rest = target(node)[1]
        for child in range(node + 1, len(tree)):
            if tree.parents[child] != node:
                continue
            token, law = tree.tokens[child], laws[child]
            q = np.eye(rest.size)[token] if law is None else law
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
    laws: Sequence[DraftLaw | None],
    target: Callable[[int], TargetLaw],
    dice: Dice,
) -> list[int]:
    """Logits of node i are the number i."""
    logits = np.arange(len(tree), dtype=np.float32).reshape(-1, 1)
    return accept(tree, logits, lambda row: dice.draw(target(int(row[0]))[1]))[1]


def dense_target(model: Model, growth: Growth) -> Callable[[int], TargetLaw]:
    return lambda node: (None, model(growth.text(node)).copy())


def sparse_target(model: Model, growth: Growth) -> Callable[[int], TargetLaw]:
    """Only the possible tokens, best first."""

    def target(node: int) -> TargetLaw:
        law = model(growth.text(node))
        ids = np.argsort(-law)[: np.count_nonzero(law)]
        return ids, law[ids]

    return target


def emissions(
    models: tuple[Model, Model],
    grow: Grower,
    rule: Rule = traversal,
    target: Callable[[Model, Growth], Callable[[int], TargetLaw]] = dense_target,
) -> dict[tuple[int, ...], float]:
    """Emitted tokens of one round, and their probability."""

    def experiment(dice: Dice) -> tuple[int, ...]:
        growth = Growth(models[1], dice)
        grow(growth)
        return tuple(rule(growth.tree, growth.laws, target(models[0], growth), dice))

    law: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for probability, emitted in outcomes(experiment):
        law[emitted] += probability
    return law


def chance_of(model: Model, tokens: Sequence[int], start: int = 0) -> float:
    """Chance that the model goes on like this after the first `start` tokens."""
    return math.prod(float(model(tuple(tokens[:i]))[tokens[i]]) for i in range(start, len(tokens)))


def law_error(target: Model, law: dict[tuple[int, ...], float]) -> float:
    """Largest error of a text's probability, when the target completes what a round emitted."""
    length = max(map(len, law))
    texts: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for emitted, probability in law.items():
        for ending in product(range(target(()).size), repeat=length - len(emitted)):
            text = (*emitted, *ending)
            texts[text] += probability * chance_of(target, text, len(emitted))
    every = product(range(target(()).size), repeat=length)
    return max(abs(texts[text] - chance_of(target, text)) for text in every)


def mean_length(law: dict[tuple[int, ...], float]) -> float:
    """Expected tokens a round, the target's own included."""
    return math.fsum(len(emitted) * probability for emitted, probability in law.items())


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("grower", GROWERS)
def test_the_output_has_the_targets_law(grower: str, models: str) -> None:
    law = emissions(MODELS[models], GROWERS[grower])
    assert math.fsum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert law_error(MODELS[models][0], law) < 1e-12
