"""A model and texts beside each other: rows do not depend on batches or on other texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from random_gguf import VOCABULARY

from edgespec.errors import BackendError
from edgespec.quantize.context import EvalContext

TEXT = [int(token) for token in np.random.default_rng(5).integers(VOCABULARY - 1, size=24)]


def context_of(source: Path, *, batch_size: int = 32, sequences: int = 1) -> EvalContext:
    return EvalContext(
        source, context_size=64, batch_size=batch_size, threads=1, sequences=sequences
    )


def scored(source: Path, batch_size: int) -> NDArray[np.float32]:
    with context_of(source, batch_size=batch_size) as context:
        parts = [(start, rows.copy()) for start, rows in context.score(TEXT)]
    assert [start for start, _ in parts] == list(range(0, len(TEXT), batch_size))
    return np.concatenate([rows for _, rows in parts])


def test_rows_are_those_of_one_batch(source: Path) -> None:
    whole = scored(source, 32)
    assert whole.shape == (len(TEXT), VOCABULARY)
    np.testing.assert_allclose(scored(source, 7), whole, atol=1e-3)


def test_texts_beside_each_other_do_not_see_each_other(source: Path) -> None:
    """Two texts in one step, then one of them begins anew while the other goes on."""
    whole, other = scored(source, 32), TEXT[::-1]
    with context_of(source, sequences=2) as context:
        places = [*range(12), *range(12)]
        context.step([*TEXT[:12], *other[:12]], places, [0] * 12 + [1] * 12)
        np.testing.assert_allclose(context.rows(12), whole[:12], atol=1e-3)
        context.remove(1, -1)
        context.step([*TEXT[12:], *TEXT[:3]], [*range(12, 24), *range(3)], [0] * 12 + [1] * 3)
        rows = context.rows(15)
        np.testing.assert_allclose(rows[:12], whole[12:], atol=1e-3)
        np.testing.assert_allclose(rows[12:], whole[:3], atol=1e-3)


def test_a_text_goes_on_from_where_it_was_cut(source: Path) -> None:
    whole = scored(source, 32)
    with context_of(source) as context:
        context.step(TEXT[:10] + [1] * 5, range(15), outputs=False)
        assert context.trim(10)
        context.step(TEXT[10:14], range(10, 14))
        np.testing.assert_allclose(context.rows(4), whole[10:14], atol=1e-3)


def test_a_step_that_has_no_room_is_an_error(source: Path) -> None:
    with context_of(source) as context:
        for start in range(0, 256, 32):  # of a cache of one block
            context.step([1] * 32, range(start, start + 32))
        with pytest.raises(BackendError, match="llama_decode failed"):
            context.step([1], [256])
