"""The acceptance walk on hand-made trees, where row i of the logits marks node i."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.step import accept
from edgespec.decode.verification import cut

# 10 -> {11 -> {13 -> 15, 14}, 12}
TREE = DraftTree((10, 11, 12, 13, 14, 15), (-1, 0, 0, 1, 1, 3))


class Script:
    """Picks the scripted tokens in turn and records which rows it was shown."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self.rows: list[int] = []

    def __call__(self, row: Logits) -> int:
        self.rows.append(int(row[0]))
        return self._tokens[len(self.rows) - 1]


def rows_of(tree: DraftTree) -> Logits:
    """Logits [n, 2] in which row i says i."""
    return np.arange(2 * len(tree), dtype=np.float32).reshape(len(tree), 2) // 2


@pytest.mark.parametrize(
    ("picks", "path"),
    [
        pytest.param([99], [0], id="correction at the root"),
        pytest.param([13], [0], id="a grandchild's token is no child"),
        pytest.param([12, 99], [0, 2], id="bonus after a leaf of another branch"),
        pytest.param([12, 13], [0, 2], id="a cousin's token is no child"),
        pytest.param([11, 99], [0, 1], id="correction half-way"),
        pytest.param([11, 14, 15], [0, 1, 4], id="the sibling's child does not follow"),
        pytest.param([11, 13, 99], [0, 1, 3], id="correction before the last"),
        pytest.param([11, 13, 15, 99], [0, 1, 3, 5], id="all accepted, and a bonus"),
    ],
)
def test_the_walk_follows_the_picks(picks: list[int], path: list[int]) -> None:
    """Emitted is what was picked, once each, from the rows of the path in its order."""
    script = Script(picks)
    assert accept(TREE, rows_of(TREE), script) == (path, picks)
    assert script.rows == path


@pytest.mark.parametrize("place", range(5))
def test_a_round_ends_at_a_row_that_is_handed_over(place: int) -> None:
    """Found on the way, before the row's token is picked, or in a round that was accepted whole."""
    path, picks = [0, 1, 3, 5], [11, 13, 15, 99]
    there = [*path, -1][place]  # -1: no row
    script, expected = Script(picks), (path[: place + 1], picks[:place])
    assert accept(TREE, rows_of(TREE), script, lambda row: int(row[0]) == there) == expected
    assert script.rows == path[:place]
    assert cut(path, picks, rows_of(TREE), lambda row: int(row[0]) == there) == expected


def test_a_lone_root_is_one_pick() -> None:
    script = Script([10])
    assert accept(DraftTree.chain((10,)), rows_of(TREE)[:1], script) == ([0], [10])
    assert script.rows == [0]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=10),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_what_is_committed_is_what_was_picked(
    drafted: list[tuple[int, int]], picks: list[int]
) -> None:
    """For any tree: accepted nodes carry the picks, and no child carries the last one."""
    parents = [-1, *(choice % (i + 1) for i, (choice, _) in enumerate(drafted))]
    tree = DraftTree([0, *(token for _, token in drafted)], parents)
    script = Script(picks)
    path, emitted = accept(tree, rows_of(tree), script)
    assert emitted == picks[: len(path)]
    assert script.rows == path == tree.path(path[-1])
    assert [tree.tokens[node] for node in path[1:]] == emitted[:-1]
    children = [node for node in range(1, len(tree)) if tree.parents[node] == path[-1]]
    assert emitted[-1] not in [tree.tokens[node] for node in children]
