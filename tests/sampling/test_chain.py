"""Samplers one after another: beside llama.cpp's own, and worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.sampling.chain import Dry, common_beginnings
from edgespec.sampling.params import ORDER, SamplingParams
from edgespec.sampling.sampling import Sampler

Row = NDArray[np.float32]
VOCABULARY = 500


def random_row(seed: int, size: int = VOCABULARY) -> Row:
    """Logits of a broad bulk and some likely tokens, of which no two are equal."""
    source = np.random.default_rng(seed)
    row = source.normal(0.0, 2.0, size)
    count = min(20, size // 2)
    row[source.choice(size, count, replace=False)] += np.linspace(2.0, 9.0, count)
    logits: Row = row.astype(np.float32)
    logits.flags.writeable = False
    return logits


# -- beside llama.cpp's ------------------------------------------------------------------------


@contextmanager
def llama_chain(make: Callable[[Any], list[Any]]) -> Iterator[Callable[[Row], dict[int, float]]]:
    """llama.cpp's samplers: from a row to what is left of it and its probabilities."""
    import llama_cpp.llama_cpp as llama

    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for sampler in make(llama):
        llama.llama_sampler_chain_add(chain, sampler)

    def apply(row: Row) -> dict[int, float]:
        data = (llama.llama_token_data * row.size)()
        for token, logit in enumerate(row):
            data[token].id, data[token].logit = token, logit
        array = llama.llama_token_data_array(data, row.size, -1, False)
        llama.llama_sampler_apply(chain, array)
        left = {array.data[i].id: array.data[i].logit for i in range(array.size)}
        best = max(left.values())
        weights = {token: math.exp(logit - best) for token, logit in left.items()}
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items() if weight > 0.0}

    try:
        yield apply
    finally:
        llama.llama_sampler_free(chain)


def ours(params: SamplingParams, row: Row) -> dict[int, float]:
    ids, chances = Sampler(params, row.size).distribution(row)
    return {int(token): float(chance) for token, chance in zip(ids, chances, strict=True)}


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    """The same tokens, but for one at a border, and the same probabilities."""
    both = found.keys() & expected.keys()
    assert len(found.keys() ^ expected.keys()) <= 1 and both
    share = sum(expected[token] for token in both) / sum(found[token] for token in both)
    for token in both:
        assert found[token] * share == pytest.approx(expected[token], rel=2e-4, abs=1e-7)


CHAINS: dict[str, tuple[dict[str, Any], Callable[[Any], list[Any]]]] = {
    "top-n-sigma": (
        {"top_n_sigma": 1.2},
        lambda llama: [llama.llama_sampler_init_top_n_sigma(1.2)],
    ),
    "typical": ({"typical_p": 0.7}, lambda llama: [llama.llama_sampler_init_typical(0.7, 0)]),
    "typical after top-k": (
        {"typical_p": 0.5, "top_k": 30},
        lambda llama: [
            llama.llama_sampler_init_top_k(30),
            llama.llama_sampler_init_typical(0.5, 0),
        ],
    ),
    "dynamic temperature": (
        {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5, "top_k": 50},
        lambda llama: [
            llama.llama_sampler_init_top_k(50),
            llama.llama_sampler_init_temp_ext(0.8, 0.5, 1.5),
        ],
    ),
    "several": (
        # No sigma: llama.cpp's typical sampler has no entropy of what that one masked.
        {"top_k": 40, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02},
        lambda llama: [
            llama.llama_sampler_init_top_k(40),
            llama.llama_sampler_init_typical(0.9, 0),
            llama.llama_sampler_init_top_p(0.9, 0),
            llama.llama_sampler_init_min_p(0.02, 0),
        ],
    ),
    "another order": (
        {"samplers": ("temperature", "min_p", "top_p"), "min_p": 0.05, "top_p": 0.8},
        lambda llama: [
            llama.llama_sampler_init_temp(0.8),
            llama.llama_sampler_init_min_p(0.05, 0),
            llama.llama_sampler_init_top_p(0.8, 0),
        ],
    ),
}


@pytest.mark.model
@pytest.mark.parametrize("case", CHAINS)
@pytest.mark.parametrize("seed", range(8))
def test_laws_are_llama_cpps(case: str, seed: int) -> None:
    values, make = CHAINS[case]
    row = random_row(seed)

    def with_temperature(llama: Any) -> list[Any]:
        is_last = case not in ("dynamic temperature", "another order")
        return make(llama) + ([llama.llama_sampler_init_temp(0.8)] if is_last else [])

    with llama_chain(with_temperature) as theirs:
        assert_same(ours(SamplingParams(temperature=0.8, **values), row), theirs(row))


