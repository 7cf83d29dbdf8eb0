"""Verification of sampled drafts, proved by enumeration: every draw and every coin is followed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from all_dice import AllDice, Row, outcomes
from drafted_trees import (
    GROWERS,
    MODELS,
    ROOT,
    Grower,
    Model,
    Rule,
    TreeBuilder,
    chain,
    chance_of,
    emissions,
    law_error,
    mean_length,
    sample_and_match,
    sparse_target,
    table,
    token_level,
    traversal,
)

from edgespec.backends.base import DraftTree
from edgespec.decode.verification import accept_sampled
from edgespec.sampling.sampling import Sampler, TargetDistribution, without


@cache
def law_of(grower: str, models: str) -> dict[tuple[int, ...], float]:
    """What `accept_sampled` emits; several tests look at it."""
    return emissions(MODELS[models], GROWERS[grower])


def test_the_dice_follow_every_outcome() -> None:
    def experiment(dice: Sampler) -> tuple[int, ...]:
        first = dice.draw(np.array([1.0, 0.0, 3.0]))
        return (first, dice.accepts(0.25)) if first else (first,)

    found = {outcome: probability for probability, outcome in outcomes(experiment)}
    assert found == {(0,): 0.25, (2, 0): 0.5625, (2, 1): 0.1875}


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("grower", GROWERS)
def test_the_output_has_the_targets_law(grower: str, models: str) -> None:
    distribution = law_of(grower, models)
    assert math.fsum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    assert law_error(MODELS[models][0], distribution) < 1e-12


@pytest.mark.parametrize("grower", ["chain of 1", "siblings", "given after sampled", "by tokens"])
def test_the_output_has_the_targets_law_with_five_tokens(grower: str) -> None:
    for seed in range(3):
        models = table("rough", 5, 100 + seed), table("rough", 5, 200 + seed)
        assert law_error(models[0], emissions(models, GROWERS[grower])) < 1e-12


@pytest.mark.parametrize("models", ["another", "zeros", "p one-hot", "p with zeros"])
@pytest.mark.parametrize("grower", GROWERS)
def test_a_target_without_its_impossible_tokens_is_the_same(grower: str, models: str) -> None:
    dense = law_of(grower, models)
    sparse = emissions(MODELS[models], GROWERS[grower], target=sparse_target)
    assert_same(sparse, dense)


def test_a_float32_law_is_as_good_as_its_rounding() -> None:
    def rounded(builder: TreeBuilder) -> None:
        GROWERS["tree"](builder)
        builder.distributions = [
            None if distribution is None else distribution.astype(np.float32)
            for distribution in builder.distributions
        ]

    assert 0.0 < law_error(MODELS["rough"][0], emissions(MODELS["rough"], rounded)) < 1e-6


# ------------------------------------------------------------------------------ special cases


def assert_same(
    found: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]
) -> None:
    for emitted in {*found, *expected}:
        assert found[emitted] == pytest.approx(expected[emitted], abs=1e-13)


def block_lengths(models: tuple[Model, Model], length: int) -> dict[int, float]:
    """Accepted tokens of a chain -> probability, by the closed form of arXiv 2403.10444.

    Given the draft, token i is the last one accepted where it is the largest with U_i <= h_i.
    """
    target, draft = models
    lengths: defaultdict[int, float] = defaultdict(float)
    for tokens in product(range(draft(()).size), repeat=length):
        remaining = chance_of(draft, tokens)
        if remaining == 0.0:
            continue
        weights = [1.0]
        for i, token in enumerate(tokens):
            prefix = tokens[:i]
            weights.append(min(1.0, weights[-1] * target(prefix)[token] / draft(prefix)[token]))
        accepted = [1.0]
        for i in range(1, length):
            p, q = target(tokens[:i]), draft(tokens[:i])
            rest = float(np.maximum(weights[i] * p - q, 0.0).sum())
            accepted.append(rest / (rest + 1.0 - weights[i]) if weights[i] < 1.0 else 1.0)
        accepted.append(weights[-1])
        for i in range(length, 0, -1):
            lengths[i] += remaining * accepted[i]
            remaining *= 1.0 - accepted[i]
        lengths[0] += remaining
    return lengths


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("models", MODELS)
def test_a_chain_is_block_verification(models: str, length: int) -> None:
    expected = block_lengths(MODELS[models], length)
    found: defaultdict[int, float] = defaultdict(float)
    for emitted, probability in emissions(MODELS[models], chain(length)).items():
        found[len(emitted) - 1] += probability
    for accepted in range(length + 1):
        assert found[accepted] == pytest.approx(expected[accepted], abs=1e-12)


def test_the_example_of_block_verification() -> None:
    """Section 2 of arXiv 2403.10444: 11/9 accepted tokens instead of 10/9."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    models: tuple[Model, Model] = (lambda prefix: p, lambda prefix: q)
    assert mean_length(emissions(models, chain(2))) == pytest.approx(1 + 11 / 9, abs=1e-12)
    by_token = mean_length(emissions(models, chain(2), token_level))
    assert by_token == pytest.approx(1 + 10 / 9, abs=1e-12)


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("grower", ["root", "given chain", "given tree"])
def test_a_deterministic_tree_is_sample_and_match(grower: str, models: str) -> None:
    """Not only the same texts: the same lengths with the same chances."""
    distribution = law_of(grower, models)
    assert_same(distribution, emissions(MODELS[models], GROWERS[grower], sample_and_match))


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("grower", GROWERS)
def test_no_fewer_tokens_than_with_rejection_by_token(grower: str, models: str) -> None:
    distribution = law_of(grower, models)
    by_token = emissions(MODELS[models], GROWERS[grower], token_level)
    assert law_error(MODELS[models][0], by_token) < 1e-12
    assert mean_length(distribution) >= mean_length(by_token) - 1e-12


