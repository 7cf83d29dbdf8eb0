"""The draft model's drafter on fake models: its cache, its stop rule, and what it draws."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from frozen_times import Frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.base import Logits
from edgespec.backends.fake import FakeBackend
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.base import Outcome
from edgespec.drafting.drafters.model import ModelDrafter
from edgespec.drafting.proposal import EMPTY, MARGIN, Proposal, Prospects, Stakes
from edgespec.errors import UnsupportedError
from edgespec.memory.times.curve import CostCurve
from edgespec.models.exits.early_exit import ExitInfo
from edgespec.sampling.distributions import without
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
Model = Callable[[tuple[int, ...]], Sequence[float]]
INF = float("inf")
V = 8
EXIT = ExitInfo("", "", 1, array("i", range(V)), {})
LONGEST = 16
FIRST_CHANCE = 0.7  # of a drafted token, before anything was counted
_ONE_HOT: list[list[float]] = (20.0 * np.eye(V)).tolist()
_TABLE: list[list[list[float]]] = np.random.default_rng(3).normal(0.0, 1.5, (V, V, V)).tolist()


def counting(context: tuple[int, ...]) -> Sequence[float]:
    """Surely the next number."""
    return _ONE_HOT[(context[-1] + 1) % V]


def rough(context: tuple[int, ...]) -> Sequence[float]:
    return _TABLE[context[-2] if len(context) > 1 else 0][context[-1]]


def curve_of(*ms: float) -> CostCurve:
    """A curve with t(1), t(2), ... in ms, which no clock corrects."""
    return Frozen([INF, *ms])


class Clock:
    """Moves by one draft step's time with each step of the draft model."""

    ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1e3


class Draft(FakeBackend):
    """A draft model that takes time and counts the tokens it is fed."""

    def __init__(self, model: Model, clock: Clock, node_ms: float, **options: Any) -> None:
        super().__init__(model, options.pop("vocab_size", V), **options)
        self.clock = clock
        self.node_ms = node_ms
        self.fed = 0

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.fed += len(tokens)
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        self.fed += len(tree)
        self.clock.ms += self.node_ms
        return super().verify(tree)

    @property
    def cached(self) -> list[int]:
        return self._committed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("edgespec.drafting.drafters.model.perf_counter", clock)
    return clock


def drafter_of(
    model: Model, clock: Clock, node_ms: float = 0.01, **options: Any
) -> tuple[ModelDrafter, Draft]:
    draft = Draft(model, clock, node_ms, **options)
    return ModelDrafter(draft, curve_of(*[node_ms] * 16), V), draft


def stakes_of(*ms: float, max_nodes: int = 15, **options: Any) -> Stakes:
    """Target steps of up to 32 nodes in 10 ms, or of the given times."""
    curve = curve_of(*(ms or (10.0,) * 32))
    return Stakes(max_nodes, options.pop("min_probability", 0.02), curve, depth=0, **options)


def prospects_of(drafter: ModelDrafter, **options: Any) -> Prospects:
    hope = drafter.prospects(stakes_of(**options))
    assert hope is not None
    return hope


def sampler_of(seed: int, **params: Any) -> Sampler:
    return Sampler(SamplingParams(temperature=1.0, seed=seed, **params), V)


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def observe(drafter: ModelDrafter, emitted: Sequence[int]) -> None:
    drafter.observe(Outcome(DraftTree.chain((0,)), range(len(emitted)), emitted, stakes_of()))


# ------------------------------------------------------------------------------ draft = target


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
    drafter, _ = drafter_of(lambda context: _ONE_HOT[(context[-1] + 2) % V], clock, 0.5)
    curve = curve_of(*(10.0 + n for n in range(32)))
    result = Engine(target, curve=curve, drafter=drafter).generate([0, 1], max_tokens=200)
    assert result.counters.accepted_tokens == 0
    assert target.steps[0] > 3 and target.steps[-20:] == [1] * 20


# ------------------------------------------------------------------------------ the cache


