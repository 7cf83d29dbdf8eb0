"""Several drafters as one, on a clock that only moves when a drafter says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from combined_cases import PLAIN_MS, Model, Table, context_of, rounds
from draft_model_cases import Clock, quick
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.base import DraftTree
from edgespec.drafting import NAMES, combined, make_drafter
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.constants import ALLOWANCE, ASKING_TIMES, FIRST_BALANCE, HIGHEST_BALANCE
from edgespec.drafting.proposal import EMPTY, Drafter, Proposal, StepContext, VerifyResult
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.memory.plan.options import DRAFTERS

# ------------------------------------------------------------------------------ what is lost


@quick
@given(
    steps=st.lists(st.floats(0.0, 3.0), min_size=4, max_size=4),
    draft_steps=st.floats(0.0, 1.0),
    read_steps=st.floats(0.0, 3.0),
    chances=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    hits=st.lists(st.booleans(), min_size=1, max_size=7),
    is_model=st.booleans(),
)
def test_no_drafter_loses_more_than_its_ledger(
    steps: list[float],
    draft_steps: float,
    read_steps: float,
    chances: list[float],
    hits: list[bool],
    is_model: bool,
) -> None:
    """Whatever step times, chances and luck: at most the first balance and 0.4% of all rounds.

    A table says what asking takes only by having been asked, so its first lookup comes on top.
    """
    clock = Clock()
    more = [sum(steps[: n + 1]) for n in range(4)]
    context = context_of(*(PLAIN_MS * (1.0 + one) for one in more))
    drafter: Table
    if is_model:
        ms = (read_steps * PLAIN_MS, draft_steps * PLAIN_MS)
        drafter = Model(clock, sorted(chances, reverse=True), read_ms=ms[0], draft_ms=ms[1])
    else:
        drafter = Table("first", clock, [7] * len(chances), propose_ms=draft_steps * PLAIN_MS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combined, "perf_counter", clock)
        patch.setattr(combined, "thread_time", clock)
        found = CombinedDrafter([drafter])
        lost, first = 0.0, 0.0
        for number in range(100):
            asked, spent_ms = drafter.asked, drafter.spent_ms
            accepted = hits[number % len(hits)]
            size = len(rounds(found, 1, context, accepted=accepted))
            times = 1.0 if is_model else ASKING_TIMES
            lost += times * (drafter.spent_ms - spent_ms) / PLAIN_MS
            lost += more[size - 1] if size else 0.0
            lost -= size * accepted
            if drafter.asked and not asked and not is_model:
                first = ASKING_TIMES * draft_steps
            reading = read_steps if is_model else 0.0
            bound = FIRST_BALANCE + reading + ALLOWANCE * (number + 1) + first
            assert lost <= bound + 1e-6


def test_a_drafter_that_pays_stands_at_its_cap_and_is_asked_in_every_round(clock: Clock) -> None:
    """Two tokens a round bring 2 steps and take 0.9 + 0.4."""
    first, second = Table("first", clock), Table("second", clock, [5, 6], propose_ms=9.0)
    second.learn_ms = 2.0
    found = CombinedDrafter([first, second])
    rounds(found, 2000, context_of(12.0, 14.0), accepted=True)
    assert (second.asked, second.learned) == (2000, 2000)
    assert found.ledger("second").is_full
    assert found.ledger("second").balance == HIGHEST_BALANCE


@pytest.mark.parametrize("learn_ms", [0.0, 0.7])
@pytest.mark.parametrize("propose_ms", [0.02, 0.5, 3.0, 300.0])
def test_a_table_that_never_pays_costs_its_allowance(
    clock: Clock, propose_ms: float, learn_ms: float
) -> None:
    first, second = Table("first", clock), Table("second", clock, propose_ms=propose_ms)
    second.learn_ms = learn_ms
    rounds(CombinedDrafter([first, second]), 10_000, context_of())
    allowed = (FIRST_BALANCE + 10_000 * ALLOWANCE) * PLAIN_MS
    assert second.spent_ms <= allowed + propose_ms + learn_ms
    assert len(second.text) == first.asked == 10_000  # it keeps the text whether asked or not


def test_a_first_table_of_no_use_is_soon_asked_again(clock: Clock) -> None:
    """Asking takes 0.03 steps, eight rounds' allowance; where it is right it is asked at once."""
    first = Table("first", clock, [7], propose_ms=0.1)
    found = CombinedDrafter([first])
    rounds(found, 1000, context_of())
    assert first.learned < 400 and len(first.text) == 1000, "it follows the text"
    asked = first.asked
    rounds(found, 80, context_of())
    assert 8 <= first.asked - asked <= 12
    asked = first.asked
    rounds(found, 50, context_of(), accepted=True)
    assert first.asked - asked >= 40


