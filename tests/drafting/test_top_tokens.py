"""The best tokens of a row, against sorting all of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.model import top_tokens_of

quick = settings(max_examples=100)
SPREAD = 5.3
logits = st.floats(-30.0, 30.0, width=32) | st.just(-math.inf) | st.integers(-3, 3).map(float)


@quick
@given(st.lists(logits, max_size=40), st.floats(-20.0, 20.0, width=32))
def test_they_are_those_of_the_sorted_row(values: list[float], possible: float) -> None:
    """Equal logits may come in any order, so logits are compared, and each token's own share."""
    row = np.array([*values, possible], np.float32)
    tokens, shares = top_tokens_of(row)
    highest = float(row.max())
    near = [x for x in sorted(row.tolist(), reverse=True) if x > row.max() - np.float32(SPREAD)]
    found = [float(row[token]) for token in tokens]
    assert len(set(tokens)) == len(tokens) == len(shares)
    assert found == near[:8]
    weights = [math.exp(x - highest) for x in found]
    assert list(shares) == pytest.approx([w / math.fsum(weights) for w in weights], rel=1e-5)
    assert math.fsum(shares) == pytest.approx(1.0, rel=1e-5)
    assert min(shares) > 0.0


def test_by_hand() -> None:
    """Probabilities of 1/2, 1/4, 1/8: shares 4/7, 2/7, 1/7; what is far below is left out."""
    row = np.full(50_000, -20.0, np.float32)
    row[[7, 49_999, 3]] = np.log([0.5, 0.125, 0.25])
    tokens, shares = top_tokens_of(row)
    assert list(tokens) == [7, 3, 49_999]
    assert list(shares) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_at_most_eight() -> None:
    tokens, shares = top_tokens_of(np.linspace(0.0, 1.0, 100, dtype=np.float32))
    assert list(tokens) == list(range(99, 91, -1))
    assert len(shares) == 8


def test_masked_tokens_are_never_among_them() -> None:
    row = np.full(10, -np.inf, np.float32)
    row[4] = -3.0
    assert top_tokens_of(row) == ([4], [1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_row_has_none(value: float) -> None:
    """Rows of rejected nodes are looked at too, and nobody has checked those."""
    assert top_tokens_of(np.full(10, value, np.float32)) == ([], [])


def test_the_row_is_not_written_to() -> None:
    row = np.arange(20, dtype=np.float32)
    row.flags.writeable = False
    top_tokens_of(row)
