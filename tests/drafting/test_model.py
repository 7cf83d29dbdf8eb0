"""Draft models: how long a draft gets, greedy trees and drawn ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from draft_model_cases import (
    FIRST_CHANCE,
    HOPE,
    INF,
    LONGEST,
    ONE_HOT,
    Clock,
    Draft,
    Model,
    V,
    context_of,
    counting,
    curve_of,
    drafter_of,
    estimate_of,
    observe,
    paths_of,
    rough,
    sampler_of,
)
from fake_backend import FakeBackend

from edgespec.decode.engine import Engine
from edgespec.drafting.model import ModelDrafter, calibration_of_places
from edgespec.drafting.proposal import Proposal
from edgespec.memory.times import CostCurve
from edgespec.sampling.sampling import without


@pytest.mark.parametrize("max_nodes", [2, 5, 9])
def test_a_draft_model_equal_to_the_target_has_all_its_tokens_accepted(
    clock: Clock, max_nodes: int
) -> None:
    """All but one node of each step drafted, all accepted, and a bonus: as many tokens as nodes."""
    target = FakeBackend(counting, V, max_nodes=max_nodes)
    drafter, draft = drafter_of(counting, clock, 1e-6)
    engine = Engine(target, curve=curve_of(*[1.0] * max_nodes), drafter=drafter)
    result = engine.generate([0, 1], max_tokens=1 + 6 * max_nodes)
    assert list(result.token_ids) == [(2 + i) % V for i in range(1 + 6 * max_nodes)]
    assert target.steps == [max_nodes] * 6
    assert result.counters.accepted_tokens == result.counters.drafted_tokens == 6 * (max_nodes - 1)
    # What is fed: prompt and root, then the drafts but the last one; then that and the bonus.
    assert draft.steps == [3, *[1] * (max_nodes - 2), *[2, *[1] * (max_nodes - 2)] * 5]


def test_a_draft_that_is_always_wrong_is_shorter_and_shorter(clock: Clock) -> None:
    """Drafting stops where it does not pay, and the controller decodes plainly."""
    target = FakeBackend(counting, V)
    drafter, _ = drafter_of(lambda context: ONE_HOT[(context[-1] + 2) % V], clock, 0.5)
    curve = curve_of(*(10.0 + n for n in range(32)))
    result = Engine(target, curve=curve, drafter=drafter).generate([0, 1], max_tokens=200)
    assert result.counters.accepted_tokens == 0
    assert target.steps[0] > 3 and target.steps[-20:] == [1] * 20


# ------------------------------------------------------------------------------ when to stop


def slow_length(target: Sequence[float], node_ms: float, longest: int) -> int:
    """Draft one more while some longer chain has a better rate than all there is so far.

    The target's step takes t(n), which is as unsure as a measurement, each drafted token
    `node_ms`. Those that are drafted are as probable as sure ones are at first, others by hope.
    """
    curve, sure = CostCurve([math.inf, *target]), FIRST_CHANCE[1.0]

    def rate(size: int, spent: int) -> float:
        chances = (sure ** min(n, length) * HOPE ** max(0, n - length) for n in range(size + 1))
        expected = math.fsum(chances)
        return expected / (
            spent * node_ms + target[size] * (1.0 + curve.standard_errors([size + 1], 0)[0])
        )

    length = 1
    while length < longest:
        best = max(rate(0, length), *(rate(size, length) for size in range(length + 1)))
        if max(rate(size, size) for size in range(length + 1, longest + 1)) <= best:
            break
        length += 1
    return length


CURVES = {
    "flat": [10.0] * 17,
    "steep": [10.0 * n for n in range(1, 18)],
    "slowly rising": [10.0 + n for n in range(17)],
    "by four": [10.0 + 8 * (n // 4) for n in range(17)],
    "four are cheaper": [10.0, 30.0, 31.0, 12.0, *[40.0] * 13],
}


@pytest.mark.parametrize(
    ("curve", "node_ms", "length"),
    [
        ("flat", 0.1, 8),
        ("flat", 1.0, 4),
        ("flat", 3.0, 2),
        ("flat", 8.0, 1),
        ("steep", 0.1, 1),
        ("four are cheaper", 1.0, 3),
    ],
)
def test_drafting_stops_where_it_does_not_pay(
    clock: Clock, curve: str, node_ms: float, length: int
) -> None:
    """Flat and 1 ms: 1.63 / 11, 2.02 / 12, 2.26 / 13 = 0.174, 2.42 / 14 = 0.173."""
    drafter, _ = drafter_of(counting, clock, node_ms)
    drafter.begin([1, 2])
    proposal = drafter.propose(context_of(*CURVES[curve], max_nodes=16))
    assert len(proposal) == length == slow_length(CURVES[curve], node_ms, 16)
    assert proposal.draft_ms == pytest.approx(length * node_ms)
    assert list(proposal.probabilities) == pytest.approx(
        [FIRST_CHANCE[1.0] ** n for n in range(1, length + 1)]
    )


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("node_ms", [0.02, 0.3, 0.7, 2.0, 5.0])
@pytest.mark.parametrize("longest", [1, 3, 16])
def test_it_is_as_long_as_the_slow_rule_says(
    clock: Clock, curve: str, node_ms: float, longest: int
) -> None:
    drafter, _ = drafter_of(counting, clock, node_ms)
    drafter.begin([1, 2])
    proposal = drafter.propose(context_of(*CURVES[curve], max_nodes=longest))
    assert len(proposal) == slow_length(CURVES[curve], node_ms, longest)


def test_what_was_accepted_makes_the_next_draft_longer(clock: Clock) -> None:
    drafter, _ = drafter_of(counting, clock, 1.0)
    drafter.begin([0])
    sizes = []
    for _ in range(60):
        proposal = drafter.propose(context_of(max_nodes=31))
        sizes.append(len(proposal))
        observe(drafter, [*proposal.tokens, (proposal.tokens[-1] + 1) % V])
    assert sizes[0] == 4 and sizes[-1] == LONGEST
    assert sizes == sorted(sizes)


# ------------------------------------------------------------------------------ greedy trees


def test_the_next_best_tokens_stand_beside_the_spine(clock: Clock) -> None:
    """At most two beside each; likeliest first; none where branches cannot be verified."""
    drafter, _ = drafter_of(rough, clock)
    for branches in (True, False):
        drafter.begin([1, 2])
        proposal = drafter.propose(context_of(max_nodes=30, branches=branches))
        assert list(proposal.probabilities) == sorted(proposal.probabilities, reverse=True)
        assert (proposal.kept, list(proposal.distributions)) == (0, [])
        children = [list(proposal.parents).count(node) for node in range(-1, len(proposal))]
        assert max(children) == (3 if branches else 1)
        for path in paths_of(proposal):
            row = np.array(rough((1, 2, *path[:-1])))
            assert path[-1] in np.argsort(-row)[: 3 if branches else 1]


@pytest.mark.parametrize("max_nodes", range(1, 12))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_more_is_drafted_than_asked_for(
    clock: Clock, max_nodes: int, temperature: float
) -> None:
    drafter, _ = drafter_of(rough, clock)
    for seed in range(10):
        drafter.begin([seed % V, 2])
        sampler = sampler_of(seed) if temperature else None
        assert (
            1 <= len(drafter.propose(context_of(max_nodes=max_nodes, sampler=sampler))) <= max_nodes
        )


# ------------------------------------------------------------------------------ drawn drafts


def drawn_proposal(
    clock: Clock, seed: int, model: Model = rough, *, branches: bool = True, **params: Any
) -> Proposal:
    drafter, _ = drafter_of(model, clock, 0.1)
    drafter.begin([1, 2])
    sampler = sampler_of(seed, **params)
    return drafter.propose(context_of(branches=branches, sampler=sampler))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 2}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("branches", [True, False])
def test_every_drawn_node_has_the_law_it_was_drawn_from(
    clock: Clock, params: dict[str, Any], branches: bool
) -> None:
    """That of the draft model under the sampler's settings, without the siblings before it."""
    for seed in range(20):
        proposal = drawn_proposal(clock, seed, branches=branches, **params)
        assert proposal.kept == len(proposal) == len(proposal.distributions) > 0
        assert all(parent < node for node, parent in enumerate(proposal.parents))
        paths = paths_of(proposal)
        assert len(set(paths)) == len(paths)
        for node, (path, distribution) in enumerate(
            zip(paths, proposal.distributions, strict=True)
        ):
            row = np.array(rough((1, 2, *path[:-1])), np.float32)
            ids, chances = sampler_of(0, **params).distribution(row)
            expected: Any = np.zeros(V)
            expected[ids] = chances
            for sibling in paths[:node]:
                if sibling[:-1] == path[:-1]:
                    expected = without(expected, sibling[-1])
            assert distribution is not None and float(distribution.sum()) == pytest.approx(1.0)
            assert distribution == pytest.approx(expected, abs=1e-6)
            assert distribution[path[-1]] > 0.0
        if not branches:
            assert list(proposal.parents) == list(range(-1, len(proposal) - 1))


