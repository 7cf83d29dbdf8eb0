"""The suffix drafter: hand-worked proposals, and all others against a slow, obvious drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_suffix import LEAST, Path, SlowDrafter

from edgespec.backends.tree import DraftTree
from edgespec.drafting.drafters import NAMES, make_drafter, suffix, tables_bytes
from edgespec.drafting.drafters.base import Outcome
from edgespec.drafting.drafters.recycling import RecyclingDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.drafting.proposal import Proposal, Stakes
from edgespec.errors import UnsupportedError
from edgespec.memory.times.curve import CostCurve

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)
STAKES = Stakes(31, LEAST, CostCurve([float("inf"), 1.0]), depth=0)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand-worked probabilities begin without counts of other models."""
    monkeypatch.setattr(suffix, "known_counts", lambda *_: {})


def paths_of(proposal: Proposal) -> list[Path]:
    """The tokens from below the root to each node."""
    paths: list[Path] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def propose(drafter: SuffixDrafter, max_nodes: int, least: float) -> Proposal:
    return drafter.propose(replace(STAKES, max_nodes=max_nodes, min_probability=least))


def observe(drafter: SuffixDrafter, emitted: Sequence[int]) -> None:
    """A round in which all of it was drafted."""
    tree = DraftTree.chain((0, *emitted[:-1]))
    drafter.observe(Outcome(tree, range(len(emitted)), emitted, STAKES))


def drafter_of(text: Sequence[int], **options: int) -> SuffixDrafter:
    drafter = SuffixDrafter(**options)
    drafter.begin(text)
    return drafter


def markov_text(seed: int, length: int, vocab_size: int, sharpness: int) -> list[int]:
    """A text in which each pair of tokens has a favourite successor, taken most of the time."""
    rng = random.Random(seed)
    favourites: dict[tuple[int, int], int] = {}
    text = [0, 1]
    for _ in range(length):
        pair = (text[-2], text[-1])
        favourite = favourites.setdefault(pair, rng.randrange(vocab_size))
        text.append(favourite if rng.randrange(sharpness) else rng.randrange(vocab_size))
    return text


PROSE = (
    b"the cat sat on the mat. the cat saw the rat on the mat. a rat that the cat saw sat on the "
    b"cat. then the mat sat on the rat, and the cat sat on the mat, and that was that."
)
TEXTS = {
    "nothing repeats": list(range(40)),
    "one token for ever": [7] * 60,
    "a loop of three": [1, 2, 3] * 25,
    "a loop that slips": [1, 2, 3, 4] * 8 + [1, 2, 4, 3] + [1, 2, 3, 4] * 8,
    "a long loop": [*range(50)] * 4,
    "prose": list(PROSE),
    "sharp": markov_text(1, 200, 6, 12),
    "blunt": markov_text(2, 200, 6, 2),
    "two tokens": markov_text(3, 150, 2, 3),
    "large ids": [token * 15_001 for token in markov_text(4, 150, 10, 6)],
}


@pytest.mark.parametrize("max_children", [1, 2, 3])
@pytest.mark.parametrize(
    "name",
    list(TEXTS),
)
def test_proposals_and_counts_are_those_of_the_slow_drafter(name: str, max_children: int) -> None:
    """At every position: the same nodes with the same probabilities, learning as they go.

    Chains are compared node by node. Branches of equal probability may come in any order, so
    trees are compared as the best probabilities, each belonging to the right path.
    """
    text, older, rng = TEXTS[name], TEXTS["prose"][:60], random.Random(0)
    fast, slow = SuffixDrafter(max_children=max_children), SlowDrafter(max_children)
    for tokens in (older, text[:5]):
        fast.begin(tokens)
        slow.begin(tokens)
    at = 5
    while at < len(text):
        max_nodes = rng.choice((1, 4, 12))
        proposal = propose(fast, max_nodes, LEAST)
        expected = slow.candidates(max_nodes)
        paths = paths_of(proposal)
        assert len(set(paths)) == len(paths) == min(max_nodes, len(expected))
        assert [expected[path] for path in paths] == pytest.approx(list(proposal.probabilities))
        best = sorted(expected.values(), reverse=True)[: len(paths)]
        assert list(proposal.probabilities) == pytest.approx(best)
        if max_children == 1:
            assert paths == sorted(expected, key=len)[: len(paths)]
        emitted = text[at : at + rng.choice((1, 1, 3))]
        observe(fast, emitted)
        slow.observe(emitted, paths)
        at += len(emitted)
    assert fast.state() == slow.calibration.as_json()


