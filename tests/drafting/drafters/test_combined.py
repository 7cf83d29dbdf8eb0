"""Several drafters as one, on a clock that only moves when a drafter says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from combined_cases import (
    ALLOWANCE,
    FIRST_STEPS,
    FIRST_STEPS_OF_MODEL,
    INF,
    PLAIN_MS,
    Model,
    Table,
    rounds,
    stakes_of,
)
from draft_model_cases import Clock

from edgespec.backends.tree import DraftTree
from edgespec.drafting.drafters import NAMES, make_drafter
from edgespec.drafting.drafters.base import Drafter, Outcome
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.drafting.proposal import Proposal, Stakes
from edgespec.errors import UnsupportedError
from edgespec.memory.times.curve import CostCurve

# ------------------------------------------------------------------------------ tables


def test_a_first_table_that_pays_is_asked_in_every_round(clock: Clock) -> None:
    """Choosing, telling and counting take twice its time besides."""
    first = Table("first", clock, [7], propose_ms=PLAIN_MS / 4)
    rounds(CombinedDrafter([first]), 100, stakes_of(), accepted=True)
    assert (first.asked, first.learned) == (100, 100)


def test_a_first_table_of_no_use_costs_its_allowance_and_is_soon_asked_again(clock: Clock) -> None:
    """A plain step, and 0.4% of all; a round in which it is right brings it back."""
    first = Table("first", clock, [7], propose_ms=0.1)
    combined = CombinedDrafter([first])
    rounds(combined, 1000, stakes_of())
    spent_ms = 3 * first.asked * 0.1
    assert spent_ms <= PLAIN_MS + 0.004 * 1000 * PLAIN_MS + 3 * 0.1
    assert first.learned == 1000, "it follows the text"
    asked = first.asked
    rounds(combined, 20, stakes_of())
    assert 0 < first.asked - asked <= 3
    asked = first.asked
    rounds(combined, 50, stakes_of(), accepted=True)
    assert first.asked - asked >= 35


@pytest.mark.parametrize("learn_ms", [0.0, 0.7])
@pytest.mark.parametrize("propose_ms", [0.02, 0.5, 3.0, 300.0])
def test_a_table_that_never_pays_costs_its_allowance(
    clock: Clock, propose_ms: float, learn_ms: float
) -> None:
    """Four plain steps, 0.4 % of all steps, and what the last time it was asked took."""
    first, second = Table("first", clock), Table("second", clock, propose_ms=propose_ms)
    second.learn_ms = learn_ms
    combined = CombinedDrafter([first, second])
    rounds(combined, 10_000, stakes_of())
    allowed = FIRST_STEPS * PLAIN_MS + 10_000 * ALLOWANCE * PLAIN_MS
    assert second.spent_ms <= allowed + propose_ms + learn_ms
    assert second.spent_ms >= min(allowed, 10_000 * propose_ms) - (propose_ms + learn_ms)
    assert len(second.text) == first.asked == 10_000  # it keeps the text whether asked or not


def test_wrong_nodes_are_paid_for_too(clock: Clock) -> None:
    """Two nodes a round that add 2 ms each: 40 ms are gone after ten rounds, and never again."""
    first, second = Table("first", clock), Table("second", clock, [5, 6])
    rounds(CombinedDrafter([first, second]), 40, stakes_of(12.0, 14.0))
    assert second.asked == 11


def test_a_table_that_pays_is_asked_in_every_round(clock: Clock) -> None:
    """Two tokens a round bring 20 ms and take 9 + 4."""
    first, second = Table("first", clock), Table("second", clock, [5, 6], propose_ms=9.0)
    second.learn_ms = 2.0
    rounds(CombinedDrafter([first, second]), 2000, stakes_of(12.0, 14.0), accepted=True)
    assert (second.asked, second.learned) == (2000, 2000)


def test_a_table_that_stopped_paying_is_tried_again(clock: Clock) -> None:
    """Old savings last for at most 50 plain steps; then it is asked now and then.

    Each try takes 4 ms, which is the allowance of 100 rounds. When it pays again, it is asked in
    every round.
    """
    first, second = Table("first", clock), Table("second", clock, [5, 6], propose_ms=4.0)
    combined = CombinedDrafter([first, second])
    rounds(combined, 1000, stakes_of(), accepted=True)
    assert second.asked == 1000
    rounds(combined, 1000, stakes_of())
    asked = second.asked - 1000
    assert 50 * PLAIN_MS / 4.0 <= asked <= 50 * PLAIN_MS / 4.0 + 1000 / 100 + 2
    rounds(combined, 1000, stakes_of())
    assert 9 <= second.asked - 1000 - asked <= 11
    combined_asked = second.asked
    rounds(combined, 200, stakes_of(), accepted=True)
    assert second.asked - combined_asked >= 100


def test_a_step_whose_size_was_not_measured_spoils_no_purse(clock: Clock) -> None:
    """Drawn nodes must be verified, whatever their number: then no step time is known."""
    first, second = Table("first", clock), Table("second", clock, [5], propose_ms=1.0)
    combined = CombinedDrafter([first, second])
    for tree in (
        DraftTree((1, 5), (-1, 0), ("", "first")),
        DraftTree((1, 5), (-1, 0), ("", "second")),
    ):
        combined.propose(stakes_of(INF, 12.0))
        combined.observe(Outcome(tree, [0], [2], stakes_of(INF, 12.0)))
    asked = second.asked
    rounds(combined, 10, stakes_of(), accepted=True)
    assert second.asked == asked + 10


# ------------------------------------------------------------------------------ models


def test_a_model_is_asked_where_it_raises_the_rate(clock: Clock) -> None:
    """Plain: 0.1 tokens/ms. Hopes of 0.7 and 0.5 for 1 ms a node: 2.2 / 12 = 0.18."""
    model = Model(clock, [0.7, 0.5])
    rounds(CombinedDrafter([Table("first", clock), model]), 500, stakes_of(), accepted=True)
    assert model.asked == 500


def test_promises_that_never_hold_are_not_believed_for_long(clock: Clock) -> None:
    """As with a table: 2 ms a round out of the first 20 ms, and of 0.04 ms a round."""
    model = Model(clock, [0.7, 0.5])
    rounds(CombinedDrafter([Table("first", clock), model]), 10_000, stakes_of())
    assert model.asked == pytest.approx((20.0 + 10_000 * 0.04) / 2.0, abs=1.5)


def test_wrong_nodes_of_a_model_are_paid_for_too(clock: Clock) -> None:
    """Each round takes 2 ms of drafting and adds 2 x 0.5 ms to a step: 20 ms last for seven."""
    model = Model(clock, [0.7, 0.5])
    rounds(CombinedDrafter([Table("first", clock), model]), 40, stakes_of(10.5, 11.0))
    assert model.asked == 7


def test_reading_a_long_text_is_bought_when_that_would_have_paid(clock: Clock) -> None:
    """Hopes of 0.7 and 0.5 save 12 ms x (0.1833 / 0.1 - 1) = 10 ms a round: 300 ms take 30."""
    model = Model(clock, [0.7, 0.5], before_ms=300.0)
    combined = CombinedDrafter([Table("first", clock), model])
    rounds(combined, 29, stakes_of())
    assert model.asked == 0
    rounds(combined, 1, stakes_of())
    assert model.asked == 1
    combined.begin([1])
    rounds(combined, 29, stakes_of())
    assert model.asked == 1  # another text, another account


def test_reading_is_bought_at_once_where_texts_usually_pay_for_it(clock: Clock) -> None:
    """10 ms a round: forty rounds of a text before are more than the 300 ms of reading."""
    model = Model(clock, [0.7, 0.5], before_ms=300.0)
    combined = CombinedDrafter([Table("first", clock), model])
    combined.begin([1])
    rounds(combined, 40, stakes_of(), accepted=True)
    assert model.asked == 1
    combined.begin([1])
    rounds(combined, 1, stakes_of(), accepted=True)
    assert model.asked == 2
    model.before_ms = 0.0
    rounds(combined, 30, stakes_of(), accepted=True)
    document = json.loads(json.dumps(combined.state()))
    for kept, asked in ((document, 1), ({"model": {"gain_of_a_text_ms": "much"}}, 0)):
        again = Model(clock, [0.7, 0.5], before_ms=200.0)
        other = CombinedDrafter([Table("first", clock), again])
        other.load_state(kept)
        again.asked = 0
        other.begin([1])
        rounds(other, 1, stakes_of())
        assert again.asked == asked  # (400 + 310) / 2 = 355 ms usually


def test_reading_is_not_bought_again_where_it_brought_nothing(clock: Clock) -> None:
    """Promises of 10 ms a round came to the 300 ms of reading after 30; none of them held."""
    model = Model(clock, [0.7, 0.5], before_ms=300.0)
    combined = CombinedDrafter([Table("first", clock), model])
    for _ in range(5):
        combined.begin([1])
        rounds(combined, 100, stakes_of())
    assert model.asked == 1


def test_what_a_model_saved_is_kept(clock: Clock) -> None:
    """Two right tokens save 18 of the 30 ms that plain steps would take; reading takes 300.

    Nothing is counted for it before it was asked.
    """
    model = Model(clock, [0.7, 0.5], before_ms=300.0)
    combined = CombinedDrafter([Table("first", clock), model])
    combined.begin([1])
    expected = [(29, 29 * 10.0, 0.0), (1, 30.0, 18.0 - 300.0), (1, 30.0, 18.0)]
    for number, (count, _, _) in enumerate(expected):
        model.before_ms = 0.0 if number == 2 else 300.0
        rounds(combined, count, stakes_of(), accepted=True)
        assert merits_of(combined) == pytest.approx(
            [sum(row) for row in zip(*expected[: number + 1], strict=True)]
        )
    fresh = CombinedDrafter([Table("first", clock), Model(clock, [0.7, 0.5])])
    fresh.load_state(json.loads(json.dumps(combined.state())))
    assert merits_of(fresh) == merits_of(combined)


def test_a_try_of_a_model_counts_against_it(clock: Clock) -> None:
    """From a purse of two plain steps: 15 ms of reading and 2 of drafting for nothing."""
    combined = CombinedDrafter([Table("first", clock), Model(clock, [0.01], before_ms=15.0)])
    combined.begin([1])
    rounds(combined, 3, stakes_of())
    assert merits_of(combined) == pytest.approx([3, 3 * PLAIN_MS, -17.0])


def test_a_step_that_was_not_measured_spoils_no_merits(clock: Clock) -> None:
    """A drawn node is kept: its step of two, between 10 and 14 ms, is what a round takes."""
    curve = CostCurve([INF, PLAIN_MS, INF, 14.0])
    combined = CombinedDrafter([Table("first", clock), Model(clock, [0.01])])
    kept = Proposal([1], [-1], [0.5], ["other"], kept=1)
    stakes = Stakes(2, 0.01, curve, depth=0)
    combined.propose(stakes, kept)
    combined.observe(Outcome(DraftTree((2, 1), (-1, 0), ("", "other")), [0], [3], stakes))
    assert merits_of(combined) == [1, 12.0, -2.0]


def merits_of(combined: CombinedDrafter) -> list[float]:
    kept = combined.state()["model"]
    return [kept[name] for name in ("rounds", "usual_ms", "saved_ms")]


def test_a_model_is_not_asked_where_others_have_more_to_offer(clock: Clock) -> None:
    """The table's 0.5, 0.25 and 0.125 cost nothing: 1.875 / 10 beats 2.2 / 12."""
    model = Model(clock, [0.7, 0.5], draft_ms=3.0)
    table = Table("first", clock, [5, 6, 7])
    combined = CombinedDrafter([table, model])
    rounds(combined, 500, stakes_of())
    # Tries: each takes two nodes' time of the first 20 ms and of 0.04 ms a round.
    assert model.asked == pytest.approx((20.0 + 500 * 0.04) / 3.0, abs=1.5)
    assert model.bases[0].tokens == [5, 6, 7]


