"""What drafters begin with: the shipped counts."""

from __future__ import annotations

import pytest

from edgespec.drafting.suffix import NUM_CELLS, SuffixDrafter, cautious, known_counts


def test_the_shipped_counts_fit_the_drafter() -> None:
    known = known_counts()
    assert len(known) > 100
    assert all(
        0 <= hits <= tries and 0 <= cell < NUM_CELLS for cell, (hits, tries) in known.items()
    )


def test_longer_matches_of_this_text_hold_more_often() -> None:
    """The first cells are matches of one token, the last ones of more than 22."""
    known, tenth = known_counts(), NUM_CELLS // 9
    rates = []
    for first in (0, NUM_CELLS - tenth):
        some = [known[c] for c in range(first, first + tenth) if c in known and c % 2]
        rates.append(sum(hits for hits, _ in some) / sum(tries for _, tries in some))
    assert rates[0] < 0.4 < 0.8 < rates[1]


def test_other_models_are_believed_at_half_of_their_odds() -> None:
    """9.5 to 1.5 becomes 4.75 to 1.5."""
    hits, tries = cautious({3: (9.0, 10.0)})[3]
    assert hits == pytest.approx(10 * 4.75 / 6.25)
    assert tries == 10.0


def test_what_ships_is_not_stored_with_what_was_counted() -> None:
    assert SuffixDrafter().state()["cells"] == {}
