"""The sampler chain against a slow one, numbers worked by hand, and its own distribution."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.footprint import SAMPLING_TOKEN_BYTES
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler, top_two_gap

Row = NDArray[np.float32]


def row_of(*logits: float) -> Row:
    """A row of logits that nothing can write to, like a view on a backend's buffer."""
    row = np.array(logits, dtype=np.float32)
    row.flags.writeable = False
    return row


def random_row(rng: np.random.Generator, vocab_size: int, *, ties: bool = False) -> Row:
    """Logits as a model gives them: a broad bulk, some likely tokens, some masked ones."""
    row = rng.normal(0.0, 2.0, vocab_size)
    row[rng.choice(vocab_size, 30)] += np.linspace(2.0, 14.0, 30)
    row[rng.choice(vocab_size, 50)] = -np.inf
    logits: Row = (np.round(row) if ties else row).astype(np.float32)
    logits.flags.writeable = False
    return logits


# ---------------------------------------------------------------- the slow, obvious sampler chain


def slow_change(row: Row, params: SamplingParams, history: Sequence[int]) -> Row:
    """Bias and penalties in float32, one token after another."""
    changed: Row = row.copy()
    for token, bias in dict(params.logit_bias).items():
        changed[token] += np.float32(bias)
    last_n = params.penalty_last_n
    recent = history if last_n < 0 else history[max(len(history) - last_n, 0) :]
    factor = np.float32(params.repetition_penalty)
    for token, count in Counter(recent).items():
        logit = changed[token]
        logit = logit / factor if logit > 0 else logit * factor
        frequency = np.float32(count) * np.float32(params.frequency_penalty)
        changed[token] = logit - (frequency + np.float32(params.presence_penalty))
    return changed


def slow_law(
    row: Row, params: SamplingParams, history: Sequence[int] = ()
) -> tuple[dict[int, float], float]:
    """Token -> probability, best first, and how near (relatively) top-p came to another cut."""
    row = slow_change(row, params, history)
    best = float(row.max())
    order = [int(t) for t in np.lexsort((np.arange(row.size), -row)) if row[t] > -np.inf]
    if params.temperature == 0.0:
        return {order[0]: 1.0}, 1.0
    if params.top_k:
        order = order[: params.top_k]
    margin = 1.0
    if params.top_p < 1.0:
        weights = [math.exp(float(row[t]) - best) for t in order]
        mass = params.top_p * math.fsum(weights)
        total, size = 0.0, 0
        for weight in weights:
            total, size = total + weight, size + 1
            margin = min(margin, abs(total - mass))
            if total >= mass:
                break
        order = order[:size]
    if params.min_p > 0.0:
        floor = np.float32(best + math.log(params.min_p))
        order = [t for t in order if row[t] >= floor]
    weights = [math.exp((float(row[t]) - best) / params.temperature) for t in order]
    total = math.fsum(weights)
    return {t: w / total for t, w in zip(order, weights, strict=True)}, margin


def assert_law(sampler: Sampler, row: Row, expected: Mapping[int, float]) -> None:
    ids, probabilities = sampler.distribution(row)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(probabilities, list(expected.values()), rtol=1e-9, atol=1e-300)


# ------------------------------------------------------------------------------ greedy


def test_greedy_takes_the_best_token_and_the_first_of_equals() -> None:
    sampler = Sampler(SamplingParams(), 5)
    assert sampler.pick(row_of(1.0, 3.0, -np.inf, 3.0, 2.0)) == 1
    ids, probabilities = sampler.distribution(row_of(1.0, 3.0, -np.inf, 3.0, 2.0))
    assert (ids.tolist(), probabilities.tolist()) == ([1], [1.0])


def test_greedy_draws_no_random_number() -> None:
    sampler = Sampler(SamplingParams(seed=7, presence_penalty=0.5), 3)
    sampler.pick(row_of(0.0, 1.0, 2.0))
    assert sampler._random.random() == random.Random(7).random()


def test_filters_do_not_change_the_greedy_token() -> None:
    params = SamplingParams(top_k=3, top_p=0.1, min_p=0.9)
    assert Sampler(params, 4).pick(row_of(0.0, 0.1, 0.3, 0.2)) == 2


