"""Penalties and biases: what they count, in which order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_cases import assert_law, row_of

from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    """With 2: token 0 goes from 4 to 2, token 1 from -1 to -2, token 2 stays at 3."""
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    sampler = Sampler(params, 4, prompt_ids=[0, 1, 1])
    weights = {2: math.exp(3.0), 0: math.exp(2.0), 3: math.exp(0.0), 1: math.exp(-2.0)}
    total = sum(weights.values())
    assert_law(sampler, row_of(4.0, -1.0, 3.0, 0.0), {t: w / total for t, w in weights.items()})


def test_frequency_counts_and_presence_does_not() -> None:
    """Token 1 was seen twice: 5 - 2 * 1.5 - 0.25 = 1.75. Token 2 once: 3 - 1.5 - 0.25 = 1.25."""
    params = SamplingParams(temperature=1.0, frequency_penalty=1.5, presence_penalty=0.25)
    sampler = Sampler(params, 3, prompt_ids=[1, 2, 1])
    weights = {1: math.exp(1.75), 2: math.exp(1.25), 0: math.exp(1.0)}
    total = sum(weights.values())
    assert_law(sampler, row_of(1.0, 5.0, 3.0), {t: w / total for t, w in weights.items()})


def test_repetition_comes_before_subtraction() -> None:
    """(3 / 2) - 1 = 0.5 loses to 0.75; 3 - 1 first, then halved, would be 1 and win."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert Sampler(params, 2, prompt_ids=[0]).pick(row_of(3.0, 0.75)) == 1


def test_picked_tokens_are_penalised_and_leave_the_window() -> None:
    """A window of two: tokens 0 and 1 are taken, then token 2, then 0 has left it again."""
    sampler = Sampler(SamplingParams(presence_penalty=10.0, penalty_last_n=2), 3)
    assert [sampler.pick(row_of(3.0, 2.0, 1.0)) for _ in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("last_n", "token"), [(0, 0), (1, 0), (2, 0), (3, 1), (64, 1), (-1, 1)])
def test_penalty_window_reaches_into_the_prompt(last_n: int, token: int) -> None:
    """Token 0 is the third last of the prompt."""
    params = SamplingParams(presence_penalty=10.0, penalty_last_n=last_n)
    sampler = Sampler(params, 4, prompt_ids=[0, 2, 3])
    assert sampler.pick(row_of(3.0, 2.0, 1.0, 1.0)) == token


def test_whole_history_keeps_everything() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=10.0, penalty_last_n=-1), 100)
    row = np.linspace(1.0, 0.0, 100, dtype=np.float32)
    assert [sampler.pick(row) for _ in range(100)] == list(range(100))


def test_recorded_tokens_count_like_picked_ones() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=10.0), 2)
    sampler.record(0)
    assert sampler.pick(row_of(3.0, 2.0)) == 1


def test_bias_comes_before_penalties() -> None:
    """(-1 + 3) / 2 = 1 loses to 1.25; -1 * 2 + 3 would be 1 too, 2 without the penalty wins."""
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0)
    assert Sampler(params, 2, prompt_ids=[0]).pick(row_of(-1.0, 1.25)) == 1
    assert Sampler(params, 2, prompt_ids=[1]).pick(row_of(-1.0, 1.25)) == 0
    # (-1 + 3) / 4 = 0.5 wins over 0.25; -1 * 4 + 3 = -1 would not.
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=4.0)
    assert Sampler(params, 2, prompt_ids=[0]).pick(row_of(-1.0, 0.25)) == 0


def test_minus_infinity_forbids_a_token() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, logit_bias={1: -math.inf}), 3)
    assert_law(sampler, row_of(0.0, 9.0, 0.0), {0: 0.5, 2: 0.5})


def test_masked_tokens_stay_masked_through_bias_and_penalties() -> None:
    params = SamplingParams(temperature=1.0, logit_bias={1: 50.0}, repetition_penalty=1.5)
    assert_law(Sampler(params, 2, prompt_ids=[1]), row_of(0.0, -np.inf), {0: 1.0})


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("subtracted", [-1e6, 1e6])
def test_extreme_penalties_stay_finite(factor: float, subtracted: float) -> None:
    params = SamplingParams(
        temperature=1.0, repetition_penalty=factor, frequency_penalty=subtracted
    )
    sampler = Sampler(params, 3, prompt_ids=[0, 1, 2])
    _, probabilities = sampler.distribution(row_of(-100.0, 0.0, 100.0))
    assert probabilities.sum() == pytest.approx(1.0)
