"""The one rule, against trying every size; and the tree it builds, against the proposal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.proposal import EMPTY, Proposal, StepContext, build_tree, choose_size
from edgespec.memory.times import CostCurve

INF = float("inf")
quick = settings(max_examples=100)


def curve_of(*ms: float, **effects: float) -> CostCurve:
    """A curve with t(1), t(2), ... in ms."""
    return CostCurve([INF, *ms], **effects)


def chosen_size(
    probabilities: Sequence[float],
    curve: CostCurve,
    depth: int,
    previous: int,
    max_nodes: int,
    extra: int = 0,
    **costs: float,
) -> int:
    context = StepContext(max_nodes, 0.0, curve, depth, previous, extra)
    return choose_size(probabilities, context, **costs)[0]  # type: ignore[arg-type]


def rate(
    probabilities: Sequence[float],
    curve: CostCurve,
    depth: int,
    previous: int,
    extra: int,
    num_drafted: int,
) -> float:
    """E(n) / t(n) of the docstring, and t(n, depth, changed) of the curve's, with what is unsure.

    Plain decoding is always possible: its step is estimated where it was not measured.
    """
    nodes = num_drafted + 1 + extra
    if num_drafted == 0:
        return 1.0 / curve.estimated_ms(nodes, depth, previous)
    before, error = curve.standard_errors([1 + extra, nodes], depth)
    unsure = max(0.0, error - before)
    ms = curve.base[nodes] + (curve.depth_ms + curve.depth_node_ms * nodes) * depth
    ms += curve.change_ms if previous not in (0, nodes) else 0.0
    return (1.0 + math.fsum(probabilities[:num_drafted])) / (ms * (1.0 + unsure))


step_times = st.lists(
    st.one_of(st.floats(0.1, 100.0), st.just(INF)), min_size=1, max_size=12
).filter(lambda ms: ms[0] != INF)


@quick
@given(
    ms=step_times,
    probabilities=st.lists(st.floats(0.0, 1.0), max_size=14),
    depth=st.integers(0, 4000),
    slopes=st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.001), st.floats(0.0, 20.0)),
    previous=st.integers(0, 12),
    max_drafted=st.integers(0, 14),
    extra=st.integers(0, 3),
)
def test_no_size_has_a_better_rate(
    ms: list[float],
    probabilities: list[float],
    depth: int,
    slopes: tuple[float, float, float],
    previous: int,
    max_drafted: int,
    extra: int,
) -> None:
    """The choice is the best of all sizes tried one by one."""
    extra = min(extra, len(ms) - 1)
    probabilities.sort(reverse=True)
    curve = CostCurve([INF, *ms], *slopes)
    chosen = chosen_size(probabilities, curve, depth, previous, max_drafted, extra)
    possible = range(min(len(probabilities), max_drafted, len(ms) - 1 - extra) + 1)
    rates = [rate(probabilities, curve, depth, previous, extra, n) for n in possible]
    assert chosen in possible
    assert rates[chosen] >= max(rates) * (1 - 1e-12)
    assert chosen == 0 or ms[chosen + extra] != INF


def test_hand_worked() -> None:
    """With 0.9, 0.6, 0.5: 1.9 / 12 = 0.158, 2.5 / 15 = 0.167, 3.0 / 20 = 0.150; plain 0.103."""
    assert chosen_size((0.9, 0.6, 0.5), curve_of(10, 12, 15, 20), 0, 0, 31) == 2


def test_a_curve_that_is_not_monotone_is_read_at_every_size() -> None:
    """Three nodes cost more than four here, as on CPUs whose kernels take rows by four."""
    curve = curve_of(10, 30, 31, 12)
    assert chosen_size((0.5, 0.4, 0.3), curve, 0, 0, 31) == 3
    assert chosen_size((0.5, 0.4), curve, 0, 0, 31) == 0


def test_plain_when_no_draft_pays() -> None:
    """Each node costs as much as a step of its own, and no guess is certain."""
    assert chosen_size((0.99, 0.98, 0.97), curve_of(10, 20, 30, 40), 0, 0, 31) == 0
    assert chosen_size((), curve_of(10, 10), 0, 0, 31) == 0


def test_a_draft_must_promise_more_than_its_time_is_unsure() -> None:
    """And no more than that: what may be lost is bounded by the ledger."""
    curve = curve_of(10, 10)
    least = curve.standard_errors([2], 0)[0]
    assert least > 0.0
    assert chosen_size((least - 0.001,), curve, 0, 0, 31) == 0
    assert chosen_size((least + 0.001,), curve, 0, 0, 31) == 1


def test_a_step_is_as_dear_as_its_time_is_unsure_until_it_was_timed() -> None:
    """1.1 of a step for 1.05 is too little behind one measurement, and enough behind 200 steps."""
    curve = curve_of(10, 10.5)
    assert chosen_size((0.1,), curve, 0, 0, 31) == 0
    for _ in range(200):
        curve.observe(1, 0, 1, 10.0)
        curve.observe(2, 0, 2, 10.5)
    assert curve.standard_errors([2], 0)[0] < 0.03
    assert chosen_size((0.1,), curve, 0, 0, 31) == 1


@quick
@given(
    ms=step_times,
    probabilities=st.lists(st.floats(0.0, 1.0), max_size=11),
    kept=st.integers(0, 11),
    spent_ms=st.floats(0.0, 50.0),
    node_ms=st.floats(0.0, 5.0),
    drafted=st.integers(0, 11),
)
def test_kept_nodes_stay_and_time_spent_counts(
    ms: list[float],
    probabilities: list[float],
    kept: int,
    spent_ms: float,
    node_ms: float,
    drafted: int,
) -> None:
    """Of all sizes that hold the kept nodes, tried one by one; the rate is that of the choice."""
    kept = min(kept, len(probabilities), len(ms) - 1)
    probabilities[kept:] = sorted(probabilities[kept:], reverse=True)
    context = StepContext(31, 0.0, CostCurve([INF, *ms]), depth=0)
    costs = {"kept": kept, "spent_ms": spent_ms, "node_ms": node_ms, "drafted": drafted}
    size, best_rate = choose_size(probabilities, context, **costs)  # type: ignore[arg-type]
    ms[kept] = context.ms[1 + kept]  # this step is made in any case
    errors = [max(0.0, context.errors[n + 1] - context.errors[kept + 1]) for n in range(len(ms))]
    expected = {
        n: (1.0 + math.fsum(probabilities[:n]), spent_ms + max(0, n - drafted) * node_ms)
        for n in range(kept, min(len(probabilities), len(ms) - 1) + 1)
    }
    tokens, beside_ms = expected[size]
    assert best_rate == pytest.approx(tokens / (beside_ms + ms[size]))
    rates = {n: e / (spent + ms[n] * (1 + errors[n])) for n, (e, spent) in expected.items()}
    rates[0] = rates.get(0, 0.0)
    assert rates[size] >= max(rates.values()) * (1 - 1e-12)


def test_nodes_that_are_drafted_already_take_no_more_time() -> None:
    """1.9 / 10 against 2.8 / 16."""
    assert chosen_size((0.9, 0.9), curve_of(10, 10, 10), 0, 0, 31, node_ms=6.0, drafted=1) == 1


def test_what_joins_kept_nodes_is_compared_with_a_step_over_those() -> None:
    """Which is as unsure as a larger one. Where that brings nothing it is not made larger."""
    flat = curve_of(10, 10, 10)
    assert chosen_size((1.0, 0.1), flat, 0, 0, 31, kept=1) == 2
    assert chosen_size((1.0, 0.0), flat, 0, 0, 31, kept=1) == 1


def test_drafts_must_promise_the_gain_that_is_required() -> None:
    assert chosen_size((0.4,), curve_of(10, 10), 0, 0, 31, required_gain=1.5) == 0
    assert chosen_size((0.6,), curve_of(10, 10), 0, 0, 31, required_gain=1.5) == 1


def test_time_that_was_spent_favours_larger_drafts() -> None:
    """Plain 1 / 10 against 1.5 / 16; with 20 ms spent 1 / 30 against 1.5 / 36."""
    assert chosen_size((0.5,), curve_of(10, 16), 0, 0, 31) == 0
    assert chosen_size((0.5,), curve_of(10, 16), 0, 0, 31, spent_ms=20.0) == 1
    assert chosen_size((0.5,), curve_of(10, 16), 0, 0, 31, spent_ms=20.0, node_ms=9.0) == 0


def test_the_least_useful_probability_by_hand() -> None:
    """The cheapest batch adds (13 - 10) / 3 = 1 ms a node, a tenth of a plain step; half of it."""
    assert curve_of(10, 12, 14, 13).least_useful_probability(0) == pytest.approx(0.05)
    assert curve_of(10, INF, 11.2).least_useful_probability(0) == pytest.approx(0.03)
    assert curve_of(10, 10, 10).least_useful_probability(0) == pytest.approx(0.01)
    assert curve_of(10, 40, 90).least_useful_probability(0) == pytest.approx(0.5)
    assert curve_of(10).least_useful_probability(0) == pytest.approx(0.5)
    deep = curve_of(10, 11, depth_ms=0.01, depth_node_ms=0.002)
    assert deep.least_useful_probability(1000) == pytest.approx(0.5 * (1 + 2) / (10 + 10 + 2))


@quick
@given(
    ms=step_times,
    depth=st.integers(0, 4000),
    slopes=st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.001)),
    part=st.floats(0.0, 1.0),
    count=st.integers(1, 14),
)
def test_no_draft_of_useless_nodes_is_ever_verified(
    ms: list[float], depth: int, slopes: tuple[float, float], part: float, count: int
) -> None:
    """So a drafter that leaves them out loses nothing (0.01 is the least bound there is)."""
    curve = CostCurve([INF, *ms], *slopes)
    least = curve.least_useful_probability(depth)
    if least > 0.01:
        assert chosen_size([least * part] * count, curve, depth, 0, 31) == 0


# ------------------------------------------------------------------------------ the tree


def test_a_chain_of_a_proposal() -> None:
    proposal = Proposal((7, 8, 9), (-1, 0, 1), (0.9, 0.8, 0.7))
    tree = build_tree(5, proposal, 2)
    assert (list(tree.tokens), list(tree.parents)) == ([5, 7, 8], [-1, 0, 1])


@pytest.mark.parametrize("proposal", [EMPTY, Proposal((7,), (-1,), (0.9,))])
def test_nothing_drafted_is_the_root_alone(proposal: Proposal) -> None:
    tree = build_tree(5, proposal, 0)
    assert (list(tree.tokens), list(tree.parents)) == ([5], [-1])


def test_the_likeliest_path_comes_first_and_in_order() -> None:
    """root -> {7 -> {9, 11 -> 12}, 8 -> 10}: each branch lies after the one it leaves."""
    proposal = Proposal((7, 8, 9, 10, 11, 12), (-1, -1, 0, 1, 0, 4), (0.6, 0.3, 0.3, 0.2, 0.1, 0.1))
    tree = build_tree(5, proposal, 6)
    assert list(tree.tokens) == [5, 7, 9, 11, 12, 8, 10]
    assert list(tree.parents) == [-1, 0, 1, 1, 3, 0, 5]


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Proposals of up to 12 nodes that keep the contract: parents come first and are likelier."""
    size = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
    probabilities = draw(st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size))
    return Proposal(tokens, parents, sorted(probabilities, reverse=True))


