"""How much of a prompt a step has room for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from edgespec.decode.scheduler import ChunkedPrefill
from edgespec.memory.times import CostCurve


def line(tokens: int) -> float:
    """Milliseconds of a step."""
    return 2.4 + 0.3 * tokens


def run(pace: ChunkedPrefill, step_ms: Callable[[int], float], nodes: int, steps: int) -> list[int]:
    """The pieces of some steps in a row."""
    pieces = []
    for _ in range(steps):
        piece = pace.chunk_size(nodes, 500)
        if pace._apart and piece:
            pace.has_stepped(0, piece, step_ms(piece))
            pace.has_stepped(nodes, 0, step_ms(nodes))
        else:
            pace.has_stepped(nodes, piece, step_ms(nodes + piece))
        pieces.append(piece)
    return pieces


def test_the_first_step_reads_nothing_and_the_next_one_little() -> None:
    assert run(ChunkedPrefill(), line, 1, 2) == [0, 2]


@pytest.mark.parametrize("curve_ms", [0.8, 1.0, 1.25])
def test_times_that_were_measured_say_what_fits_from_the_first_chunk_on(curve_ms: float) -> None:
    """At another speed: one step shows that."""
    curve = CostCurve([math.inf, *(curve_ms * line(n) for n in range(1, 17))])
    pieces = run(ChunkedPrefill(curve=curve), line, 1, 4)
    assert pieces[0] == 0
    assert pieces[1:] == pytest.approx([int(line(1) / 0.3)] * 3, abs=3)


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_step_that_reads_takes_one_plain_step_longer(nodes: int) -> None:
    pieces = run(ChunkedPrefill(), line, nodes, 100)[20:]
    most = line(nodes) / 0.3
    assert max(pieces) in (int(most), int(most) - 1)
    assert sum(pieces) > 0.9 * len(pieces) * (max(pieces) - 1)


def test_more_answers_leave_more_room() -> None:
    """With as many more tokens as their step has: the line was learned from one answer's steps."""
    pace = ChunkedPrefill()
    run(pace, line, 1, 100)
    pace.has_stepped(8, 0, line(8))
    assert pace.chunk_size(8, 500) == pytest.approx(line(8) / 0.3, abs=1)


@pytest.mark.parametrize("waiting", [2, 3, 7])
def test_each_further_prompt_that_waits_adds_half_as_much(waiting: int) -> None:
    pace = ChunkedPrefill()
    run(pace, line, 4, 100)
    one = pace.chunk_size(4, 500)
    pace.has_stepped(4, one, line(4 + one))
    for _ in range(3):  # which may only double at a time
        several = pace.chunk_size(4, 500, waiting)
        pace.has_stepped(4, several, line(4 + several))
    times = 1 + 0.5 * (waiting - 1)
    assert times * one <= several <= times * (one + 1)


def test_one_step_in_sixteen_reads_nothing() -> None:
    assert run(ChunkedPrefill(), line, 1, 160).count(0) == 10


def test_a_line_that_bends_is_followed() -> None:
    """Tokens beyond the tenth cost three times as much."""

    def bent(tokens: int) -> float:
        return line(tokens) + 0.6 * max(0, tokens - 10)

    pieces = run(ChunkedPrefill(), bent, 8, 200)[100:]
    longest_ms = max(bent(8 + piece) for piece in pieces)
    assert 0.8 * 2 * bent(8) < longest_ms < 1.15 * 2 * bent(8)


def test_one_hiccup_does_not_keep_prompts_waiting() -> None:
    pace = ChunkedPrefill()
    usual = run(pace, line, 1, 50)[-1]
    pace.has_stepped(1, usual, 500.0)
    assert min(piece for piece in run(pace, line, 1, 60) if piece) > usual / 2


def test_pieces_apart_from_steps_take_no_longer_than_these() -> None:
    """A run of its own has the price of a run: it has as many tokens as the answers' steps."""
    pieces = run(ChunkedPrefill(apart=True), line, 8, 100)[20:]
    assert set(pieces) <= {7, 8} and len(pieces) == 80


def test_a_machine_that_gets_slower_is_noticed() -> None:
    pace = ChunkedPrefill()
    before = run(pace, line, 1, 100)[-1]
    pieces = run(pace, lambda tokens: 3.0 * line(tokens), 1, 200)[100:]
    assert max(pieces) <= before + 1
