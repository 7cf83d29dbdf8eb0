"""Acceptance counting: the docstring's formula by hand, what it converges to, and its storage."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from edgespec.drafting import constants
from edgespec.drafting.proposal import Calibration


@pytest.fixture
def strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants of the hand-worked examples, whatever the tuned ones are."""
    for name, value in (
        ("CELL_STRENGTH", 6.0),
        ("RECENT_STRENGTH", 20.0),
        ("RECENT_DECAY", 0.95),
    ):
        monkeypatch.setattr(constants, name, value)


def small() -> Calibration:
    """Cells 0 and 1 share group 0, cells 1 and 2 share the recent class 1."""
    return Calibration(3, groups=(0, 0, 1), recents=(0, 1, 1), priors=(0.5, 0.2))


def probabilities(calibration: Calibration) -> list[float]:
    return [calibration.probability(cell) for cell in range(3)]


def test_before_anything_was_counted_the_prior_holds() -> None:
    assert probabilities(small()) == pytest.approx([0.5, 0.5, 0.2])


@pytest.mark.usefixtures("strengths")
def test_one_hit_by_hand() -> None:
    """Group 0: (1 + 0.5) / (1 + 1) = 0.75; cell 0: (1 + 6 * 0.75) / (1 + 6) = 5.5 / 7."""
    calibration = small()
    calibration.count(0, True)
    assert probabilities(calibration) == pytest.approx([(1 + 20 * 5.5 / 7) / 21, 0.75, 0.2])


@pytest.mark.usefixtures("strengths")
def test_a_hit_and_a_miss_by_hand() -> None:
    """Group: 1.5 / 3; cell: (1 + 6 * 0.5) / 8; recent counts faded to 0.95 hits of 1.95."""
    calibration = small()
    calibration.count(0, True)
    calibration.count(0, False)
    assert calibration.probability(0) == pytest.approx((0.95 + 20 * 0.5) / (1.95 + 20))


@pytest.mark.usefixtures("strengths")
def test_recent_counts_move_the_cells_of_their_class_and_are_forgotten() -> None:
    """A miss of cell 2 lowers cell 1, which shares nothing else with it, until a new text."""
    calibration = small()
    calibration.count(2, False)
    assert calibration.probability(1) == pytest.approx((0 + 20 * 0.5) / 21)
    calibration.forget_recent()
    assert probabilities(calibration) == pytest.approx([0.5, 0.5, (0 + 6 * 0.1) / 7])


def test_another_text_has_the_same_counts_but_for_those_of_lately() -> None:
    one = small()
    one.count(0, True)
    other = one.for_another_text()
    one.count(0, True)
    one.forget_recent()
    assert probabilities(other) == probabilities(one)


def test_a_full_table_still_learns() -> None:
    """However often a cell was right before, 6,000 misses bring it below one third."""
    calibration = small()
    for _ in range(50_000):
        calibration.count(0, True)
    for _ in range(6_000):
        calibration.count(0, False)
    calibration.forget_recent()
    assert calibration.probability(0) < 1 / 3
    assert calibration.as_json()["cells"]["0"][1] <= 5000


def test_a_group_forgets_what_its_cells_forget() -> None:
    """20,000 hits of cell 0, then 10,000 misses: cell 1, never tried, follows the faded counts.

    Each 2,000 trials halve what was there before, so after five such the hits are 1 in 16 or less.
    """
    calibration = small()
    for _ in range(20_000):
        calibration.count(0, True)
    for _ in range(10_000):
        calibration.count(0, False)
    assert calibration.group_probability(0) < 0.1
    assert calibration.probability(1) < 0.1
    assert calibration.group_probability(1) == 0.2


def test_counts_survive_a_restart() -> None:
    """What a new process reads gives the same probabilities as the start of a new text."""
    rng = random.Random(2)
    first = small()
    for _ in range(200):
        first.count(rng.randrange(2), rng.random() < 0.7)
    document = json.loads(json.dumps(first.as_json()))
    assert list(document["cells"]) == ["0", "1"]  # cell 2 was never tried
    second = small()
    second.load_json(document)
    first.forget_recent()
    assert probabilities(second) == pytest.approx(probabilities(first))
    assert second.as_json() == first.as_json()