@quick
@given(st.data())
def test_the_cache_begins_as_the_text_does(data: st.DataObject) -> None:
    """Whatever is accepted, and whether or not it is asked; what need not be fed again is not."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:  # how many it drafts depends on the time it takes
        patch.setattr("edgespec.drafting.drafters.model.perf_counter", clock)
        _texts_of_a_cache(data, clock)


def _texts_of_a_cache(data: st.DataObject, clock: Clock) -> None:
    draft = Draft(
        rough, clock, 0.001, max_nodes=data.draw(st.sampled_from((1, 3, 64))), batch_size=4
    )
    drafter = ModelDrafter(draft, curve_of(*[0.001] * 8), V)
    tokens = st.integers(0, V - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        text = data.draw(st.lists(tokens, min_size=1, max_size=30))
        drafter.begin(text)
        for _ in range(data.draw(st.integers(0, 6))):
            stakes = stakes_of(max_nodes=data.draw(st.sampled_from((1, 4, 15))))
            hope = drafter.prospects(stakes)
            assert hope is not None
            assert 0.0 <= hope.before_ms < INF and 0.0 < hope.draft_ms < INF
            same = _num_common(draft.cached, text)
            assert drafter._text.shared == same
            spine: list[int] = []
            if data.draw(st.booleans()):
                fed = draft.fed
                proposal = drafter.propose(stakes)
                assert draft.cached[: len(text)] == text
                spine = list(sorted(paths_of(proposal), key=len)[-1])
                assert draft.cached[len(text) :] == list(drafter._spine)[:-1]
                drafted = len(draft.cached) - len(text)
                assert draft.fed - fed == len(text) - min(same, len(text) - 1) + drafted
            emitted = spine[: data.draw(st.integers(0, len(spine)))]
            emitted += data.draw(st.lists(tokens, min_size=1, max_size=2))
            observe(drafter, emitted)
            text = [*text, *emitted]
            assert drafter._text.tokens == text
            assert drafter._text.cached == draft.cached


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_a_new_text_feeds_only_what_is_new(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock)
    drafter.begin([*range(8), *range(8), 5])
    drafter.propose(stakes_of(max_nodes=1))
    assert (draft.fed, draft.length) == (17, 17)
    drafter.begin([*range(8), *range(8), 6, 1])
    drafter.propose(stakes_of(max_nodes=1))
    assert (draft.fed, draft.length) == (17 + 2, 18)
    drafter.begin([*range(8)])  # the last token is fed again: its row was not kept
    drafter.propose(stakes_of(max_nodes=1))
    assert (draft.fed, draft.length) == (17 + 2 + 1, 8)


def test_a_forgotten_text_is_fed_again(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock)
    drafter.begin([*range(8), 0])
    drafter.propose(stakes_of(max_nodes=1))
    drafter.forget()
    assert (draft.length, drafter._text.shared) == (0, 0)
    drafter.begin([*range(8), 0])
    drafter.propose(stakes_of(max_nodes=1))
    assert (draft.fed, draft.length) == (9 + 9, 9)


def test_a_long_text_is_fed_in_batches(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock, max_nodes=4, batch_size=10)
    text = [i * i % V for i in range(57)]
    drafter.begin(text)
    assert list(drafter.propose(stakes_of(max_nodes=1)).tokens) == [(text[-1] + 1) % V]
    assert draft.cached == text
    assert max(draft.steps) <= 4


def test_nothing_is_drafted_where_the_draft_models_context_ends(clock: Clock) -> None:
    """The longest draft must fit, so that nothing is ever cut off."""
    drafter, draft = drafter_of(counting, clock, context_size=20 + LONGEST)
    drafter.begin([i % V for i in range(20)])
    assert len(drafter.propose(stakes_of(max_nodes=31))) == LONGEST
    assert len(prospects_of(drafter).probabilities) == 15
    observe(drafter, [4])
    assert len(drafter.propose(stakes_of())) == 0
    assert prospects_of(drafter).probabilities == ()
    drafter.begin([1, 2])
    assert len(drafter.propose(stakes_of())) > 0
    assert draft.length < 20


def test_a_window_is_all_that_is_read_of_a_text(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begins with the last tokens; again after more of them that others drafted, or when full."""
    monkeypatch.setattr("edgespec.models.exits.early_exit.WINDOW", 6)
    draft = Draft(counting, clock, 0.01, context_size=10 + LONGEST)
    drafter = ModelDrafter(draft, curve_of(*[0.01] * 16), V, early_exit=EXIT)
    drafter.begin([i % V for i in range(1000)])
    assert prospects_of(drafter).before_ms == pytest.approx(0.0)  # no more than six
    assert list(drafter.propose(stakes_of(max_nodes=1)).tokens) == [0]
    assert draft.cached == [2, 3, 4, 5, 6, 7]
    observe(drafter, [i % V for i in range(4)])  # ten: fits, and four are less than six
    drafter.propose(stakes_of(max_nodes=1))
    assert draft.cached == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    observe(drafter, [4])  # one too many
    drafter.propose(stakes_of(max_nodes=1))
    assert draft.cached == [7, 0, 1, 2, 3, 4]
    observe(drafter, [i % V for i in range(5, 12)])  # seven that it has not seen
    assert list(drafter.propose(stakes_of(max_nodes=1)).tokens) == [4]
    assert draft.cached == [6, 7, 0, 1, 2, 3]
    drafter.begin([3, 4])  # shorter than the window
    assert list(drafter.propose(stakes_of(max_nodes=1)).tokens) == [5]
    assert draft.cached == [3, 4]


