"""The backend that other tests are made with keeps the rules of the real ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_backend import FakeBackend

from edgespec.backends.base import DraftTree, HoldsSequences
from edgespec.errors import BackendError, ContextFullError

V = 16
TREE = DraftTree((3, 5, 7, 9), (-1, 0, 0, 1))  # 3 -> {5 -> 9, 7}


def whole_context(context: tuple[int, ...]) -> Sequence[float]:
    return [float(hash((context, token)) % 97) for token in range(V)]


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
