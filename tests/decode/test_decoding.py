"""Plain rounds that a drafter is told of behind them, at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from decoding_cases import END, VOCAB, Prophet, flat, writes
from fake_backend import FakeBackend
from frozen_times import Frozen

from edgespec.decode.engine import Engine
from edgespec.drafting.proposal import EMPTY, Proposal, StepContext, VerifyResult

TEXT = b"The clock in the hall struck nine, and nobody was there to hear it."


class Sleeper(Prophet):
    """Drafts in one round and then pauses for some, unless it hears a certain token."""

    def __init__(self, rounds: int, alarm: int = -1, num_nodes: int = 2) -> None:
        super().__init__(writes(TEXT), num_nodes)
        self.rounds = rounds
        self.alarm = alarm
        self.told: list[int] = []
        self.is_awake = False

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        self.is_awake = not self.is_awake
        return super().propose(context, base) if self.is_awake else EMPTY

    def observe(self, outcome: VerifyResult) -> None:
        super().observe(outcome)
        self.told.append(outcome.rounds)
        assert len(outcome.tree) >= len(outcome.emitted) == len(outcome.path)
        assert self.text[-len(outcome.emitted) - 1] == outcome.tree.tokens[0]

    def cooldown(self) -> int:
        return self.rounds

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        return self.alarm in tokens[-1:]


def engine_with(drafter: Sleeper) -> Engine:
    return Engine(FakeBackend(writes(TEXT), VOCAB, end=END), curve=flat(), drafter=drafter)


@pytest.mark.parametrize("rounds", [0, 1, 2, 7, 1000])
def test_a_text_is_the_same_and_the_drafter_is_told_all_of_it(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And step times are learned from each of its steps."""
    timed: list[Any] = []
    monkeypatch.setattr(Frozen, "observe", lambda _, *given: timed.append(given))
    drafter = Sleeper(rounds)
    engine = engine_with(drafter)
    result = engine.generate([1], max_tokens=200)
    assert result.text == TEXT.decode()
    assert drafter.text == [1, *TEXT, END]
    told = {0: {1}, 1: {1}, 2: {1, 2}, 7: {1, 7}, 1000: {1, len(TEXT) - 4}}
    assert set(drafter.told) == told[rounds]
    assert len(engine.history) == result.counters.rounds == sum(drafter.told) == len(timed)


def test_a_pause_ends_where_the_drafter_wants_to_be_asked() -> None:
    drafter = Sleeper(1000, alarm=ord(","))
    result = engine_with(drafter).generate([1], max_tokens=200)
    assert result.text == TEXT.decode()
    before = TEXT.index(b",") - 4  # three tokens of the first drafts and one of the round behind
    assert drafter.told[:4] == [1, 1, before, 1]


def test_what_a_closed_stream_has_brought_is_told() -> None:
    drafter = Sleeper(1000)
    with engine_with(drafter).stream([1], max_tokens=200) as stream:
        for chunk in stream:
            if chunk.text.endswith("n"):  # of "in"
                break
    written = TEXT[: TEXT.index(b"in") + 2]
    assert drafter.text == [1, *written]


def test_a_long_cooldown_copies_nothing_for_each_token() -> None:
    """What was written in it is one list, which grows: a copy each time is quadratic."""
    seen: list[Sequence[int]] = []

    class Watched(Sleeper):
        def has_hit(self, tokens: Sequence[int] = ()) -> bool:
            seen.append(tokens)
            return False

    engine_with(Watched(1000)).generate([1], max_tokens=200)
    assert len(seen) > 20 and all(one is seen[0] for one in seen)
