"""Who may begin, and in which cells: promises that add up, and prefixes that are found again."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.backends.fake import FakeBackend
from edgespec.decode.decoding import Known, Model
from edgespec.decode.seats import Seat, Seats
from edgespec.memory.times.speed import RoundHistory

TALK = list(range(20))


def seats_of(users: int, cells: int, *, shares: bool = True) -> Seats:
    whole = FakeBackend(lambda _: [0.0] * 64, 64, users=users, cells=cells, context_size=cells)
    models = [
        Model(one, None, None, 8, 8, RoundHistory(), Known(), whole, number)
        for number, one in enumerate(whole.sequences)
    ]
    return Seats(models, cells, shares=shares)


def takes(seats: Seats, text: Sequence[int], need: int, *, reuse: bool = True) -> Seat:
    """A seat for a text, which is read."""
    seat = seats.take(text, need, reuse)
    assert seat is not None
    seat.model.backend.truncate(len(seat.tokens) if reuse else 0)
    seat.model.backend.prefill(text[len(seat.tokens) :])
    return seat


def test_whoever_begins_is_promised_all_that_it_may_need() -> None:
    seats = seats_of(2, 50)
    takes(seats, TALK, 40)
    other = [50, 51, 52]
    assert seats.take(other, 11, True) is None  # though only 20 cells are used so far
    assert seats.take(other, 10, True) is not None
    assert seats.take(other, 1, True) is None  # nobody's seat is free


def test_shared_cells_are_promised_once() -> None:
    """Nineteen tokens are in the cache: the last one of a prompt is always read."""
    again = [*TALK[:19], 60]
    seats = seats_of(2, 50)
    takes(seats, TALK, 40)
    assert seats.take(again, 30, True) is None
    seat = seats.take(again, 29, True)
    assert seat is not None and list(seat.tokens) == TALK[:19]
    copies = seats_of(2, 50, shares=False)
    takes(copies, TALK, 20)
    assert copies.take(again, 31, True) is None
    assert copies.take(again, 30, True) is not None


def test_a_conversation_goes_on_in_its_own_seat_and_another_one_stays() -> None:
    seats = seats_of(2, 100)
    first = takes(seats, TALK, 30)
    seats.give_back(first)
    # Half of it in common is another conversation: it begins beside the first one.
    second = takes(seats, [*TALK[:10], 60, 61], 20)
    assert second is not first and list(first.tokens) == TALK
    seats.give_back(second)
    assert seats.take([*TALK, 62], 30, True) is first


def test_texts_that_have_ended_make_room_the_oldest_first() -> None:
    seats = seats_of(3, 60)
    one, two = takes(seats, TALK, 20), takes(seats, [40, *TALK], 21)
    seats.give_back(two)
    seats.give_back(one)
    takes(seats, [50] * 20, 25, reuse=False)
    assert (list(one.tokens), list(two.tokens)) == (TALK, [])


def test_waiting_pays_where_more_of_the_text_is_being_read() -> None:
    seats = seats_of(2, 100)
    takes(seats, TALK[:8], 30)
    assert seats.gains_by_waiting(TALK, [[60], TALK[:12]])
    assert not seats.gains_by_waiting(TALK, [TALK[:8], []])
    assert not seats.gains_by_waiting(TALK[:9], [TALK])  # its last token is read anyway
