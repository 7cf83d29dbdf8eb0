"""The suffix drafter: hand-worked proposals, and all others against a slow, obvious drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_suffix import LEAST, Path, SlowDrafter

from edgespec.backends.base import DraftTree
from edgespec.drafting import NAMES, make_drafter, suffix, tables_bytes
from edgespec.drafting.proposal import Proposal, StepContext, VerifyResult
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.memory.times import CostCurve

quick = settings(max_examples=100)
CONTEXT = StepContext(31, LEAST, CostCurve([float("inf"), 1.0]), depth=0)


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
    return drafter.propose(replace(CONTEXT, max_nodes=max_nodes, min_probability=least))


def observe(drafter: SuffixDrafter, emitted: Sequence[int]) -> None:
    """A round in which all of it was drafted."""
    tree = DraftTree.chain((0, *emitted[:-1]))
    drafter.observe(VerifyResult(tree, range(len(emitted)), emitted, CONTEXT))


def drafter_of(text: Sequence[int]) -> SuffixDrafter:
    drafter = SuffixDrafter()
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


@pytest.mark.parametrize(
    "name",
    list(TEXTS),
)
def test_proposals_and_counts_are_those_of_the_slow_drafter(name: str) -> None:
    """At every position: the same nodes with the same probabilities, learning as they go."""
    text, older, rng = TEXTS[name], TEXTS["prose"][:60], random.Random(0)
    fast, slow = SuffixDrafter(), SlowDrafter()
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
    st.integers(1, 20),
)
def test_a_proposal_keeps_its_contract(older: list[int], text: list[int], max_nodes: int) -> None:
    """Parents come first and are likelier; the order is by probability."""
    drafter = SuffixDrafter()
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
    assert max(children) <= 1


# ------------------------------------------------------------------------------ the table


def test_drafters_are_made_by_name() -> None:
    assert make_drafter("none") is None
    model = RecyclingDrafter()  # stands for a draft model, a head, a window
    made = [make_drafter(name, model) for name in NAMES if name != "recycling"]
    names = [drafter.name for drafter in made if drafter is not None]
    assert names == ["suffix", *["recycling"] * 3]
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


@pytest.mark.parametrize("cuts", [[], [1], [0, 5, 5, 20], [7, 30, 61], [61, 3]])
def test_a_text_that_is_indexed_in_pieces_is_the_same_text(cuts: Sequence[int]) -> None:
    """Also behind a reading that was given up, and where an older text begins like it."""
    rng = random.Random(5)
    older, other = [[rng.randrange(4) for _ in range(60)] for _ in range(2)]
    text = [*older[:40], *(rng.randrange(4) for _ in range(21))]
    whole, pieces = SuffixDrafter(), SuffixDrafter()
    for drafter in (whole, pieces):
        drafter.begin(older)
        drafter.prepare(other, 50)
    for count in cuts:
        pieces.prepare(text, count)
    for drafter in (whole, pieces):
        drafter.begin([*text, 1])
    assert whole._text is not None and pieces._text is not None
    assert pieces._text.tokens == whole._text.tokens
    assert len(pieces._text.links[0]) == len(whole._text.links[0])
    assert [place[1:] for place in pieces.texts.places(pieces._text) if place[3]] == [
        place[1:] for place in whole.texts.places(whole._text) if place[3]
    ]


def test_a_later_text_is_not_taken_for_one_that_was_read() -> None:
    drafter = SuffixDrafter()
    drafter.prepare([1, 2, 3, 4, 5, 6], 6)
    drafter.begin([9, 8, 7])
    assert drafter._text is not None and list(drafter._text.tokens) == [9, 8, 7]


SHORT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@quick
@given(SHORT, st.lists(st.tuples(st.integers(0, 40), SHORT, st.integers(1, 40)), max_size=6), SHORT)
def test_what_was_read_ahead_in_vain_leaves_nothing(
    older: list[int], typed: list[tuple[int, list[int], int]], more: list[int]
) -> None:
    """Each time a beginning of the older text, or all of it, and other words behind it."""
    ahead, plain = SuffixDrafter(), SuffixDrafter()
    for drafter in (ahead, plain):
        drafter.begin(older * 3)
    for common, words, count in typed:
        text = [*(older * 3)[:common], *words]
        ahead.prepare(text, min(count, len(text)), ahead=True)
    assert ahead.written() == plain.written()
    asked = [*(older * 3)[:20], *more]
    assume(not typed or asked[:-1] != text)
    for drafter in (ahead, plain):
        drafter.begin(asked)
    assert ahead.written() == plain.written()
    assert ahead.texts._bytes == plain.texts._bytes
    for drafter in (ahead, plain):
        observe(drafter, more)
    assert ahead._text is not None and plain._text is not None
    assert ahead.texts.places(ahead._text) == plain.texts.places(plain._text)


def test_what_was_read_ahead_is_indexed_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, text = SuffixDrafter(), [1, 2, 3, 4, 1, 2]
    drafter.prepare(text, len(text), ahead=True)
    assert drafter.written() == []
    monkeypatch.setattr(drafter.texts, "begin", None)  # which would index it again
    drafter.begin([*text, 3])
    assert drafter.written() == [("", [*text, 3])]
    assert list(propose(drafter, 1, LEAST).tokens) == [4]
    drafter.history = "another"
    with pytest.raises(TypeError, match="not callable"):  # nobody goes on with a text of others
        drafter.prepare([*text, 3], 7)