# ------------------------------------------------------------------------------ by hand


def test_a_match_reads_on_into_its_own_draft() -> None:
    """1 2 3 1 2: after "1 2" came 3, then 1 2, then the draft itself: the loop goes on.

    Lengths 2, 3, 4, 5, 6, 7 have the priors 0.375, 0.45, 0.525, 0.6, 0.6, 0.675; with the next
    one the path would fall below 0.02.
    """
    proposal = propose(drafter_of([1, 2, 3, 1, 2]), 31, LEAST)
    assert list(proposal.tokens) == [3, 1, 2, 3, 1, 2]
    assert list(proposal.parents) == [-1, 0, 1, 2, 3, 4]
    steps = [after / before for before, after in pairwise((1.0, *proposal.probabilities))]
    assert steps == pytest.approx([0.375, 0.45, 0.525, 0.6, 0.6, 0.675])


def test_at_most_as_many_nodes_as_asked_for() -> None:
    drafter = drafter_of([1, 2, 3, 1, 2])
    assert [len(propose(drafter, n, LEAST)) for n in (0, 1, 2, 4)] == [0, 1, 2, 4]


def test_nodes_that_cannot_pay_are_left_out_but_the_first_guess_is_always_made() -> None:
    """Of 0.375, 0.169, 0.089, 0.053, 0.032, 0.022: a first guess that is never made is never
    counted, and its probability would never be known."""
    drafter = drafter_of([1, 2, 3, 1, 2])
    sizes = [len(propose(drafter, 31, least)) for least in (0.025, 0.05, 0.1, 0.2, 0.9)]
    assert sizes == [5, 4, 2, 1, 1]


