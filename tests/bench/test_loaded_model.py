"""A model that is loaded once, and measured with several drafters."""

from __future__ import annotations

from switching_cases import (
    LARGE_TABLE,
    POLICIES,
    PROMPT,
    engine,
    switching,
)

from edgespec.bench.loaded_model import LoadedModel


def test_benchmarks_give_both_models_a_drafter_that_has_seen_nothing() -> None:
    pair = switching(POLICIES[0])
    loaded = LoadedModel(pair, None, ["suffix", "suffix"], None)  # type: ignore[arg-type]
    used = []
    for place in (0, 1, 0):
        loaded.renew(place)
        loaded.answer(place, PROMPT, 20)
        used.append(pair.small.drafter)
    assert None not in used and len(set(map(id, used))) == 3


def test_benchmarks_count_for_later_runs_what_the_loaded_drafter_does_alone() -> None:
    alone = engine(LARGE_TABLE, drafts=True)
    assert alone.drafter is not None
    counted = alone.history
    loaded = LoadedModel(alone, None, ["recycling", alone.drafter.name], None)  # type: ignore[arg-type]
    loaded.answer(0, PROMPT, 20)
    assert len(counted) == 0
    rounds = loaded.answer(1, PROMPT, 20).counters.rounds
    assert len(counted) == rounds > 0