# ------------------------------------------------------------------------------ bias, penalties


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


# ------------------------------------------------------------------------------ filters


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


# ------------------------------------------------------------------------------ the slow one

LOGITS = st.one_of(
    st.floats(-20.0, 20.0, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5]),
    st.just(-math.inf),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(1.0), st.floats(0.05, 3.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 12)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    repetition_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.1]),
    penalty_last_n=st.integers(-1, 8),
    logit_bias=st.dictionaries(st.integers(0, 1), st.floats(-3.0, 3.0, width=32)),
    seed=st.integers(0, 2**64),
)


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(data=st.data(), logits=st.lists(LOGITS, min_size=2, max_size=30), params=PARAMS)
def test_law_equals_the_slow_one_as_the_history_grows(
    data: st.DataObject, logits: list[float], params: SamplingParams
) -> None:
    assume(max(logits) > -math.inf)
    row = row_of(*logits)
    possible = [t for t in range(len(logits)) if logits[t] > -math.inf]
    history = data.draw(st.lists(st.sampled_from(possible), max_size=12))
    sampler = Sampler(params, len(logits), prompt_ids=history)
    uniforms = random.Random(params.seed)
    for _ in range(4):
        expected, margin = slow_law(row, params, history)
        assume(margin > 1e-5)
        assert_law(sampler, row, expected)
        token = sampler.pick(row)
        assert_inverse_cdf(expected, uniforms.random(), token)
        history.append(token)


def assert_inverse_cdf(distribution: Mapping[int, float], uniform: float, token: int) -> None:
    """`token` owns `uniform` in the cumulative distribution, but for the rounding of the sums."""
    position = list(distribution).index(token)
    before = math.fsum(list(distribution.values())[:position])
    assert distribution[token] > 0.0
    assert before - 1e-5 <= uniform <= before + distribution[token] + 1e-5


LARGE: list[dict[str, Any]] = [
    {},
    {"temperature": 3.0},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_p": 0.98, "temperature": 0.3},
    {"top_p": 0.9, "min_p": 0.001},
    {"top_p": 0.99, "min_p": 0.01},
    {"top_p": 0.3, "min_p": 1e-30},
    {"min_p": 0.05},
    {"min_p": 1e-30},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 900},
    {"top_k": 5000},
    {"top_k": 10**9},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 40, "repetition_penalty": 1.3, "frequency_penalty": 0.1, "logit_bias": {5: 9.0}},
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("settings_of_case", LARGE, ids=str)
def test_shortcuts_for_large_vocabularies_change_nothing(
    settings_of_case: dict[str, Any], ties: bool
) -> None:
    """10,007 tokens, so that heads of 256 and of all tokens, and uneven columns, all occur."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **settings_of_case})
    rng = np.random.default_rng(11)
    history = [int(t) for t in rng.integers(0, 10_007, 100)]
    sampler = Sampler(params, 10_007, prompt_ids=history)
    uniforms = random.Random(3)
    for _ in range(3):
        row = random_row(rng, 10_007, ties=ties)
        expected, margin = slow_law(row, params, history)
        assert margin > 1e-5
        assert_law(sampler, row, expected)
        token = sampler.pick(row)
        assert_inverse_cdf(expected, uniforms.random(), token)
        history.append(token)


@pytest.mark.parametrize("top_k", [0, 40, 300])
@pytest.mark.parametrize("top_p", [0.99, 1.0])
def test_masked_tokens_are_never_candidates(top_k: int, top_p: float) -> None:
    """A grammar leaves three of 20,000 tokens, fewer than top-k asks for."""
    row = np.full(20_000, -np.inf, dtype=np.float32)
    row[[7, 11, 19_999]] = (0.0, 1.0, 0.0)
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=0), 20_000)
    ids, _ = sampler.distribution(row)
    assert ids.tolist() == [11, 7, 19_999]
    assert {sampler.pick(row) for _ in range(100)} == {7, 11, 19_999}


class FixedUniform(random.Random):
    """Always the same "random" number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.5, 2), (1 - 2**-53, 2)])
