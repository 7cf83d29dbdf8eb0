"""Log-probabilities against the obvious way: a softmax in float64, and a sort."""

from __future__ import annotations

import math

import numpy as np
import pytest

import edgespec
from edgespec.sampling.chain import logprob_of


def row_of(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0.0, 4.0, size).astype(np.float32)


@pytest.mark.parametrize("size", [1, 5, 999, 5_000, 50_000])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_they_are_those_of_a_softmax(size: int, count: int) -> None:
    row = row_of(size, size)
    before = row.copy()
    exact = row.astype(np.float64)
    exact -= exact.max() + math.log(np.exp(exact - exact.max()).sum())
    found = logprob_of(row, size // 2, count)
    order = np.lexsort((np.arange(size), -row))[:count]
    assert found.token == size // 2
    assert found.logprob == pytest.approx(exact[size // 2], abs=1e-5)
    assert [token for token, _ in found.best] == order.tolist()
    assert [logprob for _, logprob in found.best] == pytest.approx(exact[order], abs=1e-5)
    assert np.array_equal(row, before)


def test_equal_logits_are_told_by_id_and_sum_to_one() -> None:
    found = logprob_of(np.full(8, 3.0, dtype=np.float32), 7, 3)
    assert [token for token, _ in found.best] == [0, 1, 2]
    assert found.logprob == pytest.approx(math.log(1 / 8))


def test_what_the_model_rules_out_has_none_and_is_not_told() -> None:
    row = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    found = logprob_of(row, 1, 3)
    assert found.logprob == -math.inf
    assert [token for token, _ in found.best] == [0, 2]
    assert math.exp(found.best[0][1]) == pytest.approx(0.5)


@pytest.mark.model
def test_drafts_change_no_bit_of_a_real_models(exact_engine: edgespec.Engine) -> None:
    prompt = "Repeat three times: The quick brown fox jumps over the lazy dog."
    drafted, plain = (
        exact_engine.generate(prompt, max_tokens=48, logprobs=3, speculate=speculate)
        for speculate in (True, False)
    )
    assert drafted.counters.accepted_tokens > 0
    assert drafted.logprobs == plain.logprobs
    assert [one.token for one in plain.logprobs] == [one.best[0][0] for one in plain.logprobs]
