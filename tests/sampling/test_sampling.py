"""The sampler: greedy picks, the law of what it picks, chance, memory, errors."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_cases import assert_law, chi_square_odds, random_row, row_of, slow_change, slow_law

from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.footprint import SAMPLING_TOKEN_BYTES
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler, top_two_gap


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


# ------------------------------------------------------------------------------ the slow one

LOGITS = st.one_of(
    st.floats(-20.0, 20.0, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5]),
    st.just(-math.inf),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.05, 3.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 12)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    repetition_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.1]),
    penalty_last_n=st.integers(-1, 8),
    logit_bias=st.dictionaries(
        st.integers(0, 1), st.floats(-3.0, 3.0, width=32) | st.just(-math.inf)
    ),
    seed=st.integers(0, 2**64),
)


@settings(max_examples=300)
@given(data=st.data(), logits=st.lists(LOGITS, min_size=2, max_size=30), params=PARAMS)
def test_law_equals_the_slow_one_as_the_history_grows(
    data: st.DataObject, logits: list[float], params: SamplingParams
) -> None:
    row = row_of(*logits)
    assume(slow_change(row, params, ()).max() > -math.inf)
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


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    """Four equal tokens: 0.5 is reached by exactly two, 0.51 needs the third."""
    row = row_of(1.0, 1.0, 1.0, 1.0)
    for top_k in (0, 4):
        params = SamplingParams(temperature=1.0, top_p=0.5, top_k=top_k)
        assert_law(Sampler(params, 4), row, {0: 0.5, 1: 0.5})
    ids, _ = Sampler(SamplingParams(temperature=1.0, top_p=0.51), 4).distribution(row)
    assert ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [5e-324, 1e-12, 1e12, 1e300])
@pytest.mark.parametrize("top_k", [0, 3])
def test_extreme_temperatures_stay_finite(temperature: float, top_k: int) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=top_k, seed=0), 3)
    row = row_of(1.0, 2.0, -np.inf)
    expected = {1: 1.0, 0: 0.0} if temperature < 1.0 else {1: 0.5, 0: 0.5}
    assert_law(sampler, row, expected)
    assert {sampler.pick(row) for _ in range(50)} <= {t for t, p in expected.items() if p}


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("subtracted", [-1e6, 1e6])
def test_extreme_penalties_stay_finite(factor: float, subtracted: float) -> None:
    params = SamplingParams(
        temperature=1.0, repetition_penalty=factor, frequency_penalty=subtracted
    )
    sampler = Sampler(params, 3, prompt_ids=[0, 1, 2])
    _, probabilities = sampler.distribution(row_of(-100.0, 0.0, 100.0))
    assert probabilities.sum() == pytest.approx(1.0)


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


@pytest.mark.parametrize("token", [-1, 3])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UnsupportedError, match=f"logit_bias has token {token}, .* has 3 tokens"):
        Sampler(SamplingParams(logit_bias={token: 1.0}), 3)
    with pytest.raises(UnsupportedError, match=f"the prompt has token {token}, "):
        Sampler(SamplingParams(presence_penalty=1.0), 3, prompt_ids=[0, token])
    with pytest.raises(UnsupportedError, match="at least one token, got 0"):
        Sampler(SamplingParams(), 0)


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