@quick
@given(st.data())
def test_a_window_never_changes_what_follows_from_the_last_tokens(data: st.DataObject) -> None:
    """Rows that depend on two tokens are the same with a window as without, along any text."""
    clock = Clock()
    draft = Draft(rough, clock, 0.01, context_size=12 + LONGEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.models.exits.early_exit.WINDOW", 4)
        seeing = ModelDrafter(draft, curve_of(*[0.01] * 16), V, early_exit=EXIT)
    whole, _ = drafter_of(rough, clock)
    tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=9)
    text = data.draw(tokens)
    for drafter in (seeing, whole):
        drafter.begin(text)
    for _ in range(data.draw(st.integers(1, 8))):
        first, second = (d.propose(stakes_of(max_nodes=3)) for d in (seeing, whole))
        assert first.tokens[:1] == second.tokens[:1] or len(text) < 2
        emitted = data.draw(tokens)
        text = text + emitted
        assert draft.length <= 12 + LONGEST
        for drafter in (seeing, whole):
            observe(drafter, emitted)


def test_what_rounds_usually_bring_is_what_is_expected_of_the_next(clock: Clock) -> None:
    """Chains of three that are always right, with nothing worth standing beside them."""
    drafter, _ = drafter_of(counting, clock)
    drafter.begin([0])
    for _ in range(200):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=3)).tokens, 0])
    hope = prospects_of(drafter, max_nodes=3)
    assert min(hope.probabilities) > 0.9
    assert hope.draft_ms == pytest.approx(0.03, rel=0.05)


def test_what_rounds_take_beyond_their_steps_is_learned(clock: Clock) -> None:
    """Steps that were measured at 1 ms and take 3 ms here."""
    draft = Draft(counting, clock, 3.0)
    drafter = ModelDrafter(draft, curve_of(*[1.0] * 16), V)
    drafter.begin([0])
    assert prospects_of(drafter).draft_ms == 3.0
    for _ in range(200):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=2)).tokens, 0])
    assert prospects_of(drafter).draft_ms == pytest.approx(2 * 3.0, rel=0.05)


def test_a_round_that_stands_still_is_soon_forgotten(clock: Clock) -> None:
    draft = Draft(counting, clock, 1.0)
    drafter = ModelDrafter(draft, curve_of(*[1.0] * 16), V)
    drafter.begin([0])
    for stall_ms in (0.0, 0.0, 60_000.0):
        draft.node_ms = 1.0 + stall_ms
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=1)).tokens, 0])
    assert prospects_of(drafter).draft_ms < 3.0 * 3.0
    draft.node_ms = 1.0
    for _ in range(100):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=1)).tokens, 0])
    assert prospects_of(drafter).draft_ms == pytest.approx(1.0, rel=0.1)


def test_what_it_would_take_to_catch_up(clock: Clock) -> None:
    """Step times 1, 2, 4 and 8 ms: three missing tokens are 3 ms more than one, and 40 take ten
    steps of four."""
    draft = Draft(counting, clock, 1.0)
    drafter = ModelDrafter(draft, curve_of(1.0, 2.0, 4.0, 8.0), V)
    for missing, before_ms in ((1, 0.0), (2, 1.0), (3, 3.0), (4, 7.0), (40, 79.0)):
        drafter.begin([0] * missing)
        hope = prospects_of(drafter, max_nodes=3)
        assert hope.before_ms == pytest.approx(before_ms)
        assert hope.draft_ms == 3.0  # three steps
        assert list(hope.probabilities) == pytest.approx([0.7, 0.49, 0.343])


