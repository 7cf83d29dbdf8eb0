"""Lossless first: whatever is drafted, the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from branching import Branching
from decoding_cases import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_cases import (
    CURVES,
    DRAFTERS,
    MAKES_TREES,
    MODELS,
    ONE_HOT,
    PROMPT,
    RIGHT,
    Oracle,
    Shaped,
    V,
    Witness,
    check_text,
    copying_model,
    looping_model,
    plain,
    random_model,
    shapes_of_trees,
    uneven,
)

from edgespec.decode.engine import Engine
from edgespec.drafting.proposal import EMPTY, Proposal, StepContext
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.sampling.chain import logprob_of
from edgespec.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("frozen_clock")


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_is_plain_decoding(model: str, drafter: str, curve: str) -> None:
    """Token for token, for several texts in a row, the first of them twice."""
    next_logits = MODELS[model]
    backend = Witness(next_logits)
    engine = Engine(backend, curve=CURVES[curve](), drafter=DRAFTERS[drafter](next_logits))
    for prompt in (PROMPT, PROMPT[::-1], PROMPT, [7]):
        check_text(engine, next_logits, prompt, 60)
    if curve == "steep":
        assert set(backend.steps) == {1}
    if curve == "flat":
        assert max(backend.steps) > 4
        assert any(not tree.is_chain for tree in backend.trees) == (drafter in MAKES_TREES)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("model", MODELS)
def test_logprobs_are_those_of_plain_decoding(model: str, drafter: str) -> None:
    """Of the same rows: not one bit differs, drafted or not."""
    next_logits = MODELS[model]
    engine = Engine(Witness(next_logits), curve=uneven(), drafter=DRAFTERS[drafter](next_logits))
    for params in (SamplingParams(), SamplingParams(temperature=0.7, seed=5)):
        result = engine.generate(PROMPT, max_tokens=40, sampling=params, logprobs=3)
        text, expected = [*PROMPT], []
        for token in result.token_ids:
            expected.append(logprob_of(np.asarray(next_logits(tuple(text)), np.float32), token, 3))
            text.append(token)
        assert list(result.logprobs) == expected
        stream = engine.stream(PROMPT, max_tokens=40, sampling=params, logprobs=0)
        for chunk in stream:
            assert tuple(one.token for one in chunk.logprobs) == chunk.token_ids
        assert [one.best for one in stream.result.logprobs] == [()] * 40
    assert engine.generate(PROMPT, max_tokens=9).logprobs == ()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_without_rollback(model: str, drafter: str) -> None:
    """What cannot be taken back is never drafted."""
    next_logits = MODELS[model]
    backend = Witness(next_logits, rollback=False)
    engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](next_logits))
    check_text(engine, next_logits, PROMPT, 40)
    assert set(backend.steps) == {1}


@pytest.mark.parametrize(
    "drafter",
    list(DRAFTERS),
)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_output_of_a_backend_that_verifies_chains_only(model: str, drafter: str) -> None:
    """A drafter that proposes branches is then given chains, or nothing, to verify."""
    next_logits = MODELS[model]
    backend = Witness(next_logits, tree=False)
    engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](next_logits))
    for prompt in (PROMPT, PROMPT[::-1]):
        check_text(engine, next_logits, prompt, 60)
    assert all(tree.is_chain for tree in backend.trees)
    if drafter not in MAKES_TREES:
        assert max(backend.steps) > 4


@pytest.mark.parametrize("speculate", [False, True])
def test_greedy_output_without_a_curve_or_a_drafter(speculate: bool) -> None:
    for drafter, curve in ((SuffixDrafter(), None), (None, flat())):
        backend = Witness(random_model)
        engine = Engine(backend, drafter=drafter, curve=curve)
        result = engine.generate(PROMPT, max_tokens=30, speculate=speculate)
        assert list(result.token_ids) == plain(random_model, PROMPT, 30)
        assert set(backend.steps) == {1}


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 64])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_small_batches_and_steps_change_nothing(max_nodes: int, batch_size: int) -> None:
    backend = Witness(copying_model, max_nodes=max_nodes, batch_size=batch_size)
    engine = Engine(backend, curve=flat(), drafter=Oracle(copying_model, 6))
    check_text(engine, copying_model, PROMPT, 30)
    assert max(backend.steps) == min(max_nodes, 7)


def test_a_drafter_equal_to_the_target_has_all_its_tokens_accepted() -> None:
    """Four drafted and one bonus a round: 1 + 3 * 5 tokens, then room for three and a bonus."""
    backend = Witness(random_model)
    engine = Engine(backend, curve=flat(), drafter=Oracle(random_model, 4))
    result = engine.generate(PROMPT, max_tokens=20)
    assert backend.steps == [5, 5, 5, 4]
    counters = result.counters
    assert (counters.rounds, counters.drafted_tokens, counters.accepted_tokens) == (4, 15, 15)
    assert counters.acceptance_length == 19 / 4
    assert counters.generated_tokens == 20


def test_a_drafter_that_is_always_wrong_has_nothing_accepted() -> None:
    """One token a round, as in plain decoding; the acceptance length is 1.00."""
    wrong = Oracle(lambda context: [-logit for logit in looping_model(context)], 4)
    backend = Witness(looping_model)
    result = Engine(backend, curve=flat(), drafter=wrong).generate(PROMPT, max_tokens=20)
    assert list(result.token_ids) == plain(looping_model, PROMPT, 20)
    assert (result.counters.accepted_tokens, result.counters.rounds) == (0, 19)
    assert result.counters.acceptance_length == 1.0
    assert backend.steps == [5] * 15 + [4, 3, 2, 1]  # never more than may still be needed


def test_the_right_branch_of_a_tree_is_taken_wherever_it_is() -> None:
    """Three branches from the root, of which the last is right, and a wrong sibling below it."""
    shape = [(0, 0), (0, 1), (0, RIGHT), (3, 2), (3, RIGHT), (5, RIGHT)]

    def model(context: tuple[int, ...]) -> Sequence[float]:
        return ONE_HOT[3 + len(context) % 9]  # never one of the wrong tokens 0, 1, 2

    backend = Witness(model)
    engine = Engine(backend, curve=flat(), drafter=Shaped(model, [shape]))
    result = engine.generate(PROMPT, max_tokens=1 + 4 * 4 + 7)
    assert list(result.token_ids) == plain(model, PROMPT, 24)
    # While there is room for the whole tree, each round accepts the three right nodes.
    assert backend.steps == [7] * 5 + [3, 2, 1]
    assert result.counters.accepted_tokens == 5 * 3


@settings(max_examples=150)
@given(
    shapes_of_trees,
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(CURVES)),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
    st.integers(1, 30),
)
def test_no_shape_of_tree_changes_greedy_output(
    shapes: list[list[tuple[int, int]]], model: str, curve: str, prompt: list[int], count: int
) -> None:
    next_logits = MODELS[model]
    backend = Witness(next_logits, context_size=len(prompt) + 30)
    engine = Engine(backend, curve=CURVES[curve](), drafter=Shaped(next_logits, shapes))
    check_text(engine, next_logits, prompt, count)


# ------------------------------------------------------------------------------ where it ends


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_tokens_are_never_exceeded(drafter: str) -> None:
    for count in (*range(1, 13), 29):
        backend = Witness(looping_model)
        engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](looping_model))
        result = engine.generate(PROMPT, max_tokens=count)
        assert list(result.token_ids) == plain(looping_model, PROMPT, count)
        assert result.finish_reason == "length"
        assert result.counters.generated_tokens == count
        assert backend.length == len(PROMPT) + count - 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_context_is_filled_and_never_overrun(drafter: str) -> None:
    """The backend raises if a step does not fit, and so it would if a draft were too long."""
    for room in (*range(1, 13), 29):
        backend = Witness(looping_model, context_size=len(PROMPT) + room)
        engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](looping_model))
        result = engine.generate(PROMPT, max_tokens=1000)
        assert list(result.token_ids) == plain(looping_model, PROMPT, room)
        assert result.finish_reason == "context_full"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_end_token_ends_the_text_wherever_it_lies_in_a_draft(drafter: str) -> None:
    """Token 11 comes after `length` - 1 others; what was drafted and accepted after it is cut."""
    end = 11

    def model(context: tuple[int, ...]) -> Sequence[float]:
        ended = len(context) == len(PROMPT) + length - 1
        return ONE_HOT[end] if ended else looping_model(context)

    for length in range(1, 14):
        backend = Witness(model, end=end)
        engine = Engine(backend, curve=flat(), drafter=DRAFTERS[drafter](model))
        result = engine.generate(PROMPT, max_tokens=60)
        assert list(result.token_ids) == plain(model, PROMPT, 60, end=end)
        assert len(result.token_ids) == length
        assert result.finish_reason == "stop"
        assert result.counters.generated_tokens == length
        assert backend.cached == [*PROMPT, *result.token_ids[:-1]]


POEM = b"a rose is a rose is a rose, and a rose is not a nose."


def poem_model(context: tuple[int, ...]) -> Sequence[float]:
    """Writes the poem after a prompt of one token."""
    row = [0.0] * 128
    row[POEM[(len(context) - 1) % len(POEM)]] = 1.0
    return row


class PoemOracle(Oracle):
    def __init__(self, num_nodes: int) -> None:
        super().__init__(poem_model, num_nodes)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        size = min(self._num_nodes, context.max_nodes)
        tokens = [POEM[(len(self.text) - 1 + i) % len(POEM)] for i in range(size)]
        return Proposal(tokens, range(-1, size - 1), [1.0] * size)


STOPS = [("rose,",), ("is n", "rose, and"), (" ",), ("a rose is a rose",), ("x",), (".", "nose")]


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 8, 30])
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_stop_string_ends_the_text_wherever_it_lies_in_a_draft(
    stop: tuple[str, ...], num_nodes: int
) -> None:
    """Text before the first stop string, and the tokens up to the one that completed it."""
    text = POEM.decode()
    ends = sorted((text.index(s) + len(s), -len(s)) for s in stop if s in text)
    count, text = (ends[0][0], text[: sum(ends[0])]) if ends else (len(text), text)
    for drafter in (PoemOracle(num_nodes), SuffixDrafter(), Branching()):
        engine = Engine(Witness(poem_model, 128), curve=flat(), drafter=drafter)
        for speculate in (True, False, True):
            result = engine.generate([0], max_tokens=len(POEM), stop=stop, speculate=speculate)
            assert result.text == text
            assert bytes(result.token_ids) == POEM[:count]
            assert result.finish_reason == ("stop" if ends else "length")