def test_uniform_numbers_select_half_open_ranges(top_k: int, uniform: float, token: int) -> None:
    """Tokens 1 and 2 are equally likely; token 0 is possible in name only."""
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=top_k), 3)
    sampler._random = FixedUniform(uniform)
    assert sampler.pick(row_of(-1000.0, 0.0, 0.0)) == token


def test_largest_uniform_number_selects_the_last_token_whatever_the_rounding() -> None:
    """The float32 sum of the weights exceeds their float64 sum for about half of the rows."""
    sampler = Sampler(SamplingParams(temperature=1.0), 50)
    sampler._random = FixedUniform(1 - 2**-53)
    rng = np.random.default_rng(0)
    for _ in range(50):
        row = rng.normal(size=50).astype(np.float32)
        assert sampler.pick(row) == row.argmin()


def test_flat_row_uses_every_token() -> None:
    """Equal logits everywhere: the n-th of V tokens owns the n-th V-th of the uniform numbers."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5), 50_000)
    row = np.zeros(50_000, dtype=np.float32)
    uniforms = random.Random(5)
    for _ in range(5):
        assert sampler.pick(row) == pytest.approx(uniforms.random() * 50_000, abs=1.1)


@pytest.mark.parametrize("name", ["greedy", "top_p", "top_k", "penalties"])
def test_vocabulary_of_152k(name: str) -> None:
    params = {
        "greedy": SamplingParams(),
        "top_p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
        "top_k": SamplingParams(temperature=0.8, top_k=40, seed=1),
        "penalties": SamplingParams(repetition_penalty=1.1),
    }[name]
    row = random_row(np.random.default_rng(0), 151_936)
    sampler = Sampler(params, 151_936, prompt_ids=range(64))
    expected, _ = slow_law(row, params, range(64))
    assert_law(sampler, row, expected)
    assert sampler.pick(row) in expected


@pytest.mark.parametrize(
    "settings_of_case",
    [
        {},
        {"temperature": 0.01},
        {"top_p": 0.9},
        {"top_p": 0.999999, "min_p": 1e-6},
        {"top_p": 0.9, "top_k": 40},
        {"top_k": 50_000},
        {"min_p": 1e-6},
        {"presence_penalty": 1.0, "logit_bias": {0: 1.0}},
        {"presence_penalty": 1.0, "top_p": 0.999999},
        {"typical_p": 0.99},
        {"typical_p": 0.9, "presence_penalty": 1.0},
        {"dynatemp_range": 0.5},
        {"xtc_probability": 0.5},
        {"top_n_sigma": 3.0},
        {"mirostat": 2, "mirostat_tau": 100.0},
        {"samplers": ("min_p", "penalties", "temperature"), "presence_penalty": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("row_of_case", ["flat", "steep"])
def test_a_plan_has_room_for_what_picking_allocates(
    settings_of_case: dict[str, Any], row_of_case: str
) -> None:
    """Flat rows are the worst ones: filters leave nearly all tokens, which are then sorted."""
    row = np.zeros(50_000, np.float32)
    if row_of_case == "steep":
        row = 3 * random_row(np.random.default_rng(0), 50_000)
    tracemalloc.start()
    try:
        params = SamplingParams(**{"temperature": 1.0, "seed": 1, **settings_of_case})
        sampler = Sampler(params, 50_000, range(100))
        for _ in range(3):
            sampler.pick(row)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= SAMPLING_TOKEN_BYTES * 50_000


def test_greedy_picking_allocates_nothing() -> None:
    row = random_row(np.random.default_rng(0), 50_000).copy()  # numpy copies what is read-only
    tracemalloc.start()
    try:
        Sampler(SamplingParams(), 50_000).pick(row)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("subtracted", [-1e6, 1e6])
def test_extreme_penalties_stay_finite(factor: float, subtracted: float) -> None:
    params = SamplingParams(
        temperature=1.0, repetition_penalty=factor, frequency_penalty=subtracted
    )
    sampler = Sampler(params, 3, prompt_ids=[0, 1, 2])
    _, probabilities = sampler.distribution(row_of(-100.0, 0.0, 100.0))
    assert probabilities.sum() == pytest.approx(1.0)


# ------------------------------------------------------------------------------ chance


def chi_square_odds(statistic: float, degrees: int) -> float:
    """Probability of a larger statistic; exact for even degrees of freedom (a Poisson sum)."""
    assert degrees % 2 == 0
    half = statistic / 2.0
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))


@pytest.mark.parametrize(
    "settings_of_case",
    [{}, {"temperature": 0.5}, {"top_k": 9}, {"top_p": 0.99}, {"min_p": 0.01, "temperature": 2.0}],
    ids=str,
)
def test_picks_follow_the_distribution(settings_of_case: dict[str, Any]) -> None:
    """20,000 picks, chi-square; the seed is fixed, with a fresh one 1 run in 1,000,000 would fail.

    All five distributions keep all nine tokens (eight degrees of freedom).
    """
    params = SamplingParams(**{"temperature": 1.0, "seed": 2024, **settings_of_case})
    row = row_of(0.3, -1.0, 1.2, 0.0, 0.9, -0.5, 1.2, -0.2, 0.6)
    sampler = Sampler(params, 9)
    ids, probabilities = sampler.distribution(row)
    picks = Counter(sampler.pick(row) for _ in range(20_000))
    expected = 20_000 * probabilities
    assert len(expected) == 9 and expected.min() > 5.0
    seen = np.array([picks[int(token)] for token in ids])
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square_odds(statistic, 8) > 1e-6
    assert sum(picks.values()) == seen.sum()


def test_chi_square_would_notice_a_shift_of_one_percent() -> None:
    """The test above has teeth: counts of a distribution that is 1 point off fail it by far."""
    expected = 20_000 * np.full(9, 1 / 9)
    seen = expected + 200.0 * np.array([1, -1, 1, -1, 1, -1, 1, -1, 0])
    assert chi_square_odds(float(((seen - expected) ** 2 / expected).sum()), 8) < 1e-6
    assert chi_square_odds(15.507, 8) == pytest.approx(0.05, abs=1e-4)


def test_same_seed_same_tokens() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=9)
    rows = [random_row(np.random.default_rng(i), 3000) for i in range(40)]
    one, two = (Sampler(params, 3000, prompt_ids=[1, 2]) for _ in range(2))
    assert [one.pick(row) for row in rows] == [two.pick(row) for row in rows]
    other = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=10), 3000)
    assert [one.pick(row) for row in rows] != [other.pick(row) for row in rows]


def test_one_random_number_a_pick_even_without_a_choice() -> None:
    """A row with one possible token in between does not shift later picks."""
    rows = [random_row(np.random.default_rng(i), 500) for i in range(6)]
    masked = row_of(*[-np.inf] * 499, 0.0)
    params = SamplingParams(temperature=1.0, seed=4)
    plain, mixed = Sampler(params, 500), Sampler(params, 500)
    expected = [plain.pick(row) for row in rows]
    picks = [mixed.pick(masked if i == 2 else row) for i, row in enumerate(rows)]
    assert picks == [*expected[:2], 499, *expected[3:]]


def test_walking_a_draft_tree_gives_the_tokens_of_plain_decoding() -> None:
    """Sample-and-match with a drafter that is right half the time, on a table of logits."""
    rng = np.random.default_rng(8)
    table = rng.normal(0.0, 1.5, (20, 20)).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_k=10, frequency_penalty=0.2, seed=77)

    plain = Sampler(params, 20, prompt_ids=[0])
    expected = [0]
    while len(expected) < 60:
        expected.append(plain.pick(table[expected[-1]]))

    sampler = Sampler(params, 20, prompt_ids=[0])
    tokens = [0]
    num_rounds = 0
    while len(tokens) < 60:
        num_rounds += 1
        right = expected[len(tokens) : len(tokens) + 4]
        draft = [t if rng.random() < 0.5 else (t + 1) % 20 for t in right]
        logits = table[[tokens[-1], *draft]]  # one verified batch
        for depth, row in enumerate(logits):
            tokens.append(sampler.pick(row))
            if depth == len(draft) or tokens[-1] != draft[depth]:
                break
    assert tokens[:60] == expected
    assert num_rounds < 45


def test_missing_seed_is_drawn_and_told() -> None:
    params = SamplingParams(temperature=1.0)
    samplers = [Sampler(params, 1000) for _ in range(8)]
    assert len({sampler.seed for sampler in samplers}) > 1
    row = random_row(np.random.default_rng(1), 1000)
    again = Sampler(SamplingParams(temperature=1.0, seed=samplers[0].seed), 1000)
    assert [again.pick(row) for _ in range(9)] == [samplers[0].pick(row) for _ in range(9)]


# ------------------------------------------------------------------------------ inputs, errors


@pytest.mark.parametrize("settings_of_case", LARGE, ids=str)
def test_logits_are_not_written_to(settings_of_case: dict[str, Any]) -> None:
    """A writable row, so that nothing but restraint protects it; a second pick sees the same."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **settings_of_case})
    row = random_row(np.random.default_rng(2), 5000).copy()
    before = row.copy()
    sampler = Sampler(params, 5000, prompt_ids=range(50))
    first = [x.copy() for x in sampler.distribution(row)]
    second = sampler.distribution(row)
    sampler.pick(row)
    np.testing.assert_array_equal(row, before)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(presence_penalty=1.0),
    ],
    ids=["greedy", "sampled", "top_k", "top_p", "penalties"],
)
def test_row_without_a_best_token_is_an_error(bad: float, params: SamplingParams) -> None:
    sampler = Sampler(params, 3, prompt_ids=[1])
    row = row_of(bad, bad, bad) if bad == -math.inf else row_of(0.0, bad, 1.0)
    with pytest.raises(BackendError, match=f"the best logit is {bad}"):
        sampler.pick(row)
    with pytest.raises(BackendError):
        sampler.distribution(row)