def test_reading_is_priced_between_the_sizes_that_were_measured(clock: Clock) -> None:
    """1 ms for one and 4 ms for four: 2 ms for two."""
    drafter = ModelDrafter(Draft(counting, clock, 1.0), curve_of(1.0, INF, INF, 4.0, INF), V)
    drafter.begin([0, 1])
    assert prospects_of(drafter).before_ms == pytest.approx(1.0)


def test_a_draft_grows_over_sizes_of_the_target_that_were_not_measured(clock: Clock) -> None:
    """Of the target 1 and 5 nodes were measured: one drafted token can only be left out, four pay.

    1 / 10, and (1 + 0.7 + 0.49 + 0.343 + 0.24) / 14.4. Five of six nodes were not measured either.
    """
    drafter, _ = drafter_of(counting, clock, 0.1)
    drafter.begin([1, 2])
    assert len(drafter.propose(stakes_of(10.0, INF, INF, INF, 14.0, INF))) == 4


# ------------------------------------------------------------------------------ vocabularies


@pytest.mark.parametrize("draft_size", [5, V, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_may_be_padded(clock: Clock, draft_size: int, temperature: float) -> None:
    """A token that only one of them has is never drafted, however likely the draft finds it."""

    def padded(context: tuple[int, ...]) -> Sequence[float]:
        row = [*rough(context), *[50.0] * 12]
        return row[:draft_size]

    drafter, _ = drafter_of(padded, clock, vocab_size=draft_size)
    drafter.begin([1, 2])
    sampler = sampler_of(1) if temperature else None
    for _ in range(30):
        proposal = drafter.propose(stakes_of(sampler=sampler))
        assert max(proposal.tokens) < min(draft_size, V)
        assert all(
            len(distribution) == V
            for distribution in proposal.distributions
            if distribution is not None
        )
        observe(drafter, [proposal.tokens[0]])
    engine = Engine(FakeBackend(rough, V), curve=curve_of(*[1.0] * 16), drafter=drafter)
    params = SamplingParams(temperature=temperature, seed=1)
    assert len(engine.generate([1, 2], max_tokens=50, sampling=params).token_ids) == 50


def test_a_pair_that_shares_fewer_tokens_than_the_target_has(clock: Clock) -> None:
    """Samplers of models in turns know only the tokens that both have."""
    drafter, _ = drafter_of(rough, clock)
    drafter.begin([1, 2])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), V - 1)
    proposal = drafter.propose(stakes_of(sampler=sampler))
    assert proposal.tokens and max(proposal.tokens) < V - 1


def test_a_text_that_the_draft_model_cannot_read_is_not_drafted_for(clock: Clock) -> None:
    draft = Draft(rough, clock, 0.01, vocab_size=5)
    drafter = ModelDrafter(draft, curve_of(*[0.01] * 16), V, 5)
    drafter.begin([1, 5])
    assert drafter.propose(stakes_of()) is EMPTY
    assert prospects_of(drafter).probabilities == ()
    drafter.begin([1, 2])
    assert drafter.propose(stakes_of()).tokens
    observe(drafter, [3, 6])
    assert drafter.propose(stakes_of()) is EMPTY
    assert draft.fed > 0 and max(draft.cached) < 5


def test_a_model_that_cannot_go_back_cannot_draft() -> None:
    with pytest.raises(UnsupportedError, match="cannot draft: pretended for a test") as caught:
        ModelDrafter(FakeBackend(rough, V, rollback=False), curve_of(1.0), V)
    assert "sliding windows" in caught.value.hint


# ------------------------------------------------------------------------------ when to stop


def slow_length(target: Sequence[float], node_ms: float, longest: int) -> int:
    """Draft one more while some longer chain has a better rate than all there is so far.

    The target's step takes t(n), which is as unsure as a measurement, each drafted token
    `node_ms`, and is right with 0.7.
    """
    curve = CostCurve([math.inf, *target])

    def rate(size: int, spent: int) -> float:
        expected = math.fsum(FIRST_CHANCE**n for n in range(size + 1))
        return expected / (spent * node_ms + target[size] * (1.0 + curve.doubt(size + 1, 0)))

    length = 1
    while length < longest:
        best = max(MARGIN * rate(0, length), *(rate(size, length) for size in range(length + 1)))
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
        ("flat", 0.1, 10),
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
    """Flat and 1 ms: 1.7 / 11, 2.19 / 12, 2.53 / 13, 2.77 / 14 = 0.198, 2.94 / 15 = 0.196."""
    drafter, _ = drafter_of(counting, clock, node_ms)
    drafter.begin([1, 2])
    proposal = drafter.propose(stakes_of(*CURVES[curve], max_nodes=16))
    assert len(proposal) == length == slow_length(CURVES[curve], node_ms, 16)
    assert proposal.draft_ms == pytest.approx(length * node_ms)
    assert list(proposal.probabilities) == pytest.approx([0.7**n for n in range(1, length + 1)])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("node_ms", [0.02, 0.3, 0.7, 2.0, 5.0])
