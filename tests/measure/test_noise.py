"""How much logits depend on what else is in the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from logit_gaps import V, by_length

from edgespec.backends.base import DraftTree, Logits
from edgespec.errors import UnsupportedError
from edgespec.measure.noise import (
    largest_invariant_step,
    measure_batch_noise,
    prefill_is_invariant,
)


class Noisy(FakeBackend):
    """Adds `noise[token]` to logits in steps of `from_size` nodes at some depths of context."""

    def __init__(
        self,
        noise: dict[int, float],
        *,
        from_size: int = 2,
        depths: range = range(10_000),
        **options: Any,
    ) -> None:
        super().__init__(self._logits, V, **options)
        self.noise = noise
        self.from_size = from_size
        self.depths = depths

    @staticmethod
    def _logits(context: tuple[int, ...]) -> Sequence[float]:
        """Token 3 is best, then 4, 5, ... in steps of one; tokens 0 to 2 are the worst."""
        return [-float((token - 3) % V) for token in range(V)]

    def verify(self, tree: DraftTree) -> Logits:
        rows = super().verify(tree)
        for row, depth in zip(rows, tree.depths(), strict=True):
            if len(tree) >= self.from_size and self.length + depth in self.depths:
                for token, delta in self.noise.items():
                    row[token] += np.float32(delta)
        return rows


def six_deviations(*changes: float, num_rows: int = 1) -> float:
    """Of the changes of the seven gaps of `num_rows` rows, of which the others are zero."""
    return 6 * math.sqrt(sum(change**2 for change in changes) / (7 * num_rows))


def test_a_deterministic_backend_has_no_noise_and_an_empty_cache() -> None:
    backend = FakeBackend(by_length, V)
    assert measure_batch_noise(backend) == 0.0
    assert backend.length == 0


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ({4: 0.25}, six_deviations(0.25)),
        ({4: -0.25, 5: 0.125}, six_deviations(0.25, 0.125)),
        ({3: 0.25}, six_deviations(*[0.25] * 7)),
        ({3: 0.25, 4: -0.5}, six_deviations(0.75, *[0.25] * 6)),
        ({token: 0.5 for token in range(V)}, 0.0),
        ({15: 0.5}, 0.0),
    ],
    ids=str,
)
def test_noise_is_how_much_gaps_between_good_logits_move(
    noise: dict[int, float], expected: float
) -> None:
    """What moves all logits alike moves no gap, and the 13th best token is not a good one."""
    assert measure_batch_noise(Noisy(noise)) == pytest.approx(expected)


def test_a_rare_large_change_counts_as_it_is() -> None:
    """One row of 64 is changed, and six deviations of so few changes are less than the change."""
    noise = measure_batch_noise(Noisy({4: 0.25}, depths=range(100, 101)))
    assert six_deviations(0.25, num_rows=64) < 0.25 == noise


def test_no_row_is_copied_to_be_compared() -> None:
    """A row of a large vocabulary is more than a plan leaves."""

    class Row(np.ndarray[Any, Any]):
        def tobytes(self, *_: Any) -> bytes:
            pytest.fail("a row was copied")

    class Uncopied(FakeBackend):
        def verify(self, tree: DraftTree) -> Logits:
            return super().verify(tree).view(Row)

    backend = Uncopied(by_length, V)
    assert largest_invariant_step(backend) == backend.max_nodes
    assert prefill_is_invariant(backend, 4)


@pytest.mark.parametrize("from_size", [2, 3, 4, 8, 32])
def test_noise_of_large_steps_only_is_found(from_size: int) -> None:
    noisy = Noisy({4: 0.25}, from_size=from_size)
    assert measure_batch_noise(noisy) == pytest.approx(six_deviations(0.25))


@pytest.mark.parametrize(("first", "context"), [(512, 4096), (512, 600), (0, 100)])
def test_noise_is_found_as_deep_as_a_context_goes(first: int, context: int) -> None:
    """llama.cpp's CPU attention takes another path from 512 cells on."""
    noisy = Noisy({4: 0.25}, depths=range(first, context), context_size=context)
    assert measure_batch_noise(noisy) > 0.0


def test_the_worst_size_and_depth_count() -> None:
    class Growing(Noisy):
        def verify(self, tree: DraftTree) -> Logits:
            self.noise = {4: len(tree) / 64 + (self.length >= 512) / 4}
            return super().verify(tree)

    noise = measure_batch_noise(Growing({}, context_size=704))
    assert noise == pytest.approx(six_deviations(32 / 64 + 1 / 4))


