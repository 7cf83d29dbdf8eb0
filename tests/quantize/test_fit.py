"""Mixtures for a size: how close they come to the best, and what a stopped fit leaves."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import Clock

from edgespec.errors import DoesNotFitError
from edgespec.progress import TimeLimit
from edgespec.quantize.convert import Recipe, predict
from edgespec.quantize.fit import Fitness, _in_order, cheapest, fit
from edgespec.quantize.pieces import Pieces
from edgespec.quantize.quality import Reference


@pytest.mark.parametrize("room", [0, 3, 6, 9, 14, 30])
def test_the_cheapest_levels_come_close_to_the_best_of_all(room: int) -> None:
    random = np.random.default_rng(room)
    for _ in range(20):
        sizes = [tuple(np.cumsum(random.integers(1, 4, 3)).tolist()) for _ in range(4)]
        costs = [np.sort(random.random(3))[::-1] for _ in range(4)]
        space = room + sum(size[0] for size in sizes)
        ours = cheapest(costs, sizes, space)

        def size_of(levels: Sequence[int]) -> int:
            return sum(size[level] for size, level in zip(sizes, levels, strict=True))  # noqa: B023

        def cost_of(levels: Sequence[int]) -> float:
            return sum(float(c[level]) for c, level in zip(costs, levels, strict=True))  # noqa: B023

        fitting = [x for x in itertools.product(range(3), repeat=4) if size_of(x) <= space]
        best = min(map(cost_of, fitting))
        assert size_of(ours) <= space
        step = max(float(cost[0] - cost[2]) for cost in costs)
        assert best <= cost_of(ours) + 1e-12 and cost_of(ours) <= best + step


def test_a_fit_is_within_its_size_and_better_than_a_uniform_type(
    source: Path, pieces: Pieces, reference: Reference, tmp_path: Path
) -> None:
    budget = predict(source, Recipe("Q5_0", ((".", "Q5_0"),))).file_bytes
    found = fit(pieces, reference, tmp_path / "kept", budget, matrix={}, threads=1)
    assert found.file_bytes <= budget
    fitness = Fitness(pieces, reference, tmp_path / "other", 1)
    uniform = fitness(dict.fromkeys(found.types, "Q5_0"), len(reference.texts))
    assert found.kl <= uniform
    lines = (tmp_path / "kept").read_text().splitlines()
    assert len(lines) <= found.evaluations


def test_a_stopped_fit_goes_on_where_it_was(
    pieces: Pieces, reference: Reference, tmp_path: Path
) -> None:
    """What was measured is not measured again, a line cut off by a kill is, and results agree."""
    kept, budget = tmp_path / "kept", 150 * 1024
    first = fit(pieces, reference, kept, budget, matrix={}, threads=1)
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:9])
    again = fit(pieces, reference, kept, budget, matrix={}, threads=1)
    assert again.kl == pytest.approx(first.kl) and again.types == first.types
    now = kept.read_text().splitlines()
    assert now[: len(lines) - 3] == lines[:-3]
    shared = min(len(lines), len(now) - 1)  # the line that was cut off stays
    order = [json.loads(line)[0] for line in now[: len(lines) - 3] + now[len(lines) - 2 :]]
    assert order[:shared] == [json.loads(line)[0] for line in lines][:shared]


@pytest.mark.parametrize(
    "seconds", [0, *(pytest.param(one, marks=pytest.mark.long) for one in (7, 25)), 80]
)
def test_a_limit_is_for_sensitivities(
    pieces: Pieces, reference: Reference, tmp_path: Path, seconds: float
) -> None:
    """There is a mixture however little time there is; the next call goes on with what is known."""
    kept, budget = tmp_path / "kept", 150 * 1024
    found = fit(
        pieces, reference, kept, budget, matrix={}, threads=1, limit=TimeLimit(seconds, Clock(1))
    )
    assert found.file_bytes <= budget
    assert (found.measured < len(found.types)) == (seconds < 80)
    known = kept.read_text().splitlines()
    assert len(known) <= max(2, seconds)
    again = fit(pieces, reference, kept, budget, matrix={}, threads=1)
    assert again.measured == len(again.types)
    assert kept.read_text().splitlines()[: len(known)] == known


def test_the_first_tensors_measured_are_some_of_each_role(pieces: Pieces) -> None:
    """From all over the model: those that there was no time for are taken to be like them."""
    order = [pieces.choices[number].tensor.name for number in _in_order(pieces.choices)]
    roles = {re.sub(r"\d+", "#", name) for name in order}
    assert sorted(order) == sorted(choice.tensor.name for choice in pieces.choices)
    assert {re.sub(r"\d+", "#", name) for name in order[: len(roles)]} == roles


def test_a_size_nothing_fits_into(pieces: Pieces, reference: Reference, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="at least") as caught:
        fit(pieces, reference, tmp_path / "kept", 20_000, matrix={}, threads=1)
    assert "ask for" in caught.value.hint