def test_more_tokens_than_with_rejection_by_token() -> None:
    """A gain needs depth: one level is the same either way. Means over ten pairs of models."""
    pairs = [(table("rough", 3, 300 + i), table("rough", 3, 400 + i)) for i in range(10)]

    def mean(grower: str, rule: Rule) -> float:
        lengths = [mean_length(emissions(models, GROWERS[grower], rule)) for models in pairs]
        return math.fsum(lengths) / len(pairs)

    for grower in ("chain of 3", "tree", "independent tree"):
        assert mean(grower, traversal) > 1.01 * mean(grower, token_level)
    assert mean("siblings", traversal) == pytest.approx(mean("siblings", token_level), abs=1e-12)


def test_a_draft_model_equal_to_the_target_is_always_accepted() -> None:
    distribution = emissions(MODELS["equal"], GROWERS["chain of 3"])
    assert {len(emitted) for emitted in distribution} == {4}


def test_beside_known_tokens_the_sampled_one_is_best_judged_first() -> None:
    """Two known tokens H and one drawn outside H: the bound of arXiv 2502.18779 is reached.

    It is p on H and min(p, q) elsewhere; judging the known tokens first accepts less.
    """
    models = table("rough", 5, 31), table("rough", 5, 32)
    p, q = models[0](()), models[1](()).copy()
    q[:2] = 0.0
    bound = float(p[:2].sum() + np.minimum(p, q / q.sum())[2:].sum())

    def known_last(builder: TreeBuilder) -> None:
        builder.draw(0, excluded=(0, 1))
        builder.put(0, 0)
        builder.put(0, 1)

    def known_first(builder: TreeBuilder) -> None:
        builder.put(0, 0)
        builder.put(0, 1)
        builder.draw(0)

    assert mean_length(emissions(models, known_last)) == pytest.approx(1.0 + bound, abs=1e-12)
    assert mean_length(emissions(models, known_first)) < 0.99 + bound


# ------------------------------------------------------------------------------ not allowed

Choice = Callable[[TreeBuilder], list[int]]


def chosen(choose: Choice, grow: Grower) -> Grower:
    """A tree of which only some nodes are sent, chosen when all are drawn."""

    def growing(builder: TreeBuilder) -> None:
        grow(builder)
        kept = [0, *choose(builder)]
        builder.parents = [-1, *(kept.index(builder.parents[node]) for node in kept[1:])]
        builder.tokens = [builder.tokens[node] for node in kept]
        builder.distributions = [builder.distributions[node] for node in kept]

    return growing


def drawn_chance(builder: TreeBuilder, node: int) -> float:
    distribution = builder.distributions[node]
    assert distribution is not None
    return float(distribution[builder.tokens[node]])


def likely_tokens(builder: TreeBuilder) -> list[int]:
    """Drops a drawn token that the draft model itself finds unlikely."""
    return [node for node in range(1, len(builder.tokens)) if drawn_chance(builder, node) > 0.3]


def best_size(builder: TreeBuilder) -> list[int]:
    """Drops the last token when it turns out unlikely, as a rule for sizes would."""
    return [1, 2] if drawn_chance(builder, 2) > 0.3 else [1]


def other_order(builder: TreeBuilder) -> list[int]:
    """Siblings not in the order in which they were drawn."""
    return [2, 1]


def second_if_first_is_likely(builder: TreeBuilder) -> list[int]:
    """Decides by what was drawn before: as if the second had not been drawn."""
    return [1, 2] if drawn_chance(builder, 1) > 0.3 else [1]


@pytest.mark.parametrize(
    ("choose", "grow"),
    [
        (likely_tokens, chain(1)),
        (likely_tokens, GROWERS["siblings"]),
        (best_size, chain(2)),
        (best_size, GROWERS["siblings"]),
        (other_order, GROWERS["siblings"]),
    ],
)
def test_a_tree_chosen_by_what_was_drawn_is_biased(choose: Choice, grow: Grower) -> None:
    """A warning to authors of drafters: these trees look harmless, and their output is wrong."""
    distribution = emissions(MODELS["another"], chosen(choose, grow))
    assert law_error(MODELS["another"][0], distribution) > 1e-3


