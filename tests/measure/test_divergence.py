"""Where outputs part, and how near the other token was there."""

from __future__ import annotations

import pytest
from fake_backend import FakeBackend
from logit_gaps import V, by_length

from edgespec.measure.noise import Divergence, find_divergence


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 9, 9], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [1], 0),
    ],
)
def test_the_first_difference_and_the_gap_of_the_target_there(
    plain: list[int], other: list[int], position: int
) -> None:
    """After a prompt of 5 tokens and `position` more the gap is (5 + position) / 8."""
    backend = FakeBackend(by_length, V)
    found = find_divergence(backend, [0] * 5, plain, other)
    assert found == Divergence(position, (5 + position) / 8)


def test_equal_outputs_do_not_diverge() -> None:
    backend = FakeBackend(by_length, V)
    backend.prefill([1, 2, 3])
    assert find_divergence(backend, [0] * 5, [1, 2, 3], (1, 2, 3)) is None
    assert backend.length == 3  # nothing was computed


def test_long_texts_are_prefilled_in_batches_and_the_cache_is_empty_afterwards() -> None:
    backend = FakeBackend(by_length, V, batch_size=8)
    backend.prefill([1, 2, 3])
    found = find_divergence(backend, [0] * 40, [1] * 30, [1] * 25 + [2] * 5)
    assert found == Divergence(25, 65 / 8)
    assert backend.length == 0
