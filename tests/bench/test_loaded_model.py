"""A model that is loaded once, and measured with several drafters."""

from __future__ import annotations

from unittest.mock import Mock

from switching_cases import (
    LARGE_TABLE,
    POLICIES,
    PROMPT,
    engine,
    switching,
)

from edgespec.bench.loaded_model import LoadedModel
from edgespec.drafting.model import WritingDrafter


def test_benchmarks_give_both_models_a_drafter_that_has_seen_nothing() -> None:
    """No text, that is: how often it was right stays counted."""
    pair = switching(POLICIES[0])
    loaded = LoadedModel(pair, None, ["suffix", "suffix"], None)  # type: ignore[arg-type]
    used = []
    for place in (0, 1, 0):
        before = loaded._of_small[place]
        loaded.renew(place)
        renewed = loaded._of_small[place]
        assert before is not None and renewed is not None and renewed.state() == before.state()
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


def test_benchmarks_let_a_draft_model_read_each_prompt_anew() -> None:
    loaded = LoadedModel(engine(LARGE_TABLE, drafts=True), None, ["suffix"], None)  # type: ignore[arg-type]
    loaded._model = Mock(spec=WritingDrafter)
    for times in (1, 2):
        loaded.answer(0, PROMPT, 2)
        assert loaded._model.forget.call_count == times
