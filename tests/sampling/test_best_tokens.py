"""Filters keep the best tokens: worked by hand, ties and all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_cases import assert_law, row_of

from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    """Four equal tokens: 0.5 is reached by exactly two, 0.51 needs the third."""
    row = row_of(1.0, 1.0, 1.0, 1.0)
    assert_law(Sampler(SamplingParams(temperature=1.0, top_p=0.5), 4), row, {0: 0.5, 1: 0.5})
    ids, _ = Sampler(SamplingParams(temperature=1.0, top_p=0.51), 4).distribution(row)
    assert ids.tolist() == [0, 1, 2]
    of_top_k = Sampler(SamplingParams(temperature=1.0, top_p=0.5, top_k=4), 4)
    assert_law(of_top_k, row, {0: 0.5, 1: 0.5})


def test_top_p_of_zero_keeps_one_token() -> None:
    assert_law(
        Sampler(SamplingParams(temperature=1.0, top_p=0.0), 3), row_of(1.0, 2.0, 2.0), {1: 1}
    )


def test_top_p_looks_at_probabilities_before_the_temperature() -> None:
    """Probabilities 0.6, 0.3, 0.1 keep two for 0.8. At temperature 100 all three would be kept."""
    row = row_of(math.log(0.6), math.log(0.3), math.log(0.1))
    for temperature in (0.1, 1.0, 100.0):
        params = SamplingParams(temperature=temperature, top_p=0.8)
        ids, _ = Sampler(params, 3).distribution(row)
        assert ids.tolist() == [0, 1]


def test_top_p_is_renormalised_after_top_k() -> None:
    """0.4, 0.3, 0.2, 0.1: half the mass needs two tokens, but of the best two only one."""
    row = row_of(*(math.log(p) for p in (0.4, 0.3, 0.2, 0.1)))
    every = Sampler(SamplingParams(temperature=1.0, top_p=0.5), 4).distribution(row)
    best_two = Sampler(SamplingParams(temperature=1.0, top_p=0.5, top_k=2), 4).distribution(row)
    assert (every[0].tolist(), best_two[0].tolist()) == ([0, 1], [0])


def test_min_p_is_relative_to_the_best_before_the_temperature() -> None:
    row = row_of(math.log(0.6), math.log(0.31), math.log(0.09))
    for temperature in (0.1, 1.0, 100.0):
        ids, _ = Sampler(SamplingParams(temperature=temperature, min_p=0.5), 3).distribution(row)
        assert ids.tolist() == [0, 1]


def test_min_p_of_one_keeps_the_best_and_its_equals() -> None:
    row = row_of(2.0, 1.9999, 2.0)
    assert_law(Sampler(SamplingParams(temperature=1.0, min_p=1.0), 3), row, {0: 0.5, 2: 0.5})


def test_top_k_breaks_ties_by_token_id() -> None:
    row = row_of(1.0, 2.0, 1.0, 0.0, -0.0, 1.0)
    ids, _ = Sampler(SamplingParams(temperature=1.0, top_k=3), 6).distribution(row)
    assert ids.tolist() == [1, 0, 2]
    ids, _ = Sampler(SamplingParams(temperature=1.0), 6).distribution(row)
    assert ids.tolist() == [1, 0, 2, 5, 3, 4]


@pytest.mark.parametrize("temperature", [5e-324, 1e-12, 1e12, 1e300])
@pytest.mark.parametrize("top_k", [0, 3])
def test_extreme_temperatures_stay_finite(temperature: float, top_k: int) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=top_k, seed=0), 3)
    row = row_of(1.0, 2.0, -np.inf)
    expected = {1: 1.0, 0: 0.0} if temperature < 1.0 else {1: 0.5, 0: 0.5}
    assert_law(sampler, row, expected)
    assert {sampler.pick(row) for _ in range(50)} <= {t for t, p in expected.items() if p}
