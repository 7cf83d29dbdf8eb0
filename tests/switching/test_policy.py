"""When one model hands over to the other: prices, means, what a stay saves."""

from __future__ import annotations

import math
from itertools import count

import pytest
from switching_cases import LARGE_TABLE, VOCAB, always_switching

from edgespec.backends.fake import FakeBackend
from edgespec.decode.writers import LARGE, SMALL
from edgespec.drafting.proposal import Proposal
from edgespec.errors import UnsupportedError
from edgespec.measure.timing import measure_reads
from edgespec.memory.times.curve import CostCurve
from edgespec.switching.policy import SwitchPolicy, SwitchPrices
from edgespec.switching.switch import Switch


def test_drafts_are_worth_what_their_model_gets_to_write() -> None:
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, min_stay=1))
    assert switch.goes_on == pytest.approx(1 - 1 / 8)
    # One that may be of no token at all is of n more with a chance of (8 / 9)^n.
    assert Switch(always_switching()).goes_on == pytest.approx(8 / 9)
    assert Switch(SwitchPolicy.always(SMALL)).goes_on == 1.0
    assert Switch(SwitchPolicy(up_nats=0.0)).goes_on == 1.0
    never_down = Switch(SwitchPolicy(), lambda *_: -1.0)
    assert (never_down.writer, never_down.goes_on) == (LARGE, 1.0)
    proposal = Proposal((1, 2, 3, 4), (-1, 0, 1, -1), (0.9, 0.8, 0.7, 0.5))
    cut = proposal.cut_off(0.5)
    assert list(cut.tokens) == [1, 4, 2, 3] and list(cut.parents) == [-1, -1, 0, 2]
    assert list(cut.probabilities) == pytest.approx([0.9, 0.5, 0.4, 0.175])


def test_means_begin_anew_and_stays_are_kept() -> None:
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, window=2, min_stay=2))
    assert not switch.sees(0.9)
    assert not switch.sees(1.0)  # mean 0.95
    assert switch.sees(1.1)  # mean 1.05, after two tokens
    switch.change()
    assert switch.writer == LARGE
    assert not switch.sees(0.1)
    assert not switch.is_due  # a stay of one token
    assert not switch.sees(0.2)
    assert switch.is_due  # mean 0.15; its token is kept
    assert switch.sees(0.0)  # and the next one is not its own
    switch.change()
    assert not switch.sees(9.0)
    assert not switch.sees(9.0)
    assert switch.sees(9.0)


def test_a_way_down_that_costs_more_than_it_saves_is_not_made() -> None:
    curve = CostCurve([math.inf, *(float(n) for n in range(4, 20))])  # a step of n: n + 3 ms
    cheap, dear = (CostCurve([math.inf, ms, *[ms] * 15]) for ms in (0.5, 3.9))
    policy = SwitchPolicy(up_nats=1.0, down_nats=0.5, expected_stay=4.0)
    for small, pays in ((cheap, True), (dear, False)):
        prices = SwitchPrices(curve, small)
        # 4 tokens at 4 ms against a step and 4 tokens of the small one, and 4 more to read.
        assert prices.saved_ms(4.0, 2, 0) == pytest.approx(16 - 5 * small.base[1] - 4)
        switch = Switch(policy, prices.saved_ms)
        assert switch.writer == (SMALL if pays else LARGE)
        if pays:
            assert switch.sees(2.0)
            switch.change()
        switch.sees(0.0)
        assert switch.is_due == pays


def test_what_an_average_stay_saves_is_between_whole_ones() -> None:
    curve = CostCurve([math.inf, *(float(n) for n in range(4, 20))])
    prices = SwitchPrices(curve, CostCurve([math.inf, *[0.5] * 16]))
    asked_in_vain = prices.saved_ms(0.0, 1, 0)
    assert asked_in_vain == pytest.approx(-0.5)  # it read one token
    one = prices.saved_ms(1.0, 1, 0)
    assert prices.saved_ms(0.25, 1, 0) == pytest.approx(0.75 * asked_in_vain + 0.25 * one)


def test_a_small_model_that_was_asked_in_vain_is_asked_again_later() -> None:
    """A stay of 3 pays; five refusals later none would, and 26 tokens later the average one."""
    policy = SwitchPolicy(up_nats=1.0, down_nats=math.inf, expected_stay=3.0)
    switch = Switch(policy, lambda stay, _missed, _depth: stay - 1.5)
    assert switch.writer == SMALL
    refusals = 0
    while switch.writer == SMALL:
        assert switch.sees(9.0)
        switch.change()
        refusals += 1
        switch.sees(0.0)
        if switch.is_due:
            switch.change()
    assert refusals == 4  # 3.0, 2.4, 1.92, 1.54, 1.23
    waited = 1
    while not switch.is_due:
        switch.sees(0.0)
        waited += 1
    stay = 3.0 * 0.8**4
    expected = next(n for n in count(1) if 3.0 - (3.0 - stay) * 0.98**n > 1.5)
    assert waited == expected + 1


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