@pytest.mark.parametrize("hopes", [[0.01], [0.2, 0.04, 0.008], [0.5]])
@pytest.mark.parametrize(("before_ms", "draft_ms"), [(0.0, 9.0), (50.0, 9.0), (700.0, 20.0)])
def test_tries_of_a_model_that_cannot_pay_are_bounded(
    clock: Clock, hopes: list[float], before_ms: float, draft_ms: float
) -> None:
    """One node's time at least; never more than the first steps and 0.4 % of all steps."""
    model = Model(clock, hopes, before_ms=before_ms, draft_ms=draft_ms)
    rounds(CombinedDrafter([Table("first", clock), model]), 10_000, stakes_of())
    price_ms, steps = before_ms + draft_ms, FIRST_STEPS_OF_MODEL + 10_000 * ALLOWANCE
    allowed = steps * PLAIN_MS
    assert model.asked * price_ms <= allowed
    # A purse holds 500 ms at most, so what costs more than that is never tried.
    assert model.asked >= (int(allowed / price_ms) - 1 if price_ms < 500 else 0)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_machine_of_another_speed_asks_as_often(clock: Clock, accepted: bool) -> None:
    """Four times as slow as when it was measured: its models take, and bring, four times as much.

    What they pay and what they are paid are milliseconds of the same moment.
    """
    asked, purses = [], []
    for times in (1.0, 4.0):
        stakes = stakes_of(11.0, 12.0)
        stakes.curve.scale = times
        first = Table("first", clock, propose_ms=0.5 * times)
        model = Model(clock, [0.4], draft_ms=1.8 * times, before_ms=4.0 * times)
        combined = CombinedDrafter([first, model])
        for _ in range(40):
            rounds(combined, 4, stakes)
            rounds(combined, 1, stakes, accepted=accepted)
        asked.append((first.asked, model.asked))
        found = [ms for one in combined._sources for ms in (one.purse_ms, one.saved_ms)]
        purses.append([ms / times for ms in found])
    assert asked[0] == asked[1]
    assert purses[0] == pytest.approx(purses[1])