@pytest.mark.model
@pytest.mark.parametrize("seed", range(20))
def test_xtc_leaves_out_what_llama_cpp_does(seed: int) -> None:
    """With probability 1 no coin decides; tokens drawn often are those that are left."""
    row = random_row(seed)
    values: dict[str, Any] = {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 8}
    with llama_chain(
        lambda llama: [
            llama.llama_sampler_init_top_k(8),
            llama.llama_sampler_init_xtc(1.0, 0.05, 0, 1),
        ]
    ) as theirs:
        left = theirs(row)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed, **values), VOCABULARY)
    drawn = [sampler.pick(row) for _ in range(400)]
    assert set(drawn) <= left.keys()
    likely = max(left, key=lambda token: left[token])
    assert abs(drawn.count(likely) / 400 - left[likely]) < 0.13  # 5 standard deviations


@pytest.mark.model
@pytest.mark.parametrize("seed", range(5))
def test_dry_penalties_are_llama_cpps(seed: int) -> None:
    import llama_cpp.llama_cpp as llama

    history = np.random.default_rng(seed).integers(0, 4, 120).tolist()
    row = random_row(seed, 6)
    values: dict[str, Any] = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_penalty_last_n": 50}
    made: list[Any] = []

    def make(_: Any) -> list[Any]:
        made.append(llama.llama_sampler_init_dry(None, 0.8, 1.5, 2, 50, None, 0))
        for token in history:
            llama.llama_sampler_accept(made[0], token)
        return made

    params = SamplingParams(temperature=1.0, dry_sequence_breakers=(), **values)
    ids, chances = Sampler(params, row.size, history).distribution(row)
    with llama_chain(make) as theirs:
        assert_same(dict(zip(ids.tolist(), chances.tolist(), strict=True)), theirs(row))


@pytest.mark.model
def test_mirostat_follows_llama_cpps_surprise() -> None:
    """Told the tokens that llama.cpp drew, it keeps as many tokens as llama.cpp at every step."""
    import llama_cpp.llama_cpp as llama

    theirs = llama.llama_sampler_init_mirostat_v2(7, 3.0, 0.3)
    sampler = Sampler(
        SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.3), VOCABULARY
    )
    try:
        for seed in range(30):
            row = random_row(seed)
            data = (llama.llama_token_data * row.size)()
            for token, logit in enumerate(row):
                data[token].id, data[token].logit = token, logit
            array = llama.llama_token_data_array(data, row.size, -1, False)
            llama.llama_sampler_apply(theirs, array)
            ids, _ = sampler.distribution(row)
            assert abs(ids.size - array.size) <= 1, seed
            sampler.record(array.data[array.selected].id)
    finally:
        llama.llama_sampler_free(theirs)


# -- by hand -------------------------------------------------------------------------------------


def test_dry_counts_what_goes_on_with_a_repetition() -> None:
    """The example of llama.cpp's source: a b c c b c y a b c; c would make 4, y 3, b 2 of them."""
    a, b, c, y = range(4)
    history = [a, b, c, c, b, c, y, a, b, c]
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    assert Dry(params, history, None).penalties() == {c: 4.0, y: 2.0, b: 1.0}
    assert Sampler(params, 5, history).pick(np.zeros(5, np.float32)) == a


def test_dry_does_not_reach_across_a_breaker_and_never_penalises_one() -> None:
    texts = [b"one", b" two", b".\n", b" three", b"\n"]
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)

    def penalties(history: list[int], params: SamplingParams = params) -> dict[int, float]:
        return Dry(params, history, lambda token: texts[token]).penalties()

    assert Dry(params, [0, 1, 2, 3, 0, 1], None).penalties() == {2: 1.0}
    assert penalties([0, 1, 3, 2, 0, 1]) == {3: 1.0}
    assert penalties([0, 1, 3, 0, 2, 1]) == {}, "it has begun after the breaker"
    assert penalties([0, 1, 4, 3, 0, 1]) == {}, "the breaker itself would be next"
    across = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("wo.",))
    assert penalties([0, 1, 2, 0, 1, 2, 0], across) == {}, "a breaker of two tokens"


@pytest.mark.parametrize("seed", range(20))
def test_common_beginnings_equal_the_slow_ones(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2, 40).tolist()
    for place, length in enumerate(common_beginnings(values)):
        slow = 0
        while place + slow < len(values) and values[slow] == values[place + slow]:
            slow += 1
        assert length == slow


def test_typical_leaves_out_the_best_token_where_it_tells_too_little() -> None:
    """Of 0.4 and ten times 0.06 the entropy is 2.05: nearer to the surprise 2.81 than to 0.92.

    Of 0.7 and ten times 0.03 it is 1.30: nearer to 0.36 than to 3.51.
    """
    for chances, has_best in (([0.4] + [0.06] * 10, False), ([0.7] + [0.03] * 10, True)):
        row = np.log(np.array(chances, dtype=np.float32)).astype(np.float32)
        found = ours(SamplingParams(temperature=1.0, typical_p=0.2), row)
        assert (0 in found) is has_best


