"""Where outputs part, and how much logits depend on what else is in the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgespec.backends.base import Logits
from edgespec.backends.fake import FakeBackend
from edgespec.compare import Divergence, find_divergence
from edgespec.noise import measure_batch_noise
from edgespec.tree import DraftTree

V = 16


def by_length(context: tuple[int, ...]) -> Sequence[float]:
    """The gap between the two best logits is an eighth of the context's length."""
    row = [0.0] * V
    row[len(context) % V] = 100.0 + len(context) / 8
    row[(len(context) + 5) % V] = 100.0
    return row


# ------------------------------------------------------------------------------ divergence


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


# ------------------------------------------------------------------------------ noise


class Noisy(FakeBackend):
    """Adds `noise[token]` to logits in steps of `from_size` nodes, from `from_depth` tokens on."""

    def __init__(
        self,
        noise: dict[int, float],
        *,
        from_size: int = 2,
        from_depth: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(self._logits, V, **options)
        self.noise = noise
        self.from_size = from_size
        self.from_depth = from_depth

    @staticmethod
    def _logits(context: tuple[int, ...]) -> Sequence[float]:
        """Token 3 is best, then 4, 5, ...; tokens 0 to 2 are the worst."""
        return [(3 - token) % V * -1.0 if token < 3 else 3.0 - token for token in range(V)]

    def verify(self, tree: DraftTree) -> Logits:
        rows = super().verify(tree)
        if len(tree) >= self.from_size and self.length >= self.from_depth:
            for token, delta in self.noise.items():
                rows[:, token] += np.float32(delta)
        return rows


def test_a_deterministic_backend_has_no_noise_and_an_empty_cache() -> None:
    backend = FakeBackend(by_length, V)
    assert measure_batch_noise(backend) == 0.0
    assert backend.length == 0


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ({4: 0.25}, 0.25),
        ({4: -0.25, 5: 0.125}, 0.25),
        ({3: 0.25}, 0.25),
        ({3: 0.25, 4: -0.5}, 0.75),
        ({token: 0.5 for token in range(V)}, 0.0),
        ({15: 0.5}, 0.0),
    ],
    ids=str,
)
def test_noise_is_how_much_a_gap_between_good_logits_moves(
    noise: dict[int, float], expected: float
) -> None:
    """What moves all logits alike moves no gap, and the 13th best token is not a good one."""
    assert measure_batch_noise(Noisy(noise)) == expected


@pytest.mark.parametrize("from_size", [2, 3, 5, 8, 32])
def test_noise_of_large_steps_only_is_found(from_size: int) -> None:
    assert measure_batch_noise(Noisy({4: 0.25}, from_size=from_size)) == 0.25


def test_noise_of_deep_contexts_only_is_found() -> None:
    """llama.cpp's CPU attention takes another path from 512 cells on."""
    assert measure_batch_noise(Noisy({4: 0.25}, from_depth=512)) == 0.25


def test_the_largest_noise_of_all_depths_and_sizes_counts() -> None:
    class Growing(Noisy):
        def verify(self, tree: DraftTree) -> Logits:
            self.noise = {4: len(tree) / 64 + (self.length >= 512) / 4}
            return super().verify(tree)

    assert measure_batch_noise(Growing({})) == 32 / 64 + 1 / 4


def test_steps_that_the_backend_cannot_do_are_left_out() -> None:
    backend = Noisy({4: 0.25}, max_nodes=4)
    assert measure_batch_noise(backend) == 0.25
    assert max(backend.steps) == 4
    assert measure_batch_noise(Noisy({4: 0.25}, rollback=False)) == 0.0


def test_a_context_between_the_two_depths_is_measured_as_deep_as_it_goes() -> None:
    """600 tokens reach beyond the 512 from which another path is taken, but not to 640 and more."""
    assert measure_batch_noise(Noisy({4: 0.25}, from_depth=512, context_size=600)) == 0.25


def test_a_small_context_is_measured_too() -> None:
    """Noise that was not looked for is not noise that is not there."""
    assert measure_batch_noise(Noisy({4: 0.25}, context_size=64)) == 0.25