def test_where_rows_are_the_same_so_is_the_shape(clock: Clock) -> None:
    """All tokens alike: nothing that could matter was drawn, so nothing may differ."""
    shapes = {
        (*drawn_proposal(clock, seed, lambda _context: [0.0] * V).parents,) for seed in range(50)
    }
    assert len(shapes) == 1


def test_no_decision_knows_the_tokens_it_is_about(clock: Clock) -> None:
    """Whether there are siblings, and a next level, follows from the levels drawn before.

    A level is what was drawn after one row. Of seeds with the same first levels, all have equally
    many nodes in the next one; how many differs between other first levels, so this says something.
    """
    trained, _ = drafter_of(skewed, clock, 1.0)
    trained.begin([1, 2])
    sampler = sampler_of(1)
    for _ in range(60):
        trained.propose(context_of(sampler=sampler))
        observe(trained, [0, 0, 3])  # the likeliest token is right, others never
    proposals = []
    for seed in range(300):
        drafter, _ = drafter_of(skewed, clock, 1.0)
        drafter.load_state(trained.state())
        drafter.begin([1, 2])
        proposals.append(
            drafter.propose(context_of(min_probability=0.01, sampler=sampler_of(seed)))
        )
    sizes: dict[tuple[tuple[int, ...], ...], set[int]] = {}
    for proposal in proposals:
        nodes = zip(proposal.parents, proposal.tokens, strict=True)
        levels = [
            tuple(token for _, token in group) for _, group in groupby(nodes, key=lambda n: n[0])
        ]
        for depth in range(len(levels) + 1):
            following = len(levels[depth]) if depth < len(levels) else 0
            sizes.setdefault(tuple(levels[:depth]), set()).add(following)
    assert all(len(found) == 1 for found in sizes.values())
    assert len({len(proposal) for proposal in proposals}) > 1
    assert {0, 1, 3} <= set().union(*sizes.values())