@pytest.mark.parametrize(
    ("settings_of_case", "message"),
    [
        ({"temperature": -0.5}, "temperature must be a number of 0 or more, got -0.5"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": math.inf}, "got inf"),
        ({"top_k": -1}, "top_k must be 0 or more, got -1"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, got 1.5"),
        ({"top_p": math.nan}, "top_p .* nan"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-6 to 1e6, got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty .* inf"),
        ({"presence_penalty": math.nan}, "presence_penalty must be from -1e6 to 1e6, got nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be from -1e6 to 1e6, got inf"),
        ({"penalty_last_n": -2}, "penalty_last_n must be -1 or more, got -2"),
        ({"logit_bias": {3: math.nan}}, "the logit bias of token 3 .* nan"),
        ({"logit_bias": {3: math.inf}}, "the logit bias of token 3 .* inf"),
        ({"logit_bias": {3: -1e300}}, "the logit bias of token 3 .* -1e[+]300"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "names token 3 twice"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_settings_out_of_range_are_refused_with_a_hint(
    settings_of_case: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        SamplingParams(**settings_of_case)
    assert caught.value.hint


@pytest.mark.parametrize("token", [-1, 3])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UnsupportedError, match=f"logit_bias has token {token}, .* has 3 tokens"):
        Sampler(SamplingParams(logit_bias={token: 1.0}), 3)
    with pytest.raises(UnsupportedError, match=f"the prompt has token {token}, "):
        Sampler(SamplingParams(presence_penalty=1.0), 3, prompt_ids=[0, token])
    with pytest.raises(UnsupportedError, match="at least one token, got 0"):
        Sampler(SamplingParams(), 0)


def test_settings_compare_and_hash_by_value() -> None:
    one = SamplingParams(logit_bias={7: 1, 2: -1.0})
    two = SamplingParams(logit_bias=((2, -1.0), (7, 1.0)))
    assert one == two
    assert len({one, two}) == 1
    assert one.logit_bias == ((2, -1.0), (7, 1.0))
    assert one.is_greedy and not one.uses_history


@pytest.mark.parametrize(
    ("logits", "gap"),
    [
        ((1.0, 4.0, 2.5), 1.5),
        ((4.0, 1.0, 4.0), 0.0),
        ((3.0, -np.inf), math.inf),
        ((3.0,), math.inf),
        ((-1.0, -3.0), 2.0),
    ],
)
def test_top_two_gap(logits: tuple[float, ...], gap: float) -> None:
    assert top_two_gap(row_of(*logits)) == gap


# ------------------------------------------------------------------------------ verifying draws


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
    assert (ids is None) == (sampler.params.sums_vocabulary and "top_p" not in changes)
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
