"""Draft trees: hand-made ones, and any tree against a slow, obvious reading of `parents`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import DraftTree

quick = settings(max_examples=200)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees of up to 12 nodes; tokens repeat often, even among siblings."""
    size = draw(st.integers(1, 12))
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    return DraftTree(tokens, parents)


def slow_path(tree: DraftTree, node: int) -> list[int]:
    return [node] if node == 0 else [*slow_path(tree, tree.parents[node]), node]


# 11 -> {12 -> {14, 15 -> 17}, 13 -> 16}
BRANCHED = DraftTree((11, 12, 13, 14, 15, 16, 17), (-1, 0, 0, 1, 1, 2, 4))


def test_a_branched_tree() -> None:
    assert len(BRANCHED) == 7
    assert not BRANCHED.is_chain
    assert BRANCHED.depths() == [0, 1, 1, 2, 2, 2, 3]
    assert BRANCHED.leaves() == [3, 5, 6]
    assert BRANCHED.path(6) == [0, 1, 4, 6]
    assert BRANCHED.path(0) == [0]


@pytest.mark.parametrize(
    ("node", "token", "child"),
    [(0, 12, 1), (0, 13, 2), (1, 15, 4), (4, 17, 6), (0, 14, -1), (2, 17, -1), (6, 11, -1)],
)
def test_child_is_found_below_its_own_parent_only(node: int, token: int, child: int) -> None:
    assert BRANCHED.child(node, token) == child


def test_a_chain() -> None:
    chain = DraftTree.chain((5, 6, 7))
    assert list(chain.parents) == [-1, 0, 1]
    assert (chain.is_chain, chain.depths(), chain.leaves()) == (True, [0, 1, 2], [2])
    assert (chain.child(1, 7), chain.child(0, 7), chain.child(2, 5)) == (2, -1, -1)


def test_a_chain_is_known_by_its_parents_not_by_how_it_was_made() -> None:
    assert DraftTree((5, 6, 7), (-1, 0, 1)).is_chain
    assert DraftTree((5,), (-1,)).is_chain
    assert not DraftTree((5, 6, 7), (-1, 0, 0)).is_chain


@quick
@given(trees())
def test_every_tree_is_like_the_slow_reading_of_its_parents(tree: DraftTree) -> None:
    nodes = range(len(tree))
    paths = [slow_path(tree, node) for node in nodes]
    assert [tree.path(node) for node in nodes] == paths
    assert tree.depths() == [len(path) - 1 for path in paths]
    inner = {path[-2] for path in paths if len(path) > 1}
    assert tree.leaves() == [node for node in nodes if node not in inner]
    assert tree.is_chain == (len(tree.leaves()) == 1)


@quick
@given(trees(), st.integers(0, 11), st.integers(0, 4))
def test_child_is_the_first_node_with_that_parent_and_token(
    tree: DraftTree, node: int, token: int
) -> None:
    node %= len(tree)
    found = [
        i for i in range(len(tree)) if tree.parents[i] == node and tree.tokens[i] == token and i
    ]
    assert tree.child(node, token) == (found[0] if found else -1)