@quick
@given(
    st.lists(st.floats(0.0, 1.0), max_size=4),
    st.floats(0.0, 8.0),
    st.floats(0.0, 4.0),
    st.sampled_from([0.5, 2.0, 4.0, 16.0]),
)
def test_a_machine_of_another_speed_decides_alike(
    probabilities: list[float], spent_ms: float, node_ms: float, scale: float
) -> None:
    """What a clock shows of drafting is compared with what it would show of steps."""
    sizes = []
    for times in (1.0, scale):
        curve = CostCurve([INF, 10.0, 12.0, 13.0, 16.0, 18.0])
        curve.scale = times
        context = StepContext(5, 0.0, curve, 0)
        size, rate = choose_size(
            sorted(probabilities, reverse=True),
            context,
            spent_ms=times * spent_ms,
            node_ms=times * node_ms,
        )
        assert context.ms[2] == times * 12.0
        sizes.append((size, pytest.approx(times * rate)))
    assert sizes[0] == sizes[1]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@quick
@given(proposals(), st.integers(0, 12))
def test_the_tree_holds_the_best_nodes_with_their_paths(proposal: Proposal, size: int) -> None:
    size = min(size, len(proposal))
    tree = build_tree(5, proposal, size)
    assert (tree.tokens[0], tree.parents[0]) == (5, -1)
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    expected = paths_of(proposal.tokens[:size], proposal.parents[:size])
    drafted = [tuple(tree.tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tree))]
    assert sorted(drafted) == sorted(expected)


