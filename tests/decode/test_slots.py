"""Who may begin, and in which cells: promises that add up, and prefixes that are found again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fake_backend import FakeBackend

from edgespec.decode.scheduler import Slots
from edgespec.decode.step import Slot

TALK = list(range(20))


class Copying(FakeBackend):
    """Sequences have cells of their own."""

    shares_cells = False


def slots_of(users: int, cells: int, *, shares: bool = True) -> Slots:
    kind = FakeBackend if shares else Copying
    return Slots(kind(lambda _: [0.0] * 64, 64, users=users, cells=cells, context_size=cells))


def takes(slots: Slots, text: Sequence[int], need: int, *, reuse: bool = True) -> Slot:
    """A slot for a text, which is read."""
    slot = slots.take(text, need, reuse)
    assert slot is not None
    slot.backend.truncate(len(slot.backend.tokens) if reuse else 0)
    slot.backend.prefill(text[len(slot.backend.tokens) :])
    return slot


def test_whoever_begins_is_promised_all_that_it_may_need() -> None:
    slots = slots_of(2, 50)
    takes(slots, TALK, 40)
    other = [50, 51, 52]
    assert slots.take(other, 11, True) is None  # though only 20 cells are used so far
    assert slots.take(other, 10, True) is not None
    assert slots.take(other, 1, True) is None  # nobody's slot is free


def test_shared_cells_are_promised_once() -> None:
    """Nineteen tokens are in the cache: the last one of a prompt is always read."""
    again = [*TALK[:19], 60]
    slots = slots_of(2, 50)
    takes(slots, TALK, 40)
    assert slots.take(again, 30, True) is None
    slot = slots.take(again, 29, True)
    assert slot is not None and list(slot.backend.tokens) == TALK[:19]
    copies = slots_of(2, 50, shares=False)
    takes(copies, TALK, 20)
    assert copies.take(again, 31, True) is None
    assert copies.take(again, 30, True) is not None


def test_a_conversation_goes_on_in_its_own_slot_and_another_one_stays() -> None:
    slots = slots_of(2, 100)
    first = takes(slots, TALK, 30)
    slots.give_back(first)
    # Half of it in common is another conversation: it begins beside the first one.
    second = takes(slots, [*TALK[:10], 60, 61], 20)
    assert second is not first and list(first.backend.tokens) == TALK
    slots.give_back(second)
    assert slots.take([*TALK, 62], 30, True) is first


def test_texts_that_have_ended_make_room_the_oldest_first() -> None:
    slots = slots_of(3, 60)
    one, two = takes(slots, TALK, 20), takes(slots, [40, *TALK], 21)
    slots.give_back(two)
    slots.give_back(one)
    takes(slots, [50] * 20, 25, reuse=False)
    assert (list(one.backend.tokens), list(two.backend.tokens)) == (TALK, [])


def test_waiting_pays_where_more_of_the_text_is_being_read() -> None:
    slots = slots_of(2, 100)
    takes(slots, TALK[:8], 30)
    assert slots.gains_by_waiting(TALK, [[60], TALK[:12]])
    assert not slots.gains_by_waiting(TALK, [TALK[:8], []])
    assert not slots.gains_by_waiting(TALK[:9], [TALK])  # its last token is read anyway


def test_a_text_finds_the_cells_of_its_salt_alone() -> None:
    """Neither to go on in them, nor to share them, nor to wait for them."""
    for users in (1, 2, 3):
        slots = slots_of(users, 200)
        first = takes(slots, TALK, 30)
        slots.give_back(first)
        other = slots.take([*TALK, 62], 30, True, "b")
        assert other is not None and not other.backend.tokens
        slots.give_back(other)
        assert slots.gains_by_waiting(TALK, [TALK[:12]], "b")
    again = slots.take([*TALK, 62], 30, True)
    assert again is first and list(again.backend.tokens) == TALK, (
        "where there is room, it is still there"
    )


def test_a_sequence_that_is_filled_from_outside_has_a_salt_as_well() -> None:
    slots = slots_of(2, 100)
    sequence = slots.spare(20, "a")
    assert sequence is not None
    sequence.prefill(TALK)
    found = [slots.take([*TALK, 62], 30, True, salt) for salt in ("b", "a")]
    assert [list(one.backend.tokens) for one in found if one is not None] == [[], TALK]


def test_a_text_grows_where_all_could_still_be_written_to_their_ends() -> None:
    """Of 50 cells two of up to 40 have 10 each, so that either can have its other 30."""
    slots = slots_of(3, 50)
    assert slots.take(TALK, 20, False, most=51) is None
    first = slots.take(TALK[:5], 10, False, most=40)
    second = slots.take([50] * 5, 10, False, most=40)
    assert first is not None and second is not None
    assert slots.take([60], 1, False, most=40) is None, "nobody could have 30 more"
    assert slots.grow(first, 9) and first.promised == 10
    assert slots.grow(first, 20) and first.promised == 40, "and what it may need beyond that"
    assert not slots.grow(second, 11) and second.promised == 10
    slots.give_back(first)
    assert slots.grow(second, 11) and second.promised == 40


def test_a_text_that_grows_takes_the_cells_of_texts_that_have_ended() -> None:
    slots = slots_of(2, 120)
    ended = takes(slots, TALK, 20)
    slots.give_back(ended)
    slot = slots.take([50] * 5, 10, True, most=120)
    assert slot is not None and slot is not ended
    assert list(ended.backend.tokens) == TALK
    assert slots.grow(slot, 50) and slot.promised == 114 and not len(ended.backend.tokens)
    assert slots.grow(slot, 500) and slot.promised == 120


def test_cells_for_a_prefix_of_the_disk_are_taken_from_texts_that_have_ended() -> None:
    slots = slots_of(2, 40)
    ended = takes(slots, TALK, 20)
    slots.give_back(ended)
    slot = slots.take([50] * 5, 10, True)
    assert slot is not None and not slots.hold(slot, 41)
    assert slot.promised == 10 and list(ended.backend.tokens) == TALK
    assert slots.hold(slot, 21) and slot.promised == 21 and not len(ended.backend.tokens)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_they_need_all_come_to_their_ends(seed: int) -> None:
    """Texts that begin, grow and end at random: somebody can always go on, in its cells."""
    rng = random.Random(seed)
    slots, cells = slots_of(4, 100), 100
    running: dict[Slot, int] = {}  # how far each is
    waiting = [(rng.randrange(1, 30), rng.randrange(1, 70)) for _ in range(30)]
    while waiting or running:
        if waiting:
            size, limit = waiting[0]
            need = size + min(limit, 5)
            slot = slots.take([len(waiting)] * size, need, False, most=size + limit)
            if slot is not None:
                running[slot] = size
                waiting.pop(0)
        moved = False
        for slot, length in list(running.items()):
            if slots.grow(slot, length + 1):
                running[slot], moved = length + 1, True
            if running[slot] >= slot.most:
                slots.give_back(slot)
                del running[slot]
        assert moved
        assert sum(slot.promised for slot in running) <= cells