@pytest.mark.parametrize("text", [[5], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_repeats(text: list[int]) -> None:
    assert len(propose(drafter_of(text), 31, LEAST)) == 0


def test_the_longer_match_wins() -> None:
    """Three places follow 9 with 5; one follows 8 9 with 6: weight 4 against 3."""
    text = [1, 9, 5, 2, 9, 5, 3, 9, 5, 8, 9, 6, 8, 9]
    assert propose(drafter_of(text), 1, LEAST).tokens == [6]


def test_branches_are_the_votes_in_order() -> None:
    """After 9: weights 4 for 6 (one match of two tokens), 3 for 5 (three of one), 1 for 4."""
    text = [1, 9, 5, 2, 9, 5, 3, 9, 5, 0, 9, 4, 8, 9, 6, 8, 9]
    proposal = propose(drafter_of(text, max_children=2), 31, LEAST)
    assert {path[0] for path in paths_of(proposal)} == {5, 6}
    proposal = propose(drafter_of(text, max_children=3), 31, LEAST)
    assert {path[0] for path in paths_of(proposal)} == {4, 5, 6}


def test_an_older_text_is_a_weaker_source() -> None:
    """Ten places of an older text weigh half as much as one of this text."""
    drafter = drafter_of([1, 5] * 10)
    drafter.begin([2, 1, 6, 3, 1])
    assert propose(drafter, 1, LEAST).tokens == [6]


def test_the_older_text_speaks_where_this_one_is_silent() -> None:
    """Its probability is 0.7 of what a place in this text has (length 1: 0.3)."""
    drafter = drafter_of([1, 5, 9])
    drafter.begin([2, 1])
    proposal = propose(drafter, 1, LEAST)
    assert list(proposal.tokens) == [5]
    assert list(proposal.probabilities) == pytest.approx([0.21])
    same_text = propose(drafter_of([1, 5, 9, 2, 1]), 1, LEAST)
    assert list(same_text.probabilities) == pytest.approx([0.3])


def test_nodes_that_were_not_verified_are_counted_too() -> None:
    """Nothing says how much of a proposal the target saw: 3 1 are right here, and 2 is wrong.

    Below the wrong node nothing is known, so the three others are not counted.
    """
    drafter = drafter_of([1, 2, 3, 1, 2])
    assert len(propose(drafter, 31, LEAST)) == 6
    observe(drafter, [3, 1, 4, 4, 4])
    assert sorted(drafter.state()["cells"].values()) == [[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]


def test_only_what_was_emitted_is_judged() -> None:
    drafter = drafter_of([1, 2, 3, 1, 2])
    propose(drafter, 31, LEAST)
    observe(drafter, [3])
    assert list(drafter.state()["cells"].values()) == [[1.0, 1.0]]


def test_a_proposal_is_counted_once_and_not_after_a_new_text() -> None:
    drafter = drafter_of([1, 2, 3, 1, 2])
    propose(drafter, 31, LEAST)
    drafter.begin([1, 2, 3, 1, 2])
    observe(drafter, [3])
    assert drafter.state()["cells"] == {}
    propose(drafter, 31, LEAST)
    observe(drafter, [1])
    observe(drafter, [2])
    assert [counts[1] for counts in drafter.state()["cells"].values()] == [1.0]


def test_counts_of_an_earlier_run_move_the_probabilities() -> None:
    """Six right guesses of one cell: (6 + 6 * 6.375 / 7) / 12 with the prior 0.375."""
    drafter = SuffixDrafter()
    for _ in range(6):
        drafter = restarted(drafter, [1, 2, 3, 1, 2])
        propose(drafter, 1, LEAST)
        observe(drafter, [3])
    proposal = propose(restarted(drafter, [1, 2, 3, 1, 2]), 1, LEAST)
    assert list(proposal.probabilities) == [pytest.approx((6 + 6 * 6.375 / 7) / 12)]


def restarted(drafter: SuffixDrafter, text: Sequence[int]) -> SuffixDrafter:
    """A drafter of a new process, with the old one's counts only."""
    fresh = SuffixDrafter()
    fresh.load_state(drafter.state())
    fresh.begin(text)
    return fresh


# ------------------------------------------------------------------------------ any text


@quick
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_a_proposal_keeps_its_contract(
    older: list[int], text: list[int], max_children: int, max_nodes: int
) -> None:
    """Parents come first and are likelier; the order is by probability; siblings differ."""
    drafter = SuffixDrafter(max_children=max_children)
    drafter.begin(older)
    for start in range(0, len(text), 2):
        propose(drafter, max_nodes, LEAST)
        observe(drafter, text[start : start + 2])
    proposal = propose(drafter, max_nodes, LEAST)
    assert len(proposal) <= max_nodes
    probabilities = list(proposal.probabilities)
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(0.0 < probability <= 1.0 for probability in probabilities)
    for node, parent in enumerate(proposal.parents):
        assert -1 <= parent < node
        assert parent == -1 or LEAST <= probabilities[node] <= probabilities[parent]
    paths = paths_of(proposal)
    assert len(set(paths)) == len(paths)
    children = [list(proposal.parents).count(node) for node in range(-1, len(proposal))]
    assert max(children) <= max_children


# ------------------------------------------------------------------------------ capacity


@quick
@given(st.lists(st.integers(0, 60), max_size=12), st.integers(8, 40))
def test_history_never_exceeds_the_capacity(sizes: list[int], capacity: int) -> None:
    """It is always the latest part of the text, and at least half the capacity of it."""
    drafter = SuffixDrafter(capacity=capacity)
    text: list[int] = []
    for size in sizes:
        tokens = [(len(text) + i) % 1000 for i in range(size)]
        drafter.extend(tokens)
        text += tokens
        kept = list(drafter._tokens)
        assert len(kept) <= capacity
        assert kept == text[len(text) - len(kept) :]
        assert len(kept) >= min(len(text), capacity // 2)


def test_the_older_half_is_dropped_and_the_newer_one_still_speaks() -> None:
    """Of 64 tokens the first 32 go when one more comes; places in the others still match."""
    drafter = SuffixDrafter(capacity=64)
    drafter.begin(range(100, 164))
    drafter.extend([131])  # the last one of the older half
    assert len(propose(drafter, 4, LEAST)) == 0
    drafter.extend([132])  # the first one of the newer half
    assert list(propose(drafter, 4, LEAST).tokens)[:1] == [133]


def test_after_dropping_it_is_like_a_drafter_that_never_saw_more() -> None:
    text = markov_text(5, 300, 6, 8)
    full, fresh = SuffixDrafter(capacity=128), SuffixDrafter(capacity=1024)
    full.begin(text[:100])
    for token in text[100:]:
        full.extend([token])
    fresh.begin(list(full._tokens))
    assert len(full._tokens) < 128
    assert propose(full, 8, LEAST) == propose(fresh, 8, LEAST)
    assert len(propose(full, 8, LEAST)) > 0


def test_dropping_keeps_older_and_this_text_apart() -> None:
    """The border moves with the text: three older "7 5" stay weaker than one "7 6" of this text."""
    drafter = SuffixDrafter(capacity=64)
    drafter.begin([*range(100, 134), 7, 5, 7, 5, 7, 5])
    drafter.begin([2, 7, 6, 3, *range(200, 217)])
    drafter.extend([4, 3, 8, 9])  # 65 tokens: only the last 32 and these are kept
    assert len(drafter._tokens) == 36
    drafter.extend([7])
    assert propose(drafter, 1, LEAST).tokens == [6]


def test_the_tables_stay_below_their_ceiling() -> None:
    """16 bytes a token and three tables of 65,536 heads of 4 bytes, counted by Python itself.

    The 3 KiB are for the headers of the arrays.
    """
    capacity = 20_000
    drafter = SuffixDrafter(capacity=capacity)
    assert drafter.nbytes == 18 * capacity + 2 * 3 * 4 * 65_536
    for start in range(0, 50_000, 1000):
        drafter.extend(range(start, start + 1000))
        arrays = [drafter._tokens, *drafter._heads, *drafter._links]
        assert sum(array.__sizeof__() for array in arrays) <= drafter.nbytes + 3072


# ------------------------------------------------------------------------------ the table


def test_drafters_are_made_by_name() -> None:
    assert make_drafter("none") is None
    model = RecyclingDrafter()  # stands for a draft model
    made = [make_drafter(name, model) for name in NAMES if name != "recycling"]
    assert [drafter.name for drafter in made if drafter is not None] == [
        "suffix",
        "recycling",
        "recycling",
    ]
    combined = make_drafter("recycling, suffix")
    assert combined is not None and combined.name == "recycling,suffix"
    assert combined.nbytes == tables_bytes("suffix,recycling")
    with pytest.raises(UnsupportedError, match="no drafter 'lookahead'") as caught:
        make_drafter("suffix,lookahead")
    assert all(name in caught.value.hint for name in ("auto", "none", *NAMES))
    with pytest.raises(UnsupportedError, match="there twice"):
        make_drafter("suffix,suffix")
    with pytest.raises(UnsupportedError, match="needs a draft model"):
        make_drafter("suffix,model")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 8), st.data())
def test_a_text_that_goes_on_is_not_read_twice(text: list[int], extra: int, data: Any) -> None:
    """What follows the common part, an end token say, is taken back as if it had never been."""
    wrong = data.draw(st.lists(st.just(9), min_size=extra, max_size=extra))
    more = data.draw(st.lists(st.integers(0, 5), max_size=20))
    old, new = SuffixDrafter(), SuffixDrafter()
    old.begin([*text, *wrong])
    old.begin([*text, *more])
    new.begin([*text, *more])
    assert (old._tokens, old._links, old._heads) == (new._tokens, new._links, new._heads)
    assert propose(old, 8, 0.0) == propose(new, 8, 0.0)


@quick
@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=6))
def test_an_ending_is_familiar_where_its_four_tokens_stood_before(
    text: list[int], more: list[int]
) -> None:
    drafter = SuffixDrafter()
    drafter.begin(text)
    whole = [*text, *more]
    known = text if more else text[:-1]
    places = [tuple(known[i : i + 4]) for i in range(len(known) - 3)]
    assert drafter.is_familiar(more) == (len(whole) >= 4 and tuple(whole[-4:]) in places)