def test_a_model_without_prospects_is_never_asked(clock: Clock) -> None:
    model = Model(clock, [])
    rounds(CombinedDrafter([Table("first", clock), model]), 100, stakes_of())
    assert model.asked == 0
    assert len(model.text) == 100


def test_a_model_is_not_free_where_it_is_first(clock: Clock) -> None:
    model = Model(clock, [0.01], draft_ms=9.0)
    rounds(CombinedDrafter([model]), 100, stakes_of())
    assert model.asked < 10


def promised(clock: Clock, hopes: list[float]) -> Model:
    model = Model(clock, hopes)
    model.is_promised = True
    return model


def test_a_promise_is_believed_for_longer(clock: Clock) -> None:
    """2 ms a round out of the first 160 ms: some texts are harder than others."""
    model = promised(clock, [0.7, 0.5])
    rounds(CombinedDrafter([Table("first", clock), model]), 75, stakes_of())
    assert model.asked == 75


def test_tries_of_what_promises_nothing_here_are_spread(clock: Clock) -> None:
    """Each takes 2 ms, which is the allowance of 50 rounds; the purse is kept for what promises."""
    model = promised(clock, [0.01])
    rounds(CombinedDrafter([Table("first", clock), model]), 500, stakes_of())
    assert 9 <= model.asked <= 11
    model.hopes = [0.7, 0.5]
    asked = model.asked
    rounds(CombinedDrafter([Table("first", clock), model]), 20, stakes_of())
    assert model.asked - asked == 20