@pytest.mark.parametrize("grow", [chain(2), GROWERS["siblings"]])
def test_a_tree_chosen_by_what_was_drawn_before_is_not_biased(grow: Grower) -> None:
    distribution = emissions(MODELS["another"], chosen(second_if_first_is_likely, grow))
    assert law_error(MODELS["another"][0], distribution) < 1e-12


def test_forgetting_that_a_sibling_was_not_replaced_is_biased() -> None:
    def grow(builder: TreeBuilder) -> None:
        GROWERS["siblings"](builder)
        builder.distributions[2] = builder.model(())

    assert law_error(MODELS["another"][0], emissions(MODELS["another"], grow)) > 1e-3


def test_a_deterministic_token_that_repeats_a_sibling_is_refused() -> None:
    distribution = np.array([0.5, 0.5])
    tree = DraftTree((ROOT, 1, 1), (-1, 0, 0))
    for first in (distribution, None):
        with pytest.raises(AssertionError, match="merged"):
            accept_sampled(
                tree, [None, first, None], lambda node: (None, distribution), AllDice(())
            )


def test_a_token_that_its_law_does_not_have_is_refused() -> None:
    tree, distribution = DraftTree.chain((ROOT, 1)), np.array([1.0, 0.0])
    with pytest.raises(AssertionError, match="its distribution does not have"):
        accept_sampled(tree, [None, distribution], lambda node: (None, np.ones(2) / 2), AllDice(()))


# ------------------------------------------------------------------------------ cost, rounding


class Stubborn(Sampler):
    """Always the same answer to a coin; draws the likeliest."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def accepts(self, probability: float) -> bool:
        return self.answer

    def draw(self, weights: Row) -> int:
        return int(weights.argmax())


def copy_of(p: Row, node: int) -> TargetDistribution:
    """The same distribution at every node."""
    return None, p.copy()


@pytest.mark.parametrize(
    ("p", "answer", "rows"),
    [
        pytest.param((0.0, 0.0, 0.3, 0.4, 0.3), False, [0, 3, 4], id="none below the impossible"),
        pytest.param((0.1, 0.2, 0.3, 0.2, 0.2), True, [0, 1, 2], id="none after acceptance"),
        pytest.param((1.0, 0.0, 0.0, 0.0, 0.0), False, [0], id="nothing possible"),
    ],
)
def test_only_rows_that_matter_are_asked_for(
    p: tuple[float, ...], answer: bool, rows: list[int]
) -> None:
    """Root -> {1 -> 2, 3 -> 4}; a leaf's own row is wanted only when it is accepted."""
    tree, distribution = DraftTree((ROOT, 1, 2, 3, 4), (-1, 0, 1, 0, 3)), np.full(5, 0.2)
    asked = []

    def target(node: int) -> TargetDistribution:
        asked.append(node)
        return None, np.array(p)

    accept_sampled(
        tree,
        [None, distribution, distribution, distribution, distribution],
        target,
        Stubborn(answer),
    )
    assert asked == rows


def test_a_rejection_that_only_rounding_allows_does_no_harm() -> None:
    """The draft's distribution is the target's but for a bit, and dice reject all the same."""
    distribution = np.array([0.1, 0.2, 0.7])
    for change in (0.0, -(2.0**-53), 2.0**-53):
        p = distribution * np.array([1.0, 1.0 + change, 1.0])
        tree, target = DraftTree((ROOT, 1, 2, 0), (-1, 0, 0, 1)), partial(copy_of, p)
        path, emitted = accept_sampled(
            tree, [None, distribution, distribution, distribution], target, Stubborn(False)
        )
        assert len(path) == len(emitted)
        assert 0 <= emitted[-1] < 3


def test_a_lone_root_with_one_possible_token() -> None:
    """Rejected against all odds, its only token is drawn all the same."""
    one_hot = np.array([0.0, 1.0 - 2.0**-53])
    tree = DraftTree.chain((ROOT, 1))
    target = partial(copy_of, one_hot)
    assert accept_sampled(tree, [None, None], target, Stubborn(False)) == ([0], [1])


def test_laws_are_not_written_to() -> None:
    distributions = [None, np.array([0.9, 0.1, 0.0]), np.array([0.0, 1.0, 0.0])]
    for distribution in distributions[1:]:
        assert distribution is not None
        distribution.flags.writeable = False
    tree, p = DraftTree((ROOT, 0, 1), (-1, 0, 0)), np.array([0.1, 0.1, 0.8])
    assert accept_sampled(tree, distributions, partial(copy_of, p), Stubborn(False)) == ([0], [2])


def test_without_is_what_is_left() -> None:
    distribution = np.array([0.5, 0.25, 0.25])
    rest = without(distribution, 0)
    assert rest is not None
    assert rest.tolist() == [0.0, 0.5, 0.5]
    assert distribution.tolist() == [0.5, 0.25, 0.25]
    assert without(np.array([0.0, 1.0]), 1) is None