def test_steps_that_the_backend_cannot_do_are_left_out() -> None:
    backend = Noisy({4: 0.25}, max_nodes=4)
    assert measure_batch_noise(backend) > 0.0
    assert max(backend.steps) == 4
    assert measure_batch_noise(Noisy({4: 0.25}, rollback=False)) == 0.0


def test_progress_goes_from_none_to_all() -> None:
    parts: list[float] = []
    largest_invariant_step(FakeBackend(by_length, V), progress=parts.append)
    assert len(parts) > 1
    assert parts == sorted(parts)
    assert 0.0 < parts[0] < 0.1 and 0.9 < parts[-1] <= 1.0


def test_where_nothing_can_be_compared_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens are, and there is one before them; a text takes tokens."""
    assert largest_invariant_step(Noisy({}, context_size=65)) == 64
    with pytest.raises(UnsupportedError, match="a context of more than 64 tokens"):
        largest_invariant_step(Noisy({}, context_size=64))
    backend = FakeBackend(by_length, V)
    monkeypatch.setattr(backend.tokenizer, "encode", lambda _text, add_special: [])
    with pytest.raises(UnsupportedError, match="no tokens for plain English"):
        largest_invariant_step(backend)


def test_every_step_of_a_deterministic_backend_is_invariant() -> None:
    backend = FakeBackend(by_length, V)
    assert largest_invariant_step(backend) == backend.max_nodes
    assert backend.length == 0


@pytest.mark.parametrize(
    ("from_size", "largest"), [(2, 1), (3, 2), (4, 3), (8, 7), (9, 8), (32, 24), (33, 32)]
)
def test_the_largest_step_that_rounds_like_a_single_token(from_size: int, largest: int) -> None:
    """However little changes: the 13th best token by 2^-20 is enough."""
    noisy = Noisy({15: 2.0**-20}, from_size=from_size)
    assert largest_invariant_step(noisy) == largest


def test_an_invariant_step_is_invariant_at_every_depth() -> None:
    assert largest_invariant_step(Noisy({4: 0.25}, depths=range(512, 9999))) == 1
    assert largest_invariant_step(Noisy({4: 0.25}, max_nodes=4, from_size=8)) == 4


class Remembering(FakeBackend):
    """Every logit is larger by 2^-20 for each token that was fed with more than `most` at once."""

    def __init__(self, most: int, depths: range = range(10_000), **options: Any) -> None:
        super().__init__(self._logits, V, **options)
        self.most, self.depths = most, depths
        self.fed: list[int] = []  # with how many each token was

    @staticmethod
    def _logits(context: tuple[int, ...]) -> Sequence[float]:
        return [float(sum(context)), *[0.0] * (V - 1)]

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.fed[self.length :] = [len(tokens)] * len(tokens)
        return super().prefill(tokens)

    def commit(self, path: Sequence[int]) -> None:
        self.fed[self.length :] = [len(path)] * len(path)
        super().commit(path)

    def verify(self, tree: DraftTree) -> Logits:
        fed = enumerate(self.fed[: self.length])
        changes = sum(size > self.most for place, size in fed if place in self.depths)
        rows = super().verify(tree)
        rows += np.float32(2.0**-20 * changes)
        return rows


@pytest.mark.parametrize(
    ("backend", "step", "expected"),
    [
        (Remembering(most=64), 8, True),
        (Remembering(most=8), 8, False),
        (Remembering(most=8), 16, True),  # which round as batches do
        (Remembering(most=8, depths=range(512, 9999)), 8, False),
        (Remembering(most=8, depths=range(63, 64)), 8, True),  # it was read in batches both ways
        (Remembering(most=64, batch_size=128), 8, False),
        (Remembering(most=64, context_size=50), 8, True),
        (Remembering(most=8, context_size=50), 8, False),
    ],
)
def test_a_cache_of_steps_is_one_of_batches_where_both_round_alike(
    backend: Remembering, step: int, expected: bool
) -> None:
    """Whatever the cache held before; it is empty afterwards."""
    backend.prefill([5] * 7)
    assert prefill_is_invariant(backend, step) is expected
    assert backend.length == 0