# Cells of a document that are none.
BAD_CELLS: list[Any] = [
    None,
    "0",
    [[2, 2]],
    {"3": [2, 2]},
    {"-1": [2, 2]},
    {"x": [2, 2]},
    {"": [2, 2]},
    {"1.5": [2, 2]},
    {"0": [3, 2]},
    {"0": [-1, 2]},
    {"0": [1, 1e9]},
    {"0": [float("nan"), 2]},
    {"0": [1, float("nan")]},
    {"0": [1, float("inf")]},
    {"0": [float("inf"), float("inf")]},
    {"0": [0, 10**400]},
    {"0": [1]},
    {"0": []},
    {"0": None},
    {"0": 5},
    {"0": {"hits": 1}},
    {"0": ["a", "b"]},
    {"0": [[1], [2]]},
]


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"num_cells": 3},
        {"num_cells": 4, "cells": {"0": [2, 2]}},
        {"cells": {"0": [2, 2]}},
        *({"num_cells": 3, "cells": cells} for cells in BAD_CELLS),
    ],
    ids=str,
)
def test_a_document_that_is_not_ours_changes_nothing(document: dict[str, Any] | None) -> None:
    calibration = small()
    calibration.load_json(document)
    assert probabilities(calibration) == pytest.approx([0.5, 0.5, 0.2])


@pytest.mark.usefixtures("strengths")
def test_a_damaged_entry_does_not_hide_the_good_ones() -> None:
    calibration = small()
    calibration.load_json({"num_cells": 3, "cells": {"0": "damaged", "2": [3, 4]}})
    assert probabilities(calibration) == pytest.approx([0.5, 0.5, (3 + 6 * (3.2 / 5)) / 10])
    calibration.load_json({"num_cells": 3, "cells": {"1": [0, 4]}})
    assert probabilities(calibration)[:2] == pytest.approx([0.5 / 5, 6 * (0.5 / 5) / 10])


# ---------------------------------------------------------------------- counts of other models


@pytest.mark.usefixtures("strengths")
@pytest.mark.parametrize(("counted", "hits", "tries"), [((10.0, 40.0), 5, 20), ((1.0, 4.0), 1, 4)])
def test_counts_of_other_models_by_hand(
    monkeypatch: pytest.MonkeyPatch, counted: tuple[float, float], hits: int, tries: int
) -> None:
    """10 of 40 tries count as 5 of 20: group 0 (0.5 + 5) / 21, cell 0 (5 + 6 * that) / 26."""
    monkeypatch.setattr(constants, "PRIOR_TRIES", 20.0)
    calibration = Calibration(3, (0, 0, 1), (0, 1, 1), (0.5, 0.2), {0: counted})
    coarse = (0.5 + hits) / (1 + tries)
    cells = [(hits + 6 * coarse) / (tries + 6), coarse, 0.2]
    assert probabilities(calibration) == pytest.approx(cells)


def test_own_counts_replace_those_of_other_models() -> None:
    known = {0: (900.0, 1000.0)}
    calibration = Calibration(1, (0,), (0,), (0.5,), known)
    assert calibration.probability(0) > 0.85
    for step in range(1000):
        calibration.count(0, step % 10 == 0)
    calibration.forget_recent()
    assert calibration.probability(0) == pytest.approx(0.1, abs=0.04)


def test_counts_of_other_models_are_never_stored() -> None:
    known = {0: (9.0, 10.0)}
    calibration = Calibration(2, (0, 0), (0, 0), (0.5,), known)
    assert calibration.as_json()["cells"] == {}
    calibration.count(0, True)
    assert calibration.as_json()["cells"] == {"0": [1.0, 1.0]}
    loaded = Calibration(2, (0, 0), (0, 0), (0.5,), known)
    loaded.load_json(calibration.as_json())
    calibration.forget_recent()
    assert loaded.probability(0) == pytest.approx(calibration.probability(0))


def test_what_was_counted_may_stand_for_less() -> None:
    """Cells and their group keep their share of hits; what was counted rarely stays."""
    calibration = Calibration(2, [0, 0], [0, 1], [0.5])
    for number in range(100):
        calibration.count(0, number % 4 == 0)
    calibration.count(1, True)
    calibration.fade(20.0)
    assert calibration.as_json()["cells"] == {"0": [5.0, 20.0], "1": [1.0, 1.0]}
    assert calibration.group_probability(0) == pytest.approx((5.0 + 1.0 + 0.5) / 22.0)