@quick
@given(proposals(), st.integers(0, 12))
def test_sources_and_laws_go_with_their_nodes(proposal: Proposal, size: int) -> None:
    """Siblings keep their order, which is the one in which they were drawn."""
    size = min(size, len(proposal))
    names = [str(node) for node in range(len(proposal))]
    distributions = [np.array([float(node)]) for node in range(len(proposal))]
    tree = build_tree(5, replace(proposal, sources=names, distributions=distributions), size)
    if size == 0:
        assert (tree.sources, tree.distributions) == ((), ())
        return
    assert (tree.sources[0], tree.distributions[0]) == ("", None)
    nodes = [int(name) for name in tree.sources[1:]]
    assert sorted(nodes) == list(range(size))
    assert all(
        tree.distributions[place] is distributions[node] for place, node in enumerate(nodes, 1)
    )
    assert list(tree.tokens[1:]) == [proposal.tokens[node] for node in nodes]
    for parent in range(-1, size):
        siblings = [node for node in nodes if proposal.parents[node] == parent]
        assert siblings == sorted(siblings)
    unnamed = build_tree(5, proposal, size)
    assert (unnamed.sources, unnamed.distributions) == ((), ())
    assert list(unnamed.tokens) == list(tree.tokens)


@quick
@given(proposals())
def test_the_first_branch_of_the_tree_is_the_likeliest_one(proposal: Proposal) -> None:
    """Nodes 0, 1, 2, ... walk down the first (so likeliest) child of each node, to a leaf."""
    tree = build_tree(5, proposal, len(proposal))
    node, place = -1, 0
    while node in proposal.parents:
        node, place = list(proposal.parents).index(node), place + 1
        assert tree.tokens[place] == proposal.tokens[node]
        assert tree.parents[place] == place - 1
