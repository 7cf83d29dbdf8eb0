"""Proposals of draft models: how they grow, what is too unlikely for them, and what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_model_cases import FIRST_CHANCE, V, context_of, paths_of, sampler_of

from edgespec.drafting.constants import MOST_DRAWN
from edgespec.drafting.model import ProposalBuilder, new_calibration

SHARES = (0.9, 0.05, 0.04)


def builder_of(**context: Any) -> ProposalBuilder:
    return ProposalBuilder(context_of(**context), new_calibration())


def test_the_best_token_goes_on_and_others_stand_beside_it() -> None:
    builder = builder_of(min_probability=0.0)
    builder.take((5, 6, 7), SHARES)
    builder.take((1, 2, 3), SHARES)
    assert (builder.main_chain(), builder.depth, builder.last_draft) == ([5, 1], 2, 1)
    assert builder.chance == pytest.approx(FIRST_CHANCE[0.9] ** 2)
    proposal, cells = builder.proposal(draft_ms=3.0)
    assert set(paths_of(proposal)) == {(5,), (6,), (7,), (5, 1), (5, 2), (5, 3)}
    assert list(proposal.probabilities) == sorted(proposal.probabilities, reverse=True)
    assert (proposal.kept, proposal.draft_ms, len(set(cells))) == (0, 3.0, 3)


def test_beside_it_stands_only_what_may_pay() -> None:
    """Second best ones are right 15 times in 100; the best one is drafted whatever it promises."""
    builder = builder_of(min_probability=0.2)
    for _ in range(6):
        builder.take((5, 6, 7), SHARES)
    assert builder.tokens == [5] * 6
    assert builder.chance == pytest.approx(FIRST_CHANCE[0.9] ** 6)
    assert builder.chance < 0.2
    chain = builder_of(min_probability=0.0, branches=False)
    chain.take((5, 6, 7), SHARES)
    assert chain.tokens == [5]


def test_a_draft_has_no_more_nodes_than_a_step_has_room_for() -> None:
    builder = builder_of(min_probability=0.0, max_nodes=4)
    while not builder.is_full:
        builder.take((5, 6, 7), SHARES)
    assert builder.tokens == [5, 6, 7, 5]
    drawing = builder_of(min_probability=0.0, sampler=sampler_of(1))
    while not drawing.is_full:
        drawing.take((5,), SHARES)
    assert drawing.depth == MOST_DRAWN


def test_siblings_are_drawn_without_those_before_them() -> None:
    """Each carries the law it was drawn from, in which those drawn before it cannot come."""
    row = np.log(np.arange(1, V + 1, dtype=np.float32))
    sampler = sampler_of(7)
    builder = builder_of(min_probability=0.0, sampler=sampler)
    builder.draw(row, sampler)
    proposal, _ = builder.proposal(draft_ms=1.0)
    first, second, third = proposal.tokens
    assert len({first, second, third}) == proposal.kept == 3
    assert list(proposal.parents) == [-1, -1, -1]
    laws = [law for law in proposal.distributions if law is not None]
    expected = np.arange(1, V + 1) / np.arange(1, V + 1).sum()
    assert laws[0] == pytest.approx(expected, abs=1e-6)
    assert (laws[1][first], laws[2][first], laws[2][second]) == (0.0, 0.0, 0.0)
    assert [law.sum() for law in laws] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