def skewed(_context: tuple[int, ...]) -> Sequence[float]:
    return [4.0, 2.0, 0.0, -1.0, *[-INF] * (V - 4)]


def test_no_sibling_where_only_one_token_is_possible(clock: Clock) -> None:
    proposal = drawn_proposal(clock, 1, top_k=1)
    assert list(proposal.parents) == list(range(-1, len(proposal) - 1))
    assert proposal.tokens[0] == int(np.argmax(rough((1, 2))))


def test_drawn_tokens_follow_their_law(clock: Clock) -> None:
    """4,000 first tokens; five standard deviations."""
    row = np.exp(np.array(rough((1, 2))))
    expected = row / row.sum()
    counts = np.zeros(V)
    drafter, _ = drafter_of(rough, clock)
    sampler = sampler_of(5)
    for _ in range(4000):
        drafter.begin([1, 2])
        counts[drafter.propose(context_of(max_nodes=1, sampler=sampler)).tokens[0]] += 1
    deviation = np.abs(counts - 4000 * expected)
    assert np.all(deviation <= 5 * np.sqrt(4000 * expected * (1 - expected)))


# ------------------------------------------------------------------------------ estimates


def test_what_places_of_a_chain_brought_is_what_is_expected_of_the_next(clock: Clock) -> None:
    """Chains of three that are always right, with nothing worth standing beside them."""
    drafter, _ = drafter_of(counting, clock)
    drafter.begin([0])
    assert list(estimate_of(drafter, max_nodes=2).probabilities) == pytest.approx([0.7, 0.49])
    for _ in range(200):
        observe(drafter, [*drafter.propose(context_of(max_nodes=3)).tokens, 0])
    found = estimate_of(drafter, max_nodes=3)
    assert min(found.probabilities) > 0.9
    assert found.node_ms == pytest.approx(0.01, rel=0.05)


def test_a_files_own_figures_are_counts_of_its_places() -> None:
    """Worth twenty tries: another twenty that are all wrong halve them."""
    places = calibration_of_places([0.6, 0.3])
    assert places.probability(0) == pytest.approx(0.6, abs=0.02)
    assert places.probability(1) == pytest.approx(0.5, abs=0.02)
    for _ in range(20):
        places.count(0, False)
    places.forget_recent()
    assert places.probability(0) == pytest.approx(0.3, abs=0.07)


def test_a_wrong_beginning_does_not_close_it(clock: Clock) -> None:
    """Neither three wrong drafts of a first answer, nor a whole text of another kind."""
    drafter, _ = drafter_of(counting, clock)
    drafter.begin([0])
    for rounds, least in ((3, 0.5), (400, 0.25)):
        for _ in range(rounds):
            tokens = drafter.propose(context_of(max_nodes=1)).tokens
            observe(drafter, [(token + 2) % V for token in tokens] or [0])
        drafter.begin([0])
        assert estimate_of(drafter).probabilities[0] > least


