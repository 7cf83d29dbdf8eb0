"""What a draft model has read of the text: its cache, its window, its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from draft_model_cases import (
    EXIT,
    INF,
    LONGEST,
    Clock,
    Draft,
    V,
    context_of,
    counting,
    curve_of,
    drafter_of,
    estimate_of,
    observe,
    paths_of,
    quick,
    rough,
    sampler_of,
)
from fake_backend import FakeBackend
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decode.engine import Engine
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.proposal import EMPTY
from edgespec.errors import UnsupportedError
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler


@quick
@given(st.data())
def test_the_cache_begins_as_the_text_does(data: st.DataObject) -> None:
    """Whatever is accepted, and whether or not it is asked; what need not be fed again is not."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:  # how many it drafts depends on the time it takes
        patch.setattr("edgespec.drafting.model.perf_counter", clock)
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
            context = context_of(max_nodes=data.draw(st.sampled_from((1, 4, 15))))
            found = drafter.estimate(context)
            assert 0.0 <= found.read_ms < INF and 0.0 < found.node_ms < INF
            same = _num_common(draft.cached, text)
            assert drafter._text.shared == same
            main_chain: list[int] = []
            if data.draw(st.booleans()):
                fed = draft.fed
                proposal = drafter.propose(context)
                assert draft.cached[: len(text)] == text
                main_chain = list(sorted(paths_of(proposal), key=len)[-1])
                assert draft.cached[len(text) :] == list(drafter._main_chain)[:-1]
                drafted = len(draft.cached) - len(text)
                assert draft.fed - fed == len(text) - min(same, len(text) - 1) + drafted
            emitted = main_chain[: data.draw(st.integers(0, len(main_chain)))]
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
    drafter.propose(context_of(max_nodes=1))
    assert (draft.fed, draft.length) == (17, 17)
    drafter.begin([*range(8), *range(8), 6, 1])
    drafter.propose(context_of(max_nodes=1))
    assert (draft.fed, draft.length) == (17 + 2, 18)
    drafter.begin([*range(8)])  # the last token is fed again: its row was not kept
    drafter.propose(context_of(max_nodes=1))
    assert (draft.fed, draft.length) == (17 + 2 + 1, 8)


def test_a_forgotten_text_is_fed_again(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock)
    drafter.begin([*range(8), 0])
    drafter.propose(context_of(max_nodes=1))
    drafter.forget()
    assert (draft.length, drafter._text.shared) == (0, 0)
    drafter.begin([*range(8), 0])
    drafter.propose(context_of(max_nodes=1))
    assert (draft.fed, draft.length) == (9 + 9, 9)


def test_a_long_text_is_fed_in_batches(clock: Clock) -> None:
    drafter, draft = drafter_of(counting, clock, max_nodes=4, batch_size=10)
    text = [i * i % V for i in range(57)]
    drafter.begin(text)
    assert list(drafter.propose(context_of(max_nodes=1)).tokens) == [(text[-1] + 1) % V]
    assert draft.cached == text
    assert max(draft.steps) <= 4


def test_nothing_is_drafted_where_the_draft_models_context_ends(clock: Clock) -> None:
    """The longest draft must fit, so that nothing is ever cut off."""
    drafter, draft = drafter_of(counting, clock, context_size=20 + LONGEST)
    drafter.begin([i % V for i in range(20)])
    assert LONGEST - 4 < len(drafter.propose(context_of(max_nodes=31))) <= LONGEST
    assert len(estimate_of(drafter).probabilities) == 15
    observe(drafter, [4])
    assert len(drafter.propose(context_of())) == 0
    assert estimate_of(drafter).probabilities == ()
    drafter.begin([1, 2])
    assert len(drafter.propose(context_of())) > 0
    assert draft.length < 20


def test_a_window_is_all_that_is_read_of_a_text(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begins with the last tokens; again after more of them that others drafted, or when full."""
    monkeypatch.setattr("edgespec.drafting.model.WINDOW", 6)
    draft = Draft(counting, clock, 0.01, context_size=10 + LONGEST)
    drafter = ModelDrafter(draft, curve_of(*[0.01] * 16), V, early_exit=EXIT)
    drafter.begin([i % V for i in range(1000)])
    assert estimate_of(drafter).read_ms == pytest.approx(0.0)  # no more than six
    assert list(drafter.propose(context_of(max_nodes=1)).tokens) == [0]
    assert draft.cached == [2, 3, 4, 5, 6, 7]
    observe(drafter, [i % V for i in range(4)])  # ten: fits, and four are less than six
    drafter.propose(context_of(max_nodes=1))
    assert draft.cached == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    observe(drafter, [4])  # one too many
    drafter.propose(context_of(max_nodes=1))
    assert draft.cached == [7, 0, 1, 2, 3, 4]
    observe(drafter, [i % V for i in range(5, 12)])  # seven that it has not seen
    assert list(drafter.propose(context_of(max_nodes=1)).tokens) == [4]
    assert draft.cached == [6, 7, 0, 1, 2, 3]
    drafter.begin([3, 4])  # shorter than the window
    assert list(drafter.propose(context_of(max_nodes=1)).tokens) == [5]
    assert draft.cached == [3, 4]


@quick
@given(st.data())
def test_a_window_never_changes_what_follows_from_the_last_tokens(data: st.DataObject) -> None:
    """Rows that depend on two tokens are the same with a window as without, along any text."""
    clock = Clock()
    draft = Draft(rough, clock, 0.01, context_size=12 + LONGEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.drafting.model.WINDOW", 4)
        seeing = ModelDrafter(draft, curve_of(*[0.01] * 16), V, early_exit=EXIT)
    whole, _ = drafter_of(rough, clock)
    tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=9)
    text = data.draw(tokens)
    for drafter in (seeing, whole):
        drafter.begin(text)
    for _ in range(data.draw(st.integers(1, 8))):
        first, second = (d.propose(context_of(max_nodes=3)) for d in (seeing, whole))
        assert first.tokens[:1] == second.tokens[:1] or len(text) < 2
        emitted = data.draw(tokens)
        text = text + emitted
        assert draft.length <= 12 + LONGEST
        for drafter in (seeing, whole):
            observe(drafter, emitted)


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
        proposal = drafter.propose(context_of(sampler=sampler))
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
    proposal = drafter.propose(context_of(sampler=sampler))
    assert proposal.tokens and max(proposal.tokens) < V - 1


def test_a_text_that_the_draft_model_cannot_read_is_not_drafted_for(clock: Clock) -> None:
    draft = Draft(rough, clock, 0.01, vocab_size=5)
    drafter = ModelDrafter(draft, curve_of(*[0.01] * 16), V, 5)
    drafter.begin([1, 5])
    assert drafter.propose(context_of()) is EMPTY
    assert estimate_of(drafter).probabilities == ()
    drafter.begin([1, 2])
    assert drafter.propose(context_of()).tokens
    observe(drafter, [3, 6])
    assert drafter.propose(context_of()) is EMPTY
    assert draft.fed > 0 and max(draft.cached) < 5


def test_a_model_that_cannot_go_back_cannot_draft() -> None:
    with pytest.raises(UnsupportedError, match="cannot draft: pretended for a test") as caught:
        ModelDrafter(FakeBackend(rough, V, rollback=False), curve_of(1.0), V)
    assert "sliding windows" in caught.value.hint
