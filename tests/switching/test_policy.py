"""When one model hands over to the other: prices, means, what a stay saves."""

from __future__ import annotations

import math
from itertools import count

import pytest
from switching_cases import LARGE_TABLE, VOCAB

from edgespec.backends.fake import FakeBackend
from edgespec.decode.stats import LARGE, SMALL
from edgespec.errors import UnsupportedError
from edgespec.measure.timing import measure_reads
from edgespec.memory.times.curve import CostCurve
from edgespec.switching.policy import SwitchPolicy, SwitchPrices


def test_what_an_average_stay_saves_is_between_whole_ones() -> None:
    curve = CostCurve([math.inf, *(float(n) for n in range(4, 20))])
    prices = SwitchPrices(curve, CostCurve([math.inf, *[0.5] * 16]))
    asked_in_vain = prices.saved_ms(0.0, 1, 0)
    assert asked_in_vain == pytest.approx(-0.5)  # it read one token
    one = prices.saved_ms(1.0, 1, 0)
    assert prices.saved_ms(0.25, 1, 0) == pytest.approx(0.75 * asked_in_vain + 0.25 * one)


def test_catching_up_is_priced_as_it_is_done() -> None:
    """Reading for one row of logits, and the next step, which builds its graph anew."""
    steps = CostCurve([math.inf, *(10.0 + n for n in range(1, 9))], change_ms=0.5)
    reads = CostCurve([math.inf, 11.0, math.inf, math.inf, 12.5])
    prices = SwitchPrices(steps, steps, reads, None)
    assert prices.catch_up_ms(LARGE, 4, 0) == 12.5 + 0.5
    assert prices.catch_up_ms(SMALL, 4, 0) == 14.0 + 0.5
    assert prices.catch_up_ms(LARGE, 1, 0) == 11.0


@pytest.mark.parametrize(
    ("tick_s", "sizes"), [(0.01, [1, 2, 4, 8, 16, 32]), (0.2, [1, 2, 8]), (9.0, [1, 8])]
)
def test_reads_are_measured_for_a_second_the_most_useful_first(
    tick_s: float, sizes: list[int]
) -> None:
    """With a clock that ticks when it is looked at, four times for each read."""
    times = (tick_s * n for n in count())
    curve = CostCurve([math.inf, 5.0], depth_ms=0.25)
    reads = measure_reads(FakeBackend(LARGE_TABLE, VOCAB), curve, clock=lambda: next(times))
    measured = {size: ms for size, ms in enumerate(reads.base) if ms != math.inf}
    assert measured == pytest.approx(dict.fromkeys(sizes, 1e3 * tick_s))
    assert reads.depth_ms == 0.25 and reads.scaled(2.0).base[8] == pytest.approx(2e3 * tick_s)


def test_turns_are_priced_by_hand() -> None:
    large = CostCurve([math.inf, *(10.0 + n for n in range(1, 9))])
    small = CostCurve([math.inf, *(1.0 + n for n in range(1, 9))])
    prices = SwitchPrices(large, small, prompt_ms=0.5)
    turns = [(SMALL, 3), (LARGE, 2), (SMALL, 1)]
    # Two steps and a thrown row of the small one; the large one reads 5 of the prompt and 3 and
    # goes on by one; the small one reads 2.
    assert prices.turns_ms(turns, 5) == 2 * 2.0 + 2.0 + 8 * 0.5 + 11.0 + 3.0
    # Nothing of the prompt: its own last token and 3.
    assert prices.turns_ms(turns, 5, 5) == 2 * 2.0 + 2.0 + 14.0 + 11.0 + 3.0
    # The small one reads 2 and hands back; the large one goes on with its own last token.
    asked = [(LARGE, 2), (SMALL, 0), (LARGE, 2)]
    assert prices.turns_ms(asked, 5, 5) == 11.0 + 3.0 + 2 * 11.0


@pytest.mark.parametrize(
    "values",
    [
        {"window": 0},
        {"min_stay": -1},
        {"expected_stay": -0.5},
        {"expected_stay": math.inf},
        {"window": 1.5},
        {"up_nats": math.nan},
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError):
        SwitchPolicy(**values)  # type: ignore[arg-type]
