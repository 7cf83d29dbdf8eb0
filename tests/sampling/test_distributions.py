"""Laws by which drafts that were drawn are judged."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from sampling_cases import random_row

from edgespec.errors import BackendError
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 0.0},
        {"top_k": 9},
        {"top_p": 0.9},
        {"min_p": 0.02, "temperature": 1.5},
        {"logit_bias": {3: -5.0, 4: float("-inf")}},
    ],
    ids=str,
)
def test_the_law_is_the_distribution(changes: dict[str, Any]) -> None:
    """Exactly where a filter is on; to float32 where not, and then by token."""
    row = random_row(np.random.default_rng(17), 3000)
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, **changes}), row.size)
    ids, probabilities = sampler.unsorted_distribution(row)
    expected_ids, expected = sampler.distribution(row)
    if ids is None:
        assert probabilities.shape == (row.size,)
        assert np.count_nonzero(probabilities) <= expected_ids.size
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-14)
        np.testing.assert_allclose(probabilities[expected_ids], expected, rtol=1e-5, atol=1e-30)
    else:
        assert ids.tolist() == expected_ids.tolist()
        assert probabilities.tolist() == expected.tolist()
    params = sampler.params
    assert (ids is None) == (params.keeps_all and not params.is_greedy)
    probabilities[:] = 0.0  # the caller's own


def test_coins_and_draws_cost_one_random_number_each() -> None:
    sampler, numbers = Sampler(SamplingParams(temperature=1.0, seed=3), 4), random.Random(3)
    for _ in range(50):
        assert sampler.accepts(0.4) == (numbers.random() < 0.4)
        expected = (np.array([0.2, 0.2, 0.8, 2.0]) <= numbers.random() * 2.0).sum()
        assert sampler.draw(np.array([0.2, 0.0, 0.6, 1.2])) == expected
    assert not sampler.accepts(0.0)
    assert sampler.accepts(1.0)


class Last:
    """A generator whose numbers are as near to 1 as they can be."""

    def random(self) -> float:
        return 1.0 - 2.0**-53


def test_a_draw_never_takes_what_has_no_weight() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), 4)
    sampler._random = Last()  # type: ignore[assignment]
    assert sampler.draw(np.array([0.1, 0.2, 0.0])) == 1
    assert sampler.draw(np.array([0.0, 1e-300, 0.0, 0.0])) == 1


@pytest.mark.parametrize("changes", [{}, {"top_k": 2}])
def test_a_broken_row_has_no_distribution(changes: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, **changes), 4)
    with pytest.raises(BackendError, match="the best logit is nan"):
        sampler.unsorted_distribution(np.full(4, np.nan, np.float32))
