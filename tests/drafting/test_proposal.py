"""Proposals that are cut: nodes keep their parents, and those that were drawn stay in front."""

from __future__ import annotations

import pytest

from edgespec.drafting.proposal import Proposal


def test_a_part_has_the_same_paths() -> None:
    whole = Proposal(
        (1, 2, 3, 4), (-1, 0, 1, -1), (0.9, 0.8, 0.7, 0.5), ("a", "b", "a", "b"), kept=1, draft_ms=2
    )
    part = whole.part([0, 3, 1])
    assert (part.tokens, part.parents) == ([1, 4, 2], [-1, -1, 0])
    assert (part.probabilities, part.sources) == ([0.9, 0.5, 0.8], ["a", "b", "b"])
    assert (part.kept, part.draft_ms, part.distributions) == (1, 2, ())


def test_a_part_without_a_parent_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Proposal((1, 2), (-1, 0), (0.9, 0.8)).part([1])