def test_xtc_tosses_a_coin_for_every_pick() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)).astype(np.float32)
    params = SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.15, seed=3)
    sampler = Sampler(params, 4)
    drawn = [sampler.pick(row) for _ in range(4000)]
    # Half of the time only the tokens of 0.2 and 0.1 are left.
    for token, chance in enumerate((0.2, 0.15, 0.1 + 1 / 3, 0.05 + 1 / 6)):
        assert abs(drawn.count(token) / 4000 - chance) < 0.04, token  # 5 standard deviations


def test_mirostat_brings_the_surprise_to_its_target() -> None:
    row = random_row(1)
    row = (row - row.max()).astype(np.float32) * np.float32(0.5)
    chances = np.exp(row.astype(np.float64))
    chances /= chances.sum()
    for tau in (2.0, 5.0):
        params = SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=tau, seed=1)
        sampler = Sampler(params, VOCABULARY)
        surprises = []
        for _ in range(800):
            ids, left = sampler.distribution(row)
            token = sampler.pick(row)
            surprises.append(-math.log2(float(left[list(ids).index(token)])))
        assert np.mean(surprises[100:]) == pytest.approx(tau, abs=0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_mirostat_leaves_what_surprises_less_than_twice_its_target_at_first(
    temperature: float,
) -> None:
    """At the temperature, in bits. The best token is left whatever its surprise is."""
    row = np.array([3.0, 2.0, 1.0, 0.0, -1.0], np.float32)
    chances = np.exp(row.astype(np.float64) / temperature)
    surprise = -np.log2(chances / chances.sum())
    for tau in (0.01, 0.5, 1.0, 2.0):
        params = SamplingParams(temperature=temperature, mirostat=2, mirostat_tau=tau)
        left = max(1, int((surprise <= 2.0 * tau).sum()))
        assert Sampler(params, 5).distribution(row)[0].tolist() == list(range(left))


def test_penalties_where_the_order_puts_them() -> None:
    """After top-k they change what is left, and bring nothing back."""
    row = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "presence_penalty": 2.5}
    before = Sampler(SamplingParams(**values), 4, [0]).distribution(row)[0]
    params = SamplingParams(**values, samplers=("top_k", "penalties", "temperature"))
    after, chances = Sampler(params, 4, [0]).distribution(row)
    assert before.tolist() == [1, 2]
    assert after.tolist() == [1, 0]
    assert chances[0] / chances[1] == pytest.approx(math.exp(1.5))


def test_a_sampler_that_is_not_named_is_off() -> None:
    row = random_row(2)
    params = SamplingParams(temperature=0.5, top_k=1, samplers=("min_p",))
    plain = SamplingParams(temperature=1.0)
    assert ours(params, row) == pytest.approx(ours(plain, row))
    assert not SamplingParams(repetition_penalty=1.5, samplers=("top_k",)).uses_history


@pytest.mark.parametrize(
    "values",
    [
        {"typical_p": 0.9},
        {"xtc_probability": 0.5, "min_p": 0.05},
        {"mirostat": 2},
        {"dynatemp_range": 0.3},
        {"dry_multiplier": 0.8},
        {"top_n_sigma": 1.0},
        {"samplers": tuple(reversed(ORDER)), "top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
def test_rows_are_not_written_to_and_seeds_repeat(values: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.9, seed=11, **values)
    assert params == SamplingParams(temperature=0.9, seed=11, **values)
    rows = [random_row(seed) for seed in range(40)]
    first, second = (Sampler(params, VOCABULARY, [1, 2, 3, 1, 2]) for _ in range(2))
    assert [first.pick(row) for row in rows] == [second.pick(row) for row in rows]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"typical_p": 0.5}, "typical_p needs a temperature above 0"),
        ({"mirostat": 2}, "mirostat needs a temperature above 0"),
        ({"xtc_probability": 0.5}, "xtc_probability needs a temperature above 0"),
        ({"dynatemp_range": 0.5}, "dynatemp_range needs a temperature above 0"),
        ({"mirostat": 1, "temperature": 1.0}, "mirostat must be 0 or 2, got 1"),
        ({"samplers": ("top_k", "magic")}, "there is no sampler 'magic'"),
        ({"samplers": ("top_k", "top_k")}, "names one twice"),
        ({"dry_base": 0.5}, "dry_base must be from 1 to 1e6, got 0.5"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told) as caught:
        SamplingParams(**values)
    assert caught.value.hint