def test_wrong_nodes_are_lost_too(clock: Clock) -> None:
    """Two nodes a round that add 0.2 steps each: of 2 steps all but what keeps it waiting."""
    first, second = Table("first", clock), Table("second", clock, [5, 6])
    rounds(CombinedDrafter([first, second]), 40, context_of(12.0, 14.0))
    assert second.asked == 4


def test_what_a_drafter_may_lose_limits_what_it_drafts(clock: Clock) -> None:
    """With 2 steps it may propose as many nodes as add 2 steps, and more when it has earned it."""
    table = Table("first", clock, range(5, 13))
    found = CombinedDrafter([table])
    steep = context_of(*(PLAIN_MS * (1 + 0.9 * n) for n in range(1, 9)))
    assert len(rounds(found, 1, steep, accepted=True)) == 2
    for _ in range(400):
        proposal = rounds(found, 1, steep, accepted=True)
    assert len(proposal) == 8


def test_trees_of_two_are_cut_to_what_each_can_lose(clock: Clock) -> None:
    """A step of one or two drafts is cheap and of more is not: each alone could pay for its own."""
    tables = [Table("a", clock, [5, 6]), Table("b", clock, [7, 8])]
    found = CombinedDrafter(tables)
    context = context_of(10.5, 11.0, 90.0, 120.0)
    merged = found.propose(context)
    assert len(merged) == 2


def test_drawn_nodes_stay_whatever_the_balances_hold(clock: Clock) -> None:
    """Dropping one after its token was seen would bias the output."""
    first, second = Table("a", clock, [5]), Table("b", clock, [6])
    found, context = CombinedDrafter([first, second]), context_of(11.0, 90.0, 95.0)
    kept = Proposal([1, 2], [-1, -1], [0.5, 0.4], ["other"] * 2, [None, None], kept=2)
    merged = found.propose(context, kept)
    assert merged.kept == 2 and list(merged.tokens[:2]) == [1, 2]


def test_a_slower_device_is_the_same_in_plain_steps(clock: Clock) -> None:
    """Four times as slow as when it was measured: its models take, and bring, four times as much.

    What is paid and what is earned are plain steps of the same moment.
    """
    asked, balances = [], []
    for times in (1.0, 4.0):
        context = context_of(11.0, 12.0)
        context.curve.scale = times
        first = Table("first", clock, propose_ms=0.5 * times)
        model = Model(clock, [0.4], draft_ms=1.8 * times, read_ms=4.0 * times)
        found = CombinedDrafter([first, model])
        for _ in range(40):
            rounds(found, 4, context)
            rounds(found, 1, context, accepted=True)
        asked.append((first.asked, model.asked))
        balances.append([found.ledger(name).balance for name in ("first", "model")])
    assert asked[0] == asked[1]
    assert balances[0] == pytest.approx(balances[1])


