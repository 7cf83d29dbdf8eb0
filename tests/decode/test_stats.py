"""Counters of an answer, and the rates that follow from them."""

from __future__ import annotations

import itertools

import pytest
from decoding_cases import END, VOCAB, Prophet, echo_model, engine_of, flat, writes
from fake_backend import FakeBackend

from edgespec.backends.base import DraftTree
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Counters
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.recycling import RecyclingDrafter


@pytest.mark.parametrize("num_nodes", [0, 1, 4, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30])
def test_counters_add_up(num_nodes: int, max_tokens: int) -> None:
    engine = engine_of(echo_model, num_nodes)
    result = engine.generate("xabc", max_tokens=max_tokens)
    counters = result.counters
    assert isinstance(engine.backend, FakeBackend)
    assert counters.prompt_tokens == 4
    assert counters.generated_tokens == len(result.token_ids) == max_tokens
    assert counters.rounds == len(engine.backend.steps)
    assert counters.accepted_tokens + counters.rounds == max_tokens - 1
    assert counters.drafted_tokens == sum(engine.backend.steps) - counters.rounds
    assert counters.drafted_tokens >= counters.accepted_tokens
    assert counters.time_to_first_token_s > 0.0
    assert 0.0 <= counters.host_share <= 1.0
    assert counters.decode_s >= counters.step_s + counters.host_s - 1e-3
    if counters.rounds:
        assert counters.acceptance_length == (max_tokens - 1) / counters.rounds


@pytest.mark.parametrize("max_tokens", [2, 30, 61])
def test_counters_by_drafter_add_up(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each drafter drafted and what was accepted of it; a cut answer counts what was kept."""
    monkeypatch.setattr("edgespec.drafting.combined.thread_time", lambda: 0.0)
    text = b"the cat sat on the mat and the cat sat on the hat. the cat sat."
    drafter = CombinedDrafter([Prophet(writes(text), 2), RecyclingDrafter()])
    engine = Engine(FakeBackend(writes(text), VOCAB, end=END), curve=flat(), drafter=drafter)
    counters = engine.generate([0], max_tokens=max_tokens).counters
    drafted, accepted = counters.drafted_by, counters.accepted_by
    assert sum(drafted.values()) == counters.drafted_tokens
    assert sum(accepted.values()) == counters.accepted_tokens
    assert all(accepted[name] <= drafted[name] for name in accepted)
    assert set(drafted) <= {"prophet", "recycling"}
    if max_tokens > 2:
        assert 0 < accepted["prophet"] <= drafted["prophet"]
        assert drafted["recycling"] > 0


def test_counters_of_an_answer_that_a_stop_string_cut() -> None:
    """Tokens after the stop string were computed, but are not part of what was generated."""
    result = engine_of(writes(b"abcdefghij"), 6).generate([0], stop=["c"])
    assert bytes(result.token_ids) == b"abc"
    assert result.counters.generated_tokens == 3


def test_rates_by_hand() -> None:
    counters = Counters(generated_tokens=1)
    assert (counters.acceptance_length, counters.tokens_per_s, counters.host_share) == (1, 0, 0)
    first = DraftTree((1, 2, 3, 4, 5), (-1, 0, 1, 2, 2), ("", "a", "b", "b", "a"))
    counters.add_round(first, (0, 1, 2), step_s=0.3, draft_s=0.05, round_s=0.45)
    counters.add_round(DraftTree.chain((3, 4, 5)), (0,), step_s=0.2, draft_s=0.0, round_s=0.3)
    assert (counters.drafted_by, counters.accepted_by) == ({"a": 2, "b": 2}, {"a": 1, "b": 1})
    counters.decode_s = 0.8
    assert (counters.rounds, counters.drafted_tokens, counters.accepted_tokens) == (2, 6, 2)
    assert counters.generated_tokens == 5
    assert counters.acceptance_length == 2.0
    assert counters.tokens_per_s == pytest.approx(4 / 0.8)
    assert counters.host_share == pytest.approx(1 - 0.55 / 0.8)


def test_only_the_engine_is_timed_and_not_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    hours = [0.0]
    monkeypatch.setattr("edgespec.decode.scheduler.perf_counter", lambda: next(clock) + hours[0])
    counters = engine_of(writes(b"abcdef")).generate([0]).counters
    clock = itertools.count()
    stream = engine_of(writes(b"abcdef")).stream([0])
    for _ in stream:
        hours[0] += 3600.0
    assert stream.result.counters.decode_s == counters.decode_s > 0
    assert stream.result.counters.prompt_s == counters.prompt_s > 0
    assert stream.result.counters.time_to_first_token_s < 3600.0
