"""What rounds of a draft model bring and take, and what is kept of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from draft_model_cases import (
    INF,
    LONGEST,
    Clock,
    Draft,
    V,
    counting,
    curve_of,
    drafter_of,
    observe,
    prospects_of,
    stakes_of,
)

from edgespec.drafting.drafters.model import ModelDrafter
from edgespec.drafting.drafters.model_rounds import UsualRound


def test_what_rounds_usually_bring_is_what_is_expected_of_the_next(clock: Clock) -> None:
    """Chains of three that are always right, with nothing worth standing beside them."""
    drafter, _ = drafter_of(counting, clock)
    drafter.begin([0])
    for _ in range(200):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=3)).tokens, 0])
    hope = prospects_of(drafter, max_nodes=3)
    assert min(hope.probabilities) > 0.9
    assert hope.draft_ms == pytest.approx(0.03, rel=0.05)


def test_what_rounds_take_beyond_their_steps_is_learned(clock: Clock) -> None:
    """Steps that were measured at 1 ms and take 3 ms here."""
    draft = Draft(counting, clock, 3.0)
    drafter = ModelDrafter(draft, curve_of(*[1.0] * 16), V)
    drafter.begin([0])
    assert prospects_of(drafter).draft_ms == 3.0
    for _ in range(200):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=2)).tokens, 0])
    assert prospects_of(drafter).draft_ms == pytest.approx(2 * 3.0, rel=0.05)


def test_a_round_that_stands_still_is_soon_forgotten(clock: Clock) -> None:
    draft = Draft(counting, clock, 1.0)
    drafter = ModelDrafter(draft, curve_of(*[1.0] * 16), V)
    drafter.begin([0])
    for stall_ms in (0.0, 0.0, 60_000.0):
        draft.node_ms = 1.0 + stall_ms
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=1)).tokens, 0])
    assert prospects_of(drafter).draft_ms < 3.0 * 3.0
    draft.node_ms = 1.0
    for _ in range(100):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=1)).tokens, 0])
    assert prospects_of(drafter).draft_ms == pytest.approx(1.0, rel=0.1)


def test_what_it_would_take_to_catch_up(clock: Clock) -> None:
    """Step times 1, 2, 4 and 8 ms: three missing tokens are 3 ms more than one, and 40 take ten
    steps of four."""
    draft = Draft(counting, clock, 1.0)
    drafter = ModelDrafter(draft, curve_of(1.0, 2.0, 4.0, 8.0), V)
    for missing, before_ms in ((1, 0.0), (2, 1.0), (3, 3.0), (4, 7.0), (40, 79.0)):
        drafter.begin([0] * missing)
        hope = prospects_of(drafter, max_nodes=3)
        assert hope.before_ms == pytest.approx(before_ms)
        assert hope.draft_ms == 3.0  # three steps
        assert list(hope.probabilities) == pytest.approx([0.7, 0.49, 0.343])


def test_reading_is_priced_between_the_sizes_that_were_measured(clock: Clock) -> None:
    """1 ms for one and 4 ms for four: 2 ms for two."""
    drafter = ModelDrafter(Draft(counting, clock, 1.0), curve_of(1.0, INF, INF, 4.0, INF), V)
    drafter.begin([0, 1])
    assert prospects_of(drafter).before_ms == pytest.approx(1.0)


def test_a_draft_grows_over_sizes_of_the_target_that_were_not_measured(clock: Clock) -> None:
    """Of the target 1 and 5 nodes were measured: one drafted token can only be left out, four pay.

    1 / 10, and (1 + 0.7 + 0.49 + 0.343 + 0.24) / 14.4. Five of six nodes were not measured either.
    """
    drafter, _ = drafter_of(counting, clock, 0.1)
    drafter.begin([1, 2])
    assert len(drafter.propose(stakes_of(10.0, INF, INF, INF, 14.0, INF))) == 4


# ------------------------------------------------------------------------------ state


def test_counts_and_hope_survive_a_restart(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock)
    drafter.begin([0])
    for _ in range(10):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=3)).tokens, 5])
    fresh, _ = drafter_of(counting, clock)
    fresh.load_state(json.loads(json.dumps(drafter.state())))
    assert fresh.state() == drafter.state()
    assert fresh.state()["hope"] == pytest.approx(1 - 0.3 * 0.95**30)
    fresh.begin([0])
    drafter.begin([0])
    ours, theirs = (prospects_of(each) for each in (fresh, drafter))
    assert ours.probabilities == theirs.probabilities
    assert ours.draft_ms == pytest.approx(theirs.draft_ms)
    drafter.close()
    assert draft.closed


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"hope": "high"},
        {"hope": 1.5},
        {"hope": -1.0},
        {"hope": float("nan")},
        {"usual": [0.5], "usual_steps": 1.0},
        {"usual": [0.5] * LONGEST, "usual_steps": "one"},
        {"usual": [0.5] * LONGEST, "usual_steps": 99.0},
        {"usual": [1.5] * LONGEST, "usual_steps": 1.0},
        {"usual": ["0.5"] * LONGEST, "usual_steps": 1.0},
    ],
)
def test_a_state_that_is_of_no_use_is_ignored(
    clock: Clock, document: dict[str, Any] | None
) -> None:
    drafter, _ = drafter_of(counting, clock)
    before = drafter.state()
    drafter.load_state(document)
    assert drafter.state() == before


def test_another_text_begins_with_what_texts_are_usually_like() -> None:
    """A hard text is soon expected to be hard, and says little of the next one."""
    usual = UsualRound([0.6, 0.3])
    assert usual.probabilities[:3] == [0.6, 0.3, 0.0] and usual.hope == 0.6
    for _ in range(100):
        usual.learn([0.1], 1)
    assert usual.probabilities[0] < 0.11
    usual.begin()
    assert 0.15 < usual.probabilities[0] < 0.3, "a hundred rounds of hundred and twenty"
    kept = usual.state()
    assert kept["usual"] == usual.probabilities
    again = UsualRound()
    again.load_state(kept)
    assert again.probabilities == usual.probabilities