def test_an_ngram_hit_is_drafted_whatever_steps_are_thought_to_take(clock: Clock) -> None:
    """Measured beside other programs: with no draft nothing would show what they really take."""
    found, steep = CombinedDrafter([SuffixDrafter()]), context_of(*(40.0 + n for n in range(8)))
    found.begin([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    assert found.propose(steep).tokens == [5, 6, 7, 8, 9, 1, 2, 3]
    found.begin([1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4])
    assert not len(found.propose(steep)), "two tokens are no hit"


def test_two_that_are_asked_are_not_cut_where_a_hit_was_found(clock: Clock) -> None:
    suffix, other = SuffixDrafter(), Table("b", clock, [7])
    found, steep = CombinedDrafter([suffix, other]), context_of(11.0, *(40.0 + n for n in range(7)))
    found.begin([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
    assert set(found.propose(steep).tokens) >= {5, 6, 1, 2, 3, 4}


# ------------------------------------------------------------------------------ pauses


@pytest.mark.parametrize("place", ["lookup", "lesson", "draft"])
def test_one_outlier_switches_no_drafter_off(clock: Clock, place: str) -> None:
    """Whatever the machine did in it: 50 rounds accepted, one of 100 times its usual time."""
    one: Table = Table("one", clock, [7], propose_ms=0.5)
    one.learn_ms = 0.2
    if place == "draft":
        one = Model(clock, [0.7], draft_ms=3.0)
    found = CombinedDrafter([one] if place == "lookup" else [Table("first", clock), one])
    ledger, context = found.ledger(one.name), context_of()
    rounds(found, 50, context, accepted=True)
    usual, saved = (one.propose_ms, one.learn_ms), ledger.saved_steps
    one.propose_ms *= 100.0 if place != "lesson" else 1.0
    one.learn_ms *= 100.0 if place == "lesson" else 1.0
    rounds(found, 1, context)
    one.propose_ms, one.learn_ms = usual
    assert ledger.balance > 0.75 * ledger.most
    assert ledger.saved_steps > 0.9 * saved
    asked = one.asked
    rounds(found, 20, context, accepted=True)
    assert one.asked - asked == 20


def test_an_engine_that_becomes_dear_for_good_pays_for_it(clock: Clock) -> None:
    """A tenth of a step is expected: the second time in a row it is charged what it takes."""
    model = Model(clock, [0.7], draft_ms=1.0)
    found = CombinedDrafter([Table("first", clock), model])
    rounds(found, 50, context_of(), accepted=True)
    model.propose_ms = 100.0
    rounds(found, 1000, context_of())
    assert model.asked - 50 <= 3


def test_an_unlucky_first_lookup_leaves_enough_to_ask_again(clock: Clock) -> None:
    """100 steps at once; then what the text says again is asked for, and shows what is usual."""

    class Unlucky(SuffixDrafter):
        ms = 1000.0

        def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
            clock.ms += self.ms
            return super().propose(context, base)

    suffix = Unlucky()
    found = CombinedDrafter([suffix])
    found.begin([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    for ms in (1000.0, 0.05, 0.05):
        suffix.ms = ms
        assert len(found.propose(context_of()))


def test_a_lookup_that_seemed_too_dear_is_tried_again_with_a_full_balance(clock: Clock) -> None:
    table = Table("first", clock, propose_ms=1000.0)
    found = CombinedDrafter([table])
    rounds(found, 1, context_of())
    table.propose_ms = 0.05
    assert found.cooldown() <= HIGHEST_BALANCE / ALLOWANCE
    rounds(found, 3000, context_of())
    assert table.asked > 100


# ------------------------------------------------------------------------------ models


def test_a_model_is_asked_where_it_raises_the_rate(clock: Clock) -> None:
    """Plain: 0.1 tokens/ms. Chances of 0.7 and 0.5 for 2 ms: 2.2 / 12 = 0.18."""
    model = Model(clock, [0.7, 0.5])
    rounds(CombinedDrafter([Table("first", clock), model]), 500, context_of(), accepted=True)
    assert model.asked == 500


def test_expectations_that_never_hold_are_not_believed_for_long(clock: Clock) -> None:
    """0.2 steps a round out of the first 2, and out of 0.004 a round."""
    model = Model(clock, [0.7, 0.5], draft_ms=2.0)
    context = context_of()
    found = CombinedDrafter([Table("first", clock), model])
    rounds(found, 10_000, context)
    lost = FIRST_BALANCE + model.read_ms / PLAIN_MS + 10_000 * ALLOWANCE
    assert model.asked <= lost * PLAIN_MS / 2.0
    assert model.asked >= 0.8 * lost * PLAIN_MS / 2.0


def test_a_model_is_not_asked_where_others_have_more_to_offer(clock: Clock) -> None:
    """The table's 0.5, 0.25 and 0.125 cost nothing: 1.875 / 10 beats 2.2 / 13."""
    model = Model(clock, [0.7, 0.5], draft_ms=3.0)
    found = CombinedDrafter([Table("first", clock, [5, 6, 7]), model])
    rounds(found, 500, context_of())
    assert model.asked == 0


def test_a_model_reads_no_text_while_others_are_answered(clock: Clock) -> None:
    """It drafts as before once its text is alone; one that has not to read drafts beside others."""
    model, window = Model(clock, [0.7, 0.5]), Model(clock, [0.7, 0.5])
    window.has_to_read = False
    found = [CombinedDrafter([Table("first", clock), one]) for one in (model, window)]
    shared = replace(context_of(), extra=1, others=1, max_nodes=13)
    for one in found:
        rounds(one, 20, shared, accepted=True)
    assert (model.asked, window.asked) == (0, 20)
    assert "others are answered in the same steps (20 rounds)" in found[0].reasons()
    rounds(found[0], 20, context_of(), accepted=True)
    assert model.asked == 20


def test_a_model_of_no_promise_is_tried_when_its_ledger_is_full(clock: Clock) -> None:
    """Each try takes 0.9 steps, which is the allowance of 225 rounds; it is never given up."""
    model = Model(clock, [0.01], draft_ms=9.0)
    found = CombinedDrafter([model])
    rounds(found, 2_600, context_of())
    assert 0 < found.ledger("model").rounds_until(HIGHEST_BALANCE) or model.asked > 0
    asked = model.asked
    rounds(found, 2_250, context_of())
    assert model.asked - asked in (9, 10, 11)


def test_reading_a_usual_prompt_is_paid_from_the_beginning(clock: Clock) -> None:
    """Once: 30 steps of reading that bring nothing are not spent again in the next text."""
    model = Model(clock, [0.7, 0.5], read_ms=300.0)
    found = CombinedDrafter([Table("first", clock), model])
    for _ in range(5):
        found.begin([1])
        rounds(found, 100, context_of())
    assert model.asked == 1


def test_reading_that_pays_is_bought_again(clock: Clock) -> None:
    """30 steps of reading, and 1.8 steps saved in each round behind it."""
    model = Model(clock, [0.7, 0.5], read_ms=300.0)
    found = CombinedDrafter([Table("first", clock), model])
    for number in range(5):
        found.begin([1])
        model.read_ms = model.propose_ms = 300.0
        rounds(found, 1, context_of(), accepted=True)
        assert model.asked == 41 * number + 1
        model.read_ms, model.propose_ms = 0.0, 2.0
        rounds(found, 40, context_of(), accepted=True)
        assert model.reads_prompts, "it has earned what reading takes"


def test_what_is_read_has_to_be_saved_by_the_tokens_that_may_come(clock: Clock) -> None:
    """2.2 tokens in 12 ms save 4.5 ms a token: 6 steps of reading pay from 14 tokens on."""
    model = Model(clock, [0.7, 0.5], read_ms=60.0)
    found = CombinedDrafter([Table("first", clock), model])
    for remaining, asked in ((13, 0), (14, 1)):
        found.begin([1])
        found.propose(replace(context_of(), remaining=remaining))
        assert model.asked == asked


def test_a_model_that_cannot_draft_is_never_asked_or_waited_for(clock: Clock) -> None:
    model = Model(clock, [])
    found = CombinedDrafter([model])
    rounds(found, 100, context_of())
    assert model.asked == 0
    assert len(model.text) == 100
    assert found.cooldown() > 10_000
    assert found.ledger("model").rounds == found.ledger("model").usual_steps == 0


# ------------------------------------------------------------------------------ cooldown


def test_a_cooldown_lasts_until_a_balance_covers_its_price_again(clock: Clock) -> None:
    first = Table("first", clock, propose_ms=0.5)
    found = CombinedDrafter([first])
    while found.cooldown() == 0:
        rounds(found, 1, context_of())
    found.propose(context_of())
    asked, cooldown = first.asked, found.cooldown()
    found.observe(VerifyResult(DraftTree.chain((1,)), (0,), (2,), context_of()))
    tokens = range(cooldown - 1)
    together = VerifyResult(
        DraftTree.chain(tokens), tokens, tokens, context_of(), rounds=len(tokens)
    )
    found.observe(together)
    found.propose(context_of())
    assert first.asked == asked
    found.observe(VerifyResult(DraftTree.chain((1,)), (0,), (2,), context_of()))
    found.propose(context_of())
    assert first.asked == asked + 1


def test_a_part_of_the_balance_is_kept_for_ngram_hits(clock: Clock) -> None:
    suffix = SuffixDrafter()
    found = CombinedDrafter([suffix])
    found.begin([1, 2, 3, 4, 5, 9])
    rounds(found, 1, context_of())
    found.ledger("suffix").balance = 0.3
    assert not len(found.propose(context_of()))
    assert not found.has_hit([1, 2, 3])
    assert found.has_hit([1, 2, 3, 4])
    found.observe(VerifyResult(DraftTree.chain((2,)), (0,), (1, 2, 3, 4), context_of()))
    found.ledger("suffix").balance = 0.3
    assert found.propose(context_of()).tokens[0] == 5
    found.ledger("suffix").balance = -0.1
    assert not len(found.propose(context_of())), "hits are no way around the ledger"
    assert not found.has_hit([])


# ------------------------------------------------------------------------------ savings


def test_what_a_model_saved_is_a_sum_over_its_ledger(clock: Clock) -> None:
    """Two right tokens for 0.2 steps save 1.8 of 3; wrong ones lose 0.2 of 1."""
    model = Model(clock, [0.7, 0.5])
    found = CombinedDrafter([Table("first", clock), model])
    found.begin([1])
    rounds(found, 20, context_of(), accepted=True)
    rounds(found, 10, context_of())
    kept = json.loads(json.dumps(found.state()))
    names = ("rounds", "usual_steps", "saved_steps")
    assert [kept["model"][name] for name in names] == pytest.approx([30, 70, 20 * 1.8 - 10 * 0.2])
    assert not set(names) & set(kept["first"]), "tables keep counts alone"
    fresh = CombinedDrafter([Table("first", clock), Model(clock, [0.7, 0.5])])
    fresh.load_state(kept)
    assert fresh.ledger("model").savings() == found.ledger("model").savings()


def test_savings_of_all_drafters_say_whether_snapshots_pay(clock: Clock) -> None:
    found = CombinedDrafter([Table("first", clock), Model(clock, [0.7, 0.5])])
    rounds(found, 50, context_of(), accepted=True)
    assert found.saved_part is None, "150 tokens say too little"
    rounds(found, 100, context_of(), accepted=True)
    assert found.saved_part == pytest.approx(0.6)


def test_rounds_of_a_cooldown_are_rounds_of_a_model(clock: Clock) -> None:
    found = CombinedDrafter([Model(clock, [0.01])])
    rounds(found, 1, context_of())
    tokens = range(40)
    found.observe(VerifyResult(DraftTree.chain(tokens), tokens, tokens, context_of(), rounds=40))
    kept = found.state()["model"]
    assert [kept["rounds"], kept["usual_steps"]] == [41.0, 41.0]


# ------------------------------------------------------------------------------ for people


def test_reasons_say_what_became_of_each_drafter(clock: Clock) -> None:
    found = CombinedDrafter([Table("t", clock, [5]), Model(clock, [0.01])])
    rounds(found, 2, context_of(), accepted=True)
    assert found.reasons() == (
        "t: verified (2 rounds); model: a try was not expected to pay (2 rounds)"
    )


# ------------------------------------------------------------------------------ together


def test_rounds_that_none_was_asked_for_reach_all(clock: Clock) -> None:
    """Before anything was proposed, as where a grammar forces how an answer begins."""
    first, second = Table("first", clock), Table("second", clock, [5])
    combined = CombinedDrafter([first, second, Model(clock, [0.5])])
    combined.begin([1, 2])
    forced = DraftTree((2, 3, 4), (-1, 0, 1), ("", "grammar", "grammar"))
    combined.observe(VerifyResult(forced, [0, 1, 2], [3, 4, 6], context_of()))
    rounds(combined, 1, context_of())
    assert first.text == second.text == [1, 2, 3, 4, 6, 2]
    assert second.asked == 1


def test_each_is_told_what_those_before_it_propose(clock: Clock) -> None:
    tables = [Table(name, clock, [token]) for name, token in (("a", 5), ("b", 6), ("c", 7))]
    combined = CombinedDrafter(tables)
    combined.begin([1])
    merged = combined.propose(context_of())
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
    assert NAMES == DRAFTERS, "the command line has a list of its own, that costs no time"
    with pytest.raises(UnsupportedError, match="twice"):
        make_drafter("suffix,suffix")
    with pytest.raises(UnsupportedError, match="no drafter ''"):
        make_drafter("suffix,")