def test_nodes_that_purses_pay_for_are_named(clock: Clock) -> None:
    """The first table's nodes are everybody's loss."""
    tables = [Table("first", clock), Table("second", clock), Model(clock, [0.5])]
    assert CombinedDrafter(tables).paid_for == {"second", "model"}


# ------------------------------------------------------------------------------ together


def test_rounds_that_none_was_asked_for_reach_all(clock: Clock) -> None:
    """Before anything was proposed, as where a grammar forces how an answer begins."""
    first, second = Table("first", clock), Table("second", clock, [5])
    combined = CombinedDrafter([first, second, Model(clock, [0.5])])
    combined.begin([1, 2])
    forced = DraftTree((2, 3, 4), (-1, 0, 1), ("", "grammar", "grammar"))
    combined.observe(Outcome(forced, [0, 1, 2], [3, 4, 6], stakes_of()))
    rounds(combined, 1, stakes_of())
    assert first.text == second.text == [1, 2, 3, 4, 6, 2]
    assert second.asked == 1


def test_a_round_is_settled_at_its_own_stakes(clock: Clock) -> None:
    """Asked at a step of up to 16 nodes; then a round of four with two tokens that are fed again.

    It is that of six tokens, in 12 ms, and not one of 18 that the curve does not have. A node is
    wrong: it adds (12 - 10) / 3 ms.
    """
    first, second = Table("first", clock), Table("second", clock, [5])
    combined = CombinedDrafter([first, second])
    asked = Stakes(16, 0.01, CostCurve([INF, *[PLAIN_MS] * 17]), depth=0, extra=14)
    combined.propose(asked)
    own = Stakes(3, 0.01, CostCurve([INF, PLAIN_MS, 10.0, 10.0, 11.0, 11.0, 12.0]), 0, extra=2)
    tree = DraftTree((1, 7, 8, 5), (-1, 0, 1, 0), ("", "first", "first", "second"))
    left = [FIRST_STEPS * PLAIN_MS]
    while combined.propose(own).sources.count("second"):
        combined.observe(Outcome(tree, [0], [2], own))
        left.append(left[-1] + ALLOWANCE * 12.0 - 2.0 / 3)
    assert left[-1] < 0.0 <= left[-2]