def test_what_steps_take_here_is_learned(clock: Clock) -> None:
    """Steps that were measured at 1 ms and take 2 ms here."""
    draft = Draft(counting, clock, 2.0)
    drafter = ModelDrafter(draft, CostCurve([INF, *[1.0] * 16]), V)
    drafter.begin([0])
    assert estimate_of(drafter).node_ms == 1.0
    for _ in range(200):
        observe(drafter, [*drafter.propose(context_of(max_nodes=2)).tokens, 0])
    assert estimate_of(drafter).node_ms == pytest.approx(2.0, rel=0.05)


def test_what_it_would_take_to_catch_up(clock: Clock) -> None:
    """Step times 1, 2, 4 and 8 ms: three missing tokens are 3 ms more than one, and 40 take ten
    steps of four."""
    draft = Draft(counting, clock, 1.0, batch_size=4)
    drafter = ModelDrafter(draft, curve_of(1.0, 2.0, 4.0, 8.0), V)
    for missing, read_ms in ((1, 0.0), (2, 1.0), (3, 3.0), (4, 7.0), (40, 79.0)):
        drafter.begin([0] * missing)
        found = estimate_of(drafter, max_nodes=3)
        assert found.read_ms == pytest.approx(read_ms)
        assert found.node_ms == 1.0
    assert drafter.reading_ms() == 8.0 * 512 / 4


def test_a_prompt_is_read_in_batches_and_what_they_take_is_learned(clock: Clock) -> None:
    """Sizes of 1 to 4 take 1 to 4 ms, so one of 20 is thought to take 20. It takes 10 here."""

    class Reading(Draft):
        def prefill(self, tokens: Sequence[int]) -> Any:
            self.clock.ms += 0.5 * len(tokens)
            return super().prefill(tokens)

    draft = Reading(counting, clock, 1.0, max_nodes=4, batch_size=20)
    drafter = ModelDrafter(draft, CostCurve([INF, 1.0, 2.0, 3.0, 4.0]), V)
    for number in range(60):
        drafter.begin([number % V] * 60)
        if not number:
            assert estimate_of(drafter, max_nodes=3).read_ms == pytest.approx(59.0)
        drafter.propose(context_of(max_nodes=3))
    drafter.forget()
    drafter.begin([0] * 60)
    assert estimate_of(drafter, max_nodes=3).read_ms == pytest.approx(29.0, rel=0.1)


def test_a_draft_grows_over_sizes_of_the_target_that_were_not_measured(clock: Clock) -> None:
    """Of the target 1 and 5 nodes were measured: one drafted token can only be left out, four pay.

    1 / 10, and (1 + 0.7 + 0.49 + 0.343 + 0.24) / 14.4. Five of six nodes were not measured either.
    """
    drafter, _ = drafter_of(counting, clock, 0.1)
    drafter.begin([1, 2])
    assert len(drafter.propose(context_of(10.0, INF, INF, INF, 14.0, INF))) == 4


# ------------------------------------------------------------------------------ state


def test_counts_survive_a_restart(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock)
    drafter.begin([0])
    for _ in range(10):
        observe(drafter, [*drafter.propose(context_of(max_nodes=3)).tokens, 5])
    fresh, _ = drafter_of(counting, clock)
    fresh.load_state(json.loads(json.dumps(drafter.state())))
    assert fresh.state() == drafter.state()
    fresh.begin([0])
    drafter.begin([0])
    ours, theirs = (estimate_of(each) for each in (fresh, drafter))
    assert ours.probabilities == theirs.probabilities
    assert ours.probabilities[0] > 0.75  # 0.7 where nothing was counted
    drafter.close()
    assert draft.closed


@pytest.mark.parametrize(
    "document", [None, {}, {"places": "high"}, {"places": {"num_cells": 3}}, {"cells": 7}]
)
def test_a_state_that_is_of_no_use_is_ignored(
    clock: Clock, document: dict[str, Any] | None
) -> None:
    drafter, _ = drafter_of(counting, clock)
    before = drafter.state()
    drafter.load_state(document)
    assert drafter.state() == before


def test_a_size_that_was_not_measured_is_drafted_for(clock: Clock) -> None:
    """As one is verified: by what its neighbours took. Else it would never be measured."""
    drafter, _ = drafter_of(counting, clock, 0.01)
    drafter.begin([0, 1])
    times = (10.0, 10.1, INF, 10.3)
    assert len(drafter.propose(context_of(*times, max_nodes=2, branches=False))) == 2
