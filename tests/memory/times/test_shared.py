"""What steps of all sizes share is learned from each, in proportion to how unsure it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.shared import SharedTimes

INF = float("inf")
TRUE = CostCurve([INF, 4.0, 4.5, 4.8, 5.0, 5.6, 6.2, 6.8, 7.0], 0.0012, 0.0008, 0.4)


def write(curve: CostCurve, texts: list[int], seed: int, slow: float = 1.0) -> None:
    """Answers of 100 steps behind so many tokens, three quarters of them plain; 8% noise."""
    draw = random.Random(seed)
    for depth in texts:
        previous = 1
        for step in range(100):
            n = draw.choice((2, 4, 8)) if draw.random() < 0.25 else 1
            ms = slow * TRUE.step_ms(n, depth + step, previous) * draw.gauss(1.0, 0.08)
            curve.observe(n, depth + step, previous, ms)
            previous = n


def test_one_parameter_by_hand() -> None:
    """Only the price of a change is in it: 0.6 of 4 ms unsure, and nothing else of the noise."""
    shared = SharedTimes(4.0, (0.1, 0.1, 0.6))
    moves, own_ms = shared.moves((0.0, 0.0, 0.0, 1.0), 0.5, 0.8)
    assert moves == pytest.approx([0.0, 0.0, 0.0, 0.5 * 0.36 / (0.36 + 0.64)])
    assert own_ms == 0.0
    assert shared.deviations[2] == pytest.approx((0.36 * 0.64) ** 0.5)


def test_what_is_too_far_off_counts_as_far_as_is_likely() -> None:
    shared = SharedTimes(4.0, (0.0, 0.0, 0.0))
    before = shared.doubts(2)[0] ** 2
    _, own_ms = shared.moves((0.0, 0.0, 0.0, 0.0), 100.0, 0.8, 2, 7.5)
    own = (before + 0.003**2) * 7.5**2
    total = own + 0.8**2
    assert own_ms == pytest.approx(own / total * 2.5 * total**0.5)
    assert shared.doubts(2)[0] ** 2 == pytest.approx(own / 7.5**2 * (1 - own / total))


@pytest.mark.parametrize("wrong", [0.2, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_slopes_that_were_measured_wrongly_are_mended_by_answers(wrong: float, seed: int) -> None:
    """Steps behind 1,000 tokens are within a tenth, after answers behind 30 to 900."""
    curve = CostCurve(list(TRUE.base), TRUE.depth_ms * wrong, TRUE.depth_node_ms * wrong, 0.1)
    write(curve, [40, 600, 30, 900, 120, 300], seed)
    for n in (1, 2, 4, 8):
        assert curve.step_ms(n, 1000) / curve.step_ms(1, 0) == pytest.approx(
            TRUE.step_ms(n, 1000) / TRUE.step_ms(1, 0), rel=0.1
        )
    assert curve.change_ms == pytest.approx(0.4, abs=0.12)


def test_long_use_does_not_drift() -> None:
    """A machine at 1.3 times the time, 40 answers: speed, shape and slopes stay apart."""
    curve = CostCurve(list(TRUE.base), TRUE.depth_ms, TRUE.depth_node_ms, TRUE.change_ms)
    draw = random.Random(1)
    write(curve, [draw.randrange(20, 1500) for _ in range(40)], 2, slow=1.3)
    assert curve.scale == pytest.approx(1.3, rel=0.06)
    for n in (2, 4, 8):
        assert curve.base[n] == pytest.approx(TRUE.base[n], rel=0.06)
    assert curve.depth_node_ms == pytest.approx(TRUE.depth_node_ms, rel=0.2)


def test_what_is_unsure_shrinks_with_steps_and_is_kept() -> None:
    curve = CostCurve(list(TRUE.base), TRUE.depth_ms, TRUE.depth_node_ms, TRUE.change_ms)
    before = curve.doubt(8, 1000)
    write(curve, [100, 1000], 3)
    assert curve.doubt(1, 1000) == 0.0
    assert curve.doubt(8, 1000) < before / 2
    loaded = CostCurve.from_json(curve.as_json())
    assert loaded._shared.deviations == pytest.approx(curve._shared.deviations)
    assert curve.doubt(8, 0) < loaded.doubt(8, 0) < 0.05, "of another moment"
    assert loaded.resized(4).doubt(4, 0) == pytest.approx(loaded.doubt(4, 0), rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"deviations_ms": [0.1, 0.1]},
        {"deviations_ms": [0.1, 0.1, -1.0]},
        {"deviations_ms": "many"},
        {"doubts": {"2": 7.0}},
        {"doubts": {"two": 0.1}},
        {"doubts": [1, 2]},
    ],
)
def test_a_damaged_document_is_refused(change: dict[str, Any]) -> None:
    document = TRUE.as_json()
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostCurve.from_json({**document, **change})
