"""The backend that other tests are made with keeps the rules of the real ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fake_backend import FakeBackend, markov

from edgespec.backends.base import HoldsSequences
from edgespec.backends.tree import DraftTree
from edgespec.errors import BackendError, ContextFullError, UnsupportedError

V = 16
TREE = DraftTree((3, 5, 7, 9), (-1, 0, 0, 1))  # 3 -> {5 -> 9, 7}


def whole_context(context: tuple[int, ...]) -> Sequence[float]:
    return [float(hash((context, token)) % 97) for token in range(V)]


def test_every_node_of_a_tree_has_the_logits_of_its_path() -> None:
    backend = FakeBackend(whole_context, V)
    backend.prefill([1, 2])
    rows = backend.verify(TREE).copy()
    for node, row in enumerate(rows):
        alone = FakeBackend(whole_context, V)
        expected = alone.prefill([1, 2, *(TREE.tokens[one] for one in TREE.path(node))])
        np.testing.assert_array_equal(row, expected)
    backend.commit([0, 2])
    assert list(backend.tokens) == [1, 2, 3, 7]
    assert backend.steps == [4]


def test_a_branch_that_is_not_the_first_is_fed_again_where_a_cache_keeps_its_order() -> None:
    backend = FakeBackend(whole_context, V, feeds_again=True)
    for path, pending in (([0, 1, 3], 1), ([0, 2], 1), ([0, 1], 0)):
        backend.verify(TREE)
        backend.commit(path)
        assert backend.pending == pending
    backend.prefill([1])
    assert backend.pending == 0


def test_without_rollback_nothing_is_drafted_and_all_is_forgotten() -> None:
    backend = FakeBackend(markov([[0.0] * V] * V), V, rollback=False)
    backend.prefill([1, 2, 3])
    with pytest.raises(UnsupportedError):
        backend.verify(DraftTree.chain((4, 5)))
    assert backend.truncate(2) == 0
    chains = FakeBackend(markov([[0.0] * V] * V), V, tree=False)
    chains.verify(DraftTree.chain((4, 5)))
    with pytest.raises(UnsupportedError):
        chains.verify(TREE)


def test_cells_that_are_shared_are_used_once() -> None:
    backend = FakeBackend(whole_context, V, users=2, cells=10, context_size=9)
    assert isinstance(backend, HoldsSequences)
    one, other = backend.sequences
    one.prefill(range(8))
    backend.share(0, 1, 6)
    assert list(other.tokens) == [0, 1, 2, 3, 4, 5]
    other.prefill([8, 9])
    with pytest.raises(BackendError, match="10 of 10 are used"):
        other.prefill([1])
    one.truncate(2)  # frees two cells: six are still the other's
    one.prefill([1, 2])
    other.truncate(0)
    with pytest.raises(ContextFullError):
        other.prefill(range(10))


def test_a_step_of_several_users_has_the_rows_that_each_has_alone() -> None:
    backend = FakeBackend(whole_context, V, users=3)
    for number, one in enumerate(backend.sequences):
        one.prefill([number + 1])
    rows = backend.verify_together([(0, TREE), (2, TREE)], [(1, [6, 7])])
    for number, found in ((0, rows[0]), (2, rows[1])):
        alone = FakeBackend(whole_context, V)
        alone.prefill([number + 1])
        np.testing.assert_array_equal(found, alone.verify(TREE))
    np.testing.assert_array_equal(rows[2][0], np.asarray(whole_context((2, 6, 7)), np.float32))
    assert list(backend.sequences[1].tokens) == [2, 6, 7]