def test_each_is_told_what_those_before_it_propose(clock: Clock) -> None:
    tables = [Table(name, clock, [token]) for name, token in (("a", 5), ("b", 6), ("c", 7))]
    combined = CombinedDrafter(tables)
    combined.begin([1])
    merged = combined.propose(stakes_of())
    assert [list(table.bases[0].tokens) for table in tables] == [[], [5], [5, 6]]
    assert list(merged.tokens) == [5, 6, 7]
    assert list(merged.sources) == ["a", "b", "c"]
    assert list(merged.probabilities) == [0.5, 0.5, 0.0]


def test_name_size_text_and_end(clock: Clock) -> None:
    table, model = Table("table", clock), Model(clock, [0.5])
    combined: Drafter = CombinedDrafter([table, model])
    assert (combined.name, combined.nbytes) == ("table,model", 200)
    combined.begin([4, 5])
    assert table.text == model.text == [4, 5]
    assert isinstance(combined, CombinedDrafter)
    combined.close()
    assert (table.closed, model.closed) == (False, True)


def test_states_are_kept_by_name(clock: Clock) -> None:
    tables = [Table(name, clock) for name in "ab"]
    tables[0].asked, tables[1].asked = 3, 4
    document = json.loads(json.dumps(CombinedDrafter(tables).state()))
    assert document == {"a": {"asked": 3}, "b": {"asked": 4}}
    fresh = [Table(name, clock) for name in "bac"]
    CombinedDrafter(fresh).load_state(document)
    assert [table.asked for table in fresh] == [4, 3, 0]


@pytest.mark.parametrize("document", [None, {}, {"a": 7}, {"a": None}, {"num_cells": 3}])
def test_a_state_that_is_of_no_use_is_ignored(
    clock: Clock, document: dict[str, Any] | None
) -> None:
    table = Table("a", clock)
    CombinedDrafter([table]).load_state(document)
    assert table.asked == 0


def test_lists_of_names() -> None:
    combined = make_drafter("suffix, recycling")
    assert combined is not None
    assert combined.name == "suffix,recycling"
    assert combined.nbytes > SuffixDrafter().nbytes
    assert {"suffix", "recycling"} <= set(NAMES)
    with pytest.raises(UnsupportedError, match="twice"):
        make_drafter("suffix,suffix")
    with pytest.raises(UnsupportedError, match="no drafter ''"):
        make_drafter("suffix,")