@pytest.mark.parametrize("longest", [1, 3, 16])
def test_it_is_as_long_as_the_slow_rule_says(
    clock: Clock, curve: str, node_ms: float, longest: int
) -> None:
    drafter, _ = drafter_of(counting, clock, node_ms)
    drafter.begin([1, 2])
    proposal = drafter.propose(stakes_of(*CURVES[curve], max_nodes=longest))
    assert len(proposal) == slow_length(CURVES[curve], node_ms, longest)


def test_what_was_accepted_makes_the_next_draft_longer(clock: Clock) -> None:
    drafter, _ = drafter_of(counting, clock, 1.0)
    drafter.begin([0])
    sizes = []
    for _ in range(60):
        proposal = drafter.propose(stakes_of(max_nodes=31))
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
        proposal = drafter.propose(stakes_of(max_nodes=30, branches=branches))
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
            1 <= len(drafter.propose(stakes_of(max_nodes=max_nodes, sampler=sampler))) <= max_nodes
        )


# ------------------------------------------------------------------------------ drawn drafts


def drawn_proposal(
    clock: Clock, seed: int, model: Model = rough, *, branches: bool = True, **params: Any
) -> Proposal:
    drafter, _ = drafter_of(model, clock, 0.1)
    drafter.begin([1, 2])
    sampler = sampler_of(seed, **params)
    return drafter.propose(stakes_of(branches=branches, sampler=sampler))


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
        trained.propose(stakes_of(sampler=sampler))
        observe(trained, [0, 0, 3])  # the likeliest token is right, others never
    proposals = []
    for seed in range(300):
        drafter, _ = drafter_of(skewed, clock, 1.0)
        drafter.load_state(trained.state())
        drafter.begin([1, 2])
        proposals.append(drafter.propose(stakes_of(min_probability=0.01, sampler=sampler_of(seed))))
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
        counts[drafter.propose(stakes_of(max_nodes=1, sampler=sampler)).tokens[0]] += 1
    deviation = np.abs(counts - 4000 * expected)
    assert np.all(deviation <= 5 * np.sqrt(4000 * expected * (1 - expected)))


# ------------------------------------------------------------------------------ state


def test_counts_and_hope_survive_a_restart(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock)
    drafter.begin([0])
    for _ in range(10):
        observe(drafter, [*drafter.propose(stakes_of(max_nodes=3)).tokens, 5])
    fresh, _ = drafter_of(counting, clock)
    fresh.load_state(json.loads(json.dumps(drafter.state())))
    assert fresh.state() == drafter.state()
    assert fresh.state()["hope"] == pytest.approx(1 - 0.3 * 0.95**30)
    fresh.begin([0])
    drafter.begin([0])
    ours, theirs = (prospects_of(each) for each in (fresh, drafter))
    assert ours.probabilities == theirs.probabilities
    assert ours.draft_ms == pytest.approx(theirs.draft_ms)
    drafter.close()
    assert draft.closed


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"hope": "high"},
        {"hope": 1.5},
        {"hope": -1.0},
        {"hope": float("nan")},
        {"usual": [0.5], "usual_steps": 1.0},
        {"usual": [0.5] * LONGEST, "usual_steps": "one"},
        {"usual": [0.5] * LONGEST, "usual_steps": 99.0},
        {"usual": [1.5] * LONGEST, "usual_steps": 1.0},
        {"usual": ["0.5"] * LONGEST, "usual_steps": 1.0},
    ],
)
def test_a_state_that_is_of_no_use_is_ignored(
    clock: Clock, document: dict[str, Any] | None
) -> None:
    drafter, _ = drafter_of(counting, clock)
    before = drafter.state()
    drafter.load_state(document)
    assert drafter.state() == before
