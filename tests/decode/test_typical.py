"""Typical acceptance: which drafts are taken, the law that this has, and where it is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from all_dice import outcomes
from decoding_cases import flat
from fake_backend import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_cases import Garbage, V, random_model

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.step import accept
from edgespec.decode.verification import TypicalPick
from edgespec.errors import UnsupportedError
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

EPSILON = 0.2
TREE = DraftTree((9, 0, 1, 2, 3), (-1, 0, 0, 1, 3))  # {0 -> 2 -> 3, 1}


def probabilities_of(row: Logits, temperature: float) -> list[float]:
    weights = np.exp((row.astype(np.float64) - float(row.max())) / (temperature or 1.0))
    return [float(one) for one in weights / weights.sum()]


def taken_of(row: Logits, tokens: list[int], temperature: float) -> int | None:
    """The rule as the paper has it, written out."""
    p = probabilities_of(row, temperature)
    entropy = -sum(one * math.log(one) for one in p if one > 0.0)
    least = min(EPSILON, math.sqrt(EPSILON) * math.exp(-entropy))
    good = [token for token in tokens if p[token] >= least]
    return max(good, key=lambda token: p[token], default=None)


class Choosing(Sampler):
    """A sampler whose draws are all outcomes of dice."""

    def __init__(self, params: SamplingParams, dice: Sampler) -> None:
        super().__init__(params, 5)
        self.dice = dice

    def choose(self, logits_row: Logits) -> int:
        ids, probabilities = self.distribution(logits_row)
        return int(ids[self.dice.draw(probabilities)])


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.7, 1.0]))
def test_the_law_is_the_one_that_is_stated(seed: int, temperature: float) -> None:
    """What is emitted, with its probability: the pick, or the child that is taken in its place."""
    rows = np.random.default_rng(seed).normal(0.0, 2.0, (len(TREE), 5)).astype(np.float32)
    params = SamplingParams(temperature=temperature, accept_typical=EPSILON)

    def walk(dice: Sampler) -> tuple[int, ...]:
        return tuple(accept(TREE, rows, TypicalPick(TREE, Choosing(params, dice)))[1])

    found: dict[tuple[int, ...], float] = {}
    for probability, emitted in outcomes(walk):
        found[emitted] = found.get(emitted, 0.0) + probability

    def expect(node: int, chance: float, before: tuple[int, ...]) -> None:
        row = rows[node]
        law = probabilities_of(row, temperature)
        if temperature == 0.0:
            law = [float(token == int(row.argmax())) for token in range(5)]
        children = {TREE.tokens[i]: i for i in range(1, 5) if TREE.parents[i] == node}
        taken = taken_of(row, list(children), temperature) if children else None
        for token, p in enumerate(law):
            emitted = token if token in children or taken is None else taken
            if p == 0.0:
                continue
            if emitted in children:
                expect(children[emitted], chance * p, (*before, emitted))
            else:
                key = (*before, emitted)
                expected[key] = expected.get(key, 0.0) + chance * p

    expected: dict[tuple[int, ...], float] = {}
    expect(0, 1.0, ())
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) < 1e-12 for key in expected)


def test_filters_and_a_bias_hold_for_drafts_too() -> None:
    row = np.array([2.0, 1.9, 0.0, -1.0], dtype=np.float32)
    params = SamplingParams(temperature=1.0, accept_typical=EPSILON)
    assert Sampler(params, 4).typical(row, [1, 2]) == 1
    assert Sampler(params, 4).typical(row + np.float32(400.0), [3]) is None
    assert Sampler(replace(params, top_k=1), 4).typical(row, [1, 2]) is None
    assert Sampler(replace(params, top_k=2), 4).typical(row, [1, 2]) == 1
    assert Sampler(replace(params, top_k=1, temperature=0.0), 4).typical(row, [1, 2]) == 1
    tossed = replace(params, top_k=2, xtc_probability=1.0)
    assert Sampler(tossed, 4).typical(row, [1, 2]) == 1, "a coin is no filter"
    assert Sampler(replace(params, logit_bias={1: -math.inf}), 4).typical(row, [1]) is None
    masked = Sampler(replace(params, logit_bias={7: -math.inf}), 8)
    assert masked.typical(np.zeros(8, dtype=np.float32), [1]) == 1, "a seventh, of sevenths"


def test_what_is_taken_is_counted_and_remembered() -> None:
    """0 in place of 4. It is then penalised as any token that was written, so that 2 is picked."""
    rows = np.zeros((len(TREE), 5), dtype=np.float32)
    rows[0], rows[1], rows[3] = [1.9, 0, 0, 0, 2], [3, 0, 2.5, 0, 0], [0, 0, 0, 0, 9]
    pick = TypicalPick(TREE, Sampler(SamplingParams(accept_typical=0.2, presence_penalty=2.0), 5))
    assert accept(TREE, rows, pick) == ([0, 1, 3], [0, 2, 4])
    assert pick.num_taken == 1


def engine_of(is_exact: bool = False) -> Engine:
    backend = FakeBackend(random_model, V, context_size=256)
    return Engine(backend, curve=flat(), drafter=Garbage(chain=False), is_exact=is_exact)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_changes_only_where_it_is_asked_for(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5)
    plain = engine_of().generate([1], max_tokens=120, sampling=params, speculate=False)
    exact = engine_of().generate([1], max_tokens=120, sampling=params)
    assert exact.token_ids == plain.token_ids
    assert exact.counters.changed_tokens == 0
    typical = replace(params, accept_typical=0.001)
    lossy = engine_of().generate([1], max_tokens=120, sampling=typical)
    assert lossy.counters.changed_tokens > 0
    assert lossy.counters.acceptance_length > exact.counters.acceptance_length
    without = engine_of().generate([1], max_tokens=120, sampling=typical, speculate=False)
    assert (without.token_ids, without.counters.changed_tokens) == (plain.token_ids, 0)


def test_exact_engines_refuse_it() -> None:
    with pytest.raises(UnsupportedError, match="loaded as exact"):
        engine_of(is_exact=True).generate([1], sampling=SamplingParams(accept_typical=0.1))
