"""What else computes on this machine."""

from __future__ import annotations

import pytest

from edgespec.memory.device.neighbours import Neighbours, alone


def test_neighbours_are_what_is_busy_and_not_ours() -> None:
    looks = iter([(10.0, 100.0, 5.0), (12.0, 103.5, 8.0)])
    assert Neighbours(lambda: next(looks)).share() == pytest.approx(0.25)  # 0.5 s of 2 s


def test_a_look_at_this_process_grows() -> None:
    first = alone()
    sum(i * i for i in range(200_000))
    assert all(now >= then for now, then in zip(alone(), first, strict=True))
