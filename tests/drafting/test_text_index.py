"""The index of texts: what it finds, what texts share, what it forgets, and who sees what."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.suffix import LENGTH_CAP, ORDERS, Text, TextIndex, to_keep

quick = settings(max_examples=100)


def followers(index: TextIndex, text: Text) -> list[tuple[int | None, int]]:
    """What came next at each place, and how long its match is; None at the end of a text."""
    found = []
    for tokens, next_, length, _ in index.places(text):
        found.append((tokens[next_] if next_ < len(tokens) else None, length))
    return found


def held_bytes(index: TextIndex) -> int:
    """What its arrays take, by Python itself."""
    texts = list(index.texts())
    arrays: list[Any] = [*index._heads]
    for one in texts:
        arrays += [one.tokens, *one.links]
    return sum(one.__sizeof__() for one in arrays)


def test_a_text_of_another_sequence_is_found() -> None:
    index = TextIndex()
    index.begin("", [1, 2, 3, 4, 5])
    second = index.begin("", [9, 3, 4])
    assert followers(index, second) == [(5, 2)]
    assert [is_own for *_, is_own in index.places(second)] == [False]


def test_a_text_that_is_being_written_is_read_by_others() -> None:
    """Two that are written at once, in turns: each finds what the other one has."""
    index = TextIndex()
    first, second = index.begin("", [1, 2]), index.begin("", [7, 8])
    first = index.extend(first, [3, 4])
    second = index.extend(second, [2, 3])
    assert followers(index, second) == [(4, 2)]
    first = index.extend(first, [7, 8])
    assert followers(index, first) == [(2, 2)]


def test_texts_of_another_history_are_never_found() -> None:
    """Also where hashes collide: of 3,000 tokens of a vocabulary of 40 many chains meet."""
    rng = random.Random(1)
    index = TextIndex()
    for number in range(10):
        index.begin(f"key {number % 2}", [rng.randrange(40) for _ in range(300)])
    mine = index.begin("key 2", [1000, *[rng.randrange(40) for _ in range(3)]])
    for _ in range(300):
        mine = index.extend(mine, [rng.randrange(40)])
        assert all(is_own for *_, is_own in index.places(mine))
    assert [one.history for one in index.texts()].count("key 2") == 1
    again = index.begin("key 0", next(index.texts()).tokens[:40].tolist())
    assert any(not is_own for *_, is_own in index.places(again))


def test_familiar_endings_are_those_of_the_same_history() -> None:
    index = TextIndex()
    index.begin("one", [1, 2, 3, 4, 5])
    for history in ("one", "two"):
        text = index.begin(history, [9, 9, 1, 2, 3])
        assert index.is_familiar(text, [4]) == (history == "one")
        assert index.is_familiar(index.extend(text, [4]), []) == (history == "one")


def test_a_common_beginning_is_kept_once() -> None:
    """Of 500 tokens the second text adds the last two, and knows the others as its own."""
    system = list(range(1000, 1500))
    index = TextIndex()
    index.begin("", [*system, 1, 2, 3])
    before = index._bytes
    text = index.begin("", [*system, 5, 6])
    assert index._bytes - before < 4096
    assert text.first == 500 and len(text.links[0]) == 2
    text = index.extend(text, system[100:104])
    [(tokens, next_)] = [(place[0], place[1]) for place in index.places(text) if place[3]]
    assert next_ == 104 and tokens[next_] == system[104]


@quick
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 60),
)
def test_what_is_shared_is_found_as_if_it_were_not(
    older: list[int], more: list[int], parted: int
) -> None:
    """The own places of a text that begins like another are those of a text alone.

    But for the place at which both part: that is the other one's.
    """
    start = list(range(50, 70))
    shared, alone = TextIndex(), TextIndex()
    first = shared.begin("", [*start, *older])
    tokens = [*start, *older[:parted], *more]
    text, single = shared.begin("", tokens), alone.begin("", tokens)
    assert text.shared.keys() == {first.number}
    mine = {at: length for _, at, length, is_own in shared.places(text) if is_own}
    all_of_them = {at: length for _, at, length, _ in alone.places(single)}
    others = sum(not is_own for *_, is_own in shared.places(text))
    if not others:  # which take places in the chains
        all_of_them.pop(text.first, None)
        assert mine == all_of_them
    assert mine.items() <= {**all_of_them, **mine}.items()
    for at, length in mine.items():
        if length < LENGTH_CAP:
            assert tokens[at - length : at] == tokens[len(tokens) - length :]


@pytest.mark.parametrize("length", [7, 8, 63, 64, 200])
def test_a_text_that_is_the_same_from_its_beginning_counts_as_the_longest(length: int) -> None:
    tokens = list(range(100, 100 + length))
    index = TextIndex()
    index.begin("", [*tokens, 1])
    text = index.begin("", tokens)
    [(token, found)] = [pair for pair in followers(index, text) if pair[0] is not None]
    assert (token, found) == (1, LENGTH_CAP if length >= 8 else length)


def test_a_shorter_text_is_not_looked_at_before_its_beginning() -> None:
    """The token before the first one is not the last one."""
    index = TextIndex()
    index.begin("", [1, 5, 6, 5, 6])
    text = index.begin("", [5, 6])
    assert sorted(length for _, length in followers(index, text)) == [2, 2]


# ------------------------------------------------------------------------------ bounds


def test_it_stays_below_its_ceiling() -> None:
    """Whatever comes: long texts, short ones, conversations that go on."""
    index = TextIndex(200_000)
    rng = random.Random(3)
    talk: list[int] = []
    for number in range(600):
        if number % 3 == 0:
            talk += [rng.randrange(1000) for _ in range(rng.choice((5, 200)))]
            index.begin("talk", talk)
            talk = talk if len(talk) < 9000 else []
        else:
            text = index.begin("", [rng.randrange(1000) for _ in range(rng.choice((1, 20, 900)))])
            for _ in range(10):
                text = index.extend(text, [rng.randrange(1000)] * 3)
        assert index._bytes == sum(one.nbytes for one in index.texts()) <= 200_000
        assert held_bytes(index) <= index.nbytes + 3 * 80  # the headers of three arrays


def test_the_least_recently_written_goes_first() -> None:
    index = TextIndex(50_000)
    old = index.begin("", range(1000, 1400))
    kept = index.begin("", range(2000, 2400))
    index.begin("", range(3000, 4200))
    kept = index.extend(kept, [1])
    index.begin("", range(5000, 6300))
    there = list(index.texts())
    assert old not in there and kept in there


def test_a_text_that_is_too_long_goes_on_with_its_end() -> None:
    index = TextIndex(32_000)  # 1,000 tokens of one text
    text = index.begin("", range(900))
    text = index.extend(text, range(900, 1100))
    assert text.tokens.tolist() == list(range(600, 1100))
    text = index.extend(text, [700, 701, 702, 703])
    assert (704, 4) in followers(index, text)


def test_a_text_that_was_forgotten_while_it_rested_goes_on_with_its_end() -> None:
    index = TextIndex(40_000)
    text = index.begin("", [1, 2, 3, 4, 5, 6])
    for start in range(10):
        index.begin("", range(1000 * start, 1000 * start + 700))
    assert text not in list(index.texts())
    text = index.extend(text, [1, 2, 3, 4])
    assert (5, 4) in followers(index, text)


@quick
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=60))
def test_links_to_what_was_forgotten_lead_nowhere(steps: list[tuple[int, int]]) -> None:
    """Numbers are given again; every place that is found has the ending that was looked for."""
    index = TextIndex(12_000)
    rng = random.Random(4)
    texts = [index.begin("", [n]) for n in range(5)]
    for which, size in steps:
        if size % 7 == 0:
            texts[which] = index.begin("", [rng.randrange(4) for _ in range(size)])
        added = [rng.randrange(4) for _ in range(size)]
        text = texts[which] = index.extend(texts[which], added)
        tokens = text.tokens.tolist()
        for source, next_, length, _ in index.places(text):
            assert length >= min(ORDERS)
            size = min(length, next_)
            assert size and source[next_ - size : next_].tolist() == tokens[-size:]


# ------------------------------------------------------------------------------ keeping


def kept(index: TextIndex) -> list[tuple[str, Sequence[int]]]:
    return to_keep(index.texts())


def test_what_is_kept_is_what_this_process_wrote() -> None:
    """A conversation once, with its last turn; nothing of an earlier process again."""
    index = TextIndex()
    index.recall("", range(100, 130))
    text = index.begin("", range(30))
    index.extend(text, [31, 32, 2])  # its end token is not in the next prompt
    longer = index.begin("", [*range(30), 31, 32, 40, 41])
    index.extend(longer, [42])
    index.begin("key", [7])
    index.begin("key", [7, 8])
    assert kept(index) == [("", [*range(30), 31, 32, 40, 41, 42]), ("key", [7, 8])]


def test_a_recalled_text_is_found_and_kept_where_it_goes_on() -> None:
    index = TextIndex()
    index.recall("", range(100, 130))
    text = index.begin("", range(100, 120))
    assert (120, LENGTH_CAP) in followers(index, text)
    assert kept(index) == [("", list(range(100, 120)))]
