"""When a drafter of tables is not asked, and when it is after all."""

from __future__ import annotations

from combined_cases import Model, Table, rounds, stakes_of
from draft_model_cases import Clock

from edgespec.backends.tree import DraftTree
from edgespec.drafting.drafters.base import Outcome
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter


def test_a_pause_lasts_until_a_purse_is_full_again(clock: Clock) -> None:
    first = Table("first", clock, propose_ms=0.5)
    combined = CombinedDrafter([first])
    assert combined.pause() == 0, "nothing is known of rounds"
    while combined.pause() == 0:
        rounds(combined, 1, stakes_of())
    combined.propose(stakes_of())
    asked, pause = first.asked, combined.pause()
    combined.observe(Outcome(DraftTree.chain((1,)), (0,), (2,), stakes_of()))
    tokens = range(pause - 1)
    together = Outcome(DraftTree.chain(tokens), tokens, tokens, stakes_of(), rounds=len(tokens))
    combined.observe(together)
    combined.propose(stakes_of())
    assert first.asked == asked
    combined.observe(Outcome(DraftTree.chain((1,)), (0,), (2,), stakes_of()))
    combined.propose(stakes_of())
    assert first.asked == asked + 1


def test_a_model_that_promises_nothing_does_not_keep_rounds_from_being_plain(clock: Clock) -> None:
    """A try takes 8 ms, which 0.04 ms a round come to in 200; what is promised is not waited for.

    Of a model that cannot draft nothing is waited for.
    """
    for hopes, before_ms, pause in (([0.01], 6.0, 199), ([0.7, 0.5], 6.0, 0), ([], 0.0, 12_499)):
        model = Model(clock, hopes, before_ms=before_ms)
        combined = CombinedDrafter([model])
        rounds(combined, 1, stakes_of(), accepted=True)
        for _ in range(2):
            combined._sources[0].purse_ms = 0.0
            combined.propose(stakes_of())
        combined._sources[0].purse_ms = 0.0
        assert combined.pause() == pause
    first = Table("first", clock)
    combined = CombinedDrafter([first, Model(clock, [0.01])])
    rounds(combined, 50, stakes_of())
    assert combined.pause() == 0, "another is asked in each round"


def test_rounds_of_a_pause_are_a_models_rounds(clock: Clock) -> None:
    combined = CombinedDrafter([Model(clock, [0.01])])
    rounds(combined, 1, stakes_of())
    tokens = range(40)
    combined.observe(Outcome(DraftTree.chain(tokens), tokens, tokens, stakes_of(), rounds=40))
    kept = combined.state()["model"]
    assert [kept["rounds"], kept["usual_ms"]] == [41.0, 410.0]


def test_a_text_that_ends_as_it_did_before_is_looked_up_whatever_the_purse_holds(
    clock: Clock,
) -> None:
    suffix = SuffixDrafter()
    combined = CombinedDrafter([suffix])
    combined.begin([1, 2, 3, 4, 5, 9])
    rounds(combined, 1, stakes_of())
    combined._sources[0].purse_ms = -1.0
    assert not len(combined.propose(stakes_of()))
    assert not combined.is_wanted([1, 2, 3])
    assert combined.is_wanted([1, 2, 3, 4])
    combined.observe(Outcome(DraftTree.chain((2,)), (0,), (1, 2, 3, 4), stakes_of()))
    combined._sources[0].purse_ms = -1.0
    assert combined.propose(stakes_of()).tokens[0] == 5
