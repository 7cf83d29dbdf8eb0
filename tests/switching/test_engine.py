"""Two models in turns: the text is that of the rule written out, whoever writes and drafts."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from decoding_cases import Gate
from fake_backend import FakeBackend
from frozen_times import free_drafts
from switching_cases import (
    LARGE_TABLE,
    POLICIES,
    PROMPT,
    SMALL_TABLE,
    VOCAB,
    engine,
    obvious,
    switching,
)
from waiting import PATIENCE_S, in_thread, join, until

from edgespec.backends.base import DraftTree
from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL
from edgespec.drafting.proposal import EMPTY, Proposal, StepContext
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import BackendError, EdgespecWarning, UnsupportedError
from edgespec.sampling.params import SamplingParams
from edgespec.switching.engine import Switch, SwitchingEngine, entropy_nats
from edgespec.switching.planning import SwitchPolicy


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_is_that_of_the_rule_written_out(policy: SwitchPolicy, drafts: bool) -> None:
    result = switching(policy, drafts).generate(PROMPT, max_tokens=80)
    expected, models = obvious(policy, 80)
    assert list(result.token_ids) == expected
    said = [span.model for span in result.spans for _ in range(span.start, span.end)]
    assert said == models == [model for model, tokens in result.turns for _ in range(tokens)]
    if policy.down_nats != math.inf:  # with which a turn is too short for drafts
        assert (result.counters.accepted_tokens > 0) == drafts
    assert len({*models}) == 2, "a policy that never switches tests nothing"


@pytest.mark.parametrize("model", [LARGE, SMALL])
def test_one_model_alone_writes_what_it_writes_alone(model: str) -> None:
    result = switching(SwitchPolicy.always(model)).generate(PROMPT, max_tokens=60)
    table = LARGE_TABLE if model == LARGE else SMALL_TABLE
    alone = engine(table, drafts=False).generate(PROMPT, max_tokens=60)
    assert result.token_ids == alone.token_ids
    assert [(span.model, span.start, span.end) for span in result.spans] == [(model, 0, 60)]
    assert result.turns == ((model, 60),)
    assert result.counters.switches == 0


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_tokens_with_and_without_drafts(policy: SwitchPolicy) -> None:
    for seed in range(5):
        sampling = SamplingParams(temperature=0.8, repetition_penalty=1.1, seed=seed)
        drafted, plain = (
            switching(policy, drafts).generate(PROMPT, max_tokens=60, sampling=sampling)
            for drafts in (True, False)
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.spans == plain.spans


@pytest.mark.parametrize("samples", [1000, pytest.param(4000, marks=pytest.mark.long)])
def test_each_token_is_drawn_from_the_law_of_its_writer(samples: int) -> None:
    """All texts of 3 tokens: a false alarm once in a million runs (chi-square)."""
    policy = POLICIES[0]
    expected = distribution_of_texts(policy, 3)
    model = switching(policy)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        seen[model.generate(PROMPT, max_tokens=3, sampling=sampling).token_ids] += 1
    likely = [text for text, p in expected.items() if p * samples >= 5]
    assert sum(seen.values()) == samples
    statistic = sum(
        (seen[t] - samples * expected[t]) ** 2 / (samples * expected[t]) for t in likely
    )
    freedom = len(likely)
    assert statistic < freedom + 5.0 * math.sqrt(2 * freedom) + 12


def distribution_of_texts(policy: SwitchPolicy, count: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of `count` tokens."""
    distribution = {}
    for text in product(range(VOCAB), repeat=count):
        switch, chance = Switch(policy), 1.0
        for place, token in enumerate(text):
            context = (*PROMPT, *text[:place])
            if switch.is_due:
                switch.change()
            if switch.writer == SMALL and switch.sees(entropy_nats(SMALL_TABLE.row(context))):
                switch.change()
            table = LARGE_TABLE if switch.writer == LARGE else SMALL_TABLE
            if switch.writer == LARGE:
                switch.sees(entropy_nats(LARGE_TABLE.row(context)))
            weights = np.exp(table.row(context).astype(np.float64))
            chance *= float(weights[token] / weights.sum())
        distribution[text] = chance
    return distribution


def test_spans_cover_all_tokens_and_chunks_say_who_wrote_them() -> None:
    stream = switching(POLICIES[0]).stream(PROMPT, max_tokens=50)
    said = [chunk.model for chunk in stream for _ in chunk.token_ids]
    spans, turns = stream.result.spans, stream.result.turns
    assert sum(tokens for _, tokens in turns) == len(stream.result.token_ids)
    assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
    assert (spans[0].start, spans[-1].end) == (0, 50)
    assert said == [span.model for span in spans for _ in range(span.start, span.end)]
    assert stream.result.counters.switches >= len(spans) - 1


def test_an_end_token_ends_the_text_of_both_models() -> None:
    free = switching(POLICIES[0]).generate(PROMPT, max_tokens=80).token_ids
    for end in {*free}:
        result = switching(POLICIES[0], end=end).generate(PROMPT, max_tokens=80)
        assert result.token_ids == free[: free.index(end) + 1]
        assert result.finish_reason == "stop"


def test_a_cancelled_text_can_be_gone_on_with() -> None:
    """As a chat does: what both models hold of the text is used again."""
    model = switching(POLICIES[0])
    stream = model.stream(PROMPT, max_tokens=40)
    for _ in stream:
        if len(stream.result.token_ids) >= 20:
            break
    stream.close()
    begun = [*PROMPT, *stream.result.token_ids]
    again = model.generate(begun, max_tokens=20, reuse=True)
    assert again.token_ids == switching(POLICIES[0]).generate(begun, max_tokens=20).token_ids
    assert again.counters.reused_tokens > len(PROMPT)


class Failing(FakeBackend):
    """Fails at its step number `at`, counted from 0, or when it keeps what was accepted there."""

    def __init__(self, at: int, *, in_commit: bool = False, **options: Any) -> None:
        super().__init__(SMALL_TABLE, VOCAB, **options)
        self.at, self.in_commit, self.calls = at, in_commit, 0

    def _step(self) -> None:
        self.calls += 1
        if self.calls > self.at and not self.in_commit:
            raise BackendError("llama_decode failed with -3")

    def prefill(self, tokens: Sequence[int]) -> Any:
        self._step()
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Any:
        self._step()
        return super().verify(tree)

    def commit(self, path: Sequence[int]) -> None:
        if self.calls > self.at:
            raise BackendError("llama_memory_seq_rm failed")
        super().commit(path)


def failing(at: int, **options: Any) -> SwitchingEngine:
    small = Engine(Failing(at, **options), curve=free_drafts(16), drafter=SuffixDrafter())
    policy = SwitchPolicy(up_nats=1.2, down_nats=1.0)
    return SwitchingEngine(FakeBackend(LARGE_TABLE, VOCAB), small=small, policy=policy)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_the_large_model_goes_on_where_the_small_one_fails(at: int) -> None:
    """What was written stays, the rest is the large model's, and so is every later answer."""
    whole = switching(SwitchPolicy(up_nats=1.2, down_nats=1.0)).generate(PROMPT, max_tokens=60)
    pair = failing(at)
    with pytest.warns(EdgespecWarning, match="the small model failed.*failed with -3"):
        result = pair.generate(PROMPT, max_tokens=60)
    assert pair.draft_failure == "llama_decode failed with -3"
    assert len(result.token_ids) == 60 and result.spans[-1].model == LARGE
    last = result.spans[-1].start
    assert result.token_ids[:last] == whole.token_ids[:last]
    alone = Engine(FakeBackend(LARGE_TABLE, VOCAB))
    rest = alone.generate([*PROMPT, *result.token_ids[:last]], max_tokens=60 - last)
    assert result.token_ids[last:] == rest.token_ids
    again = pair.generate(PROMPT, max_tokens=20)
    assert again.token_ids == alone.generate(PROMPT, max_tokens=20).token_ids
    assert {span.model for span in again.spans} == {LARGE}


def test_a_small_model_that_fails_with_tokens_picked_ends_the_answer() -> None:
    """The sampler and a grammar have counted them, and the large model would not write them."""
    with pytest.raises(BackendError, match="seq_rm"):
        failing(3, in_commit=True).generate(PROMPT, max_tokens=60)


def test_counters_tell_decoding_from_catching_up() -> None:
    counters = switching(POLICIES[0], drafts=False).generate(PROMPT, max_tokens=60).counters
    assert counters.generated_tokens == 60
    assert counters.accepted_tokens + counters.rounds == 59  # the first one came of the prompt
    assert counters.caught_up_tokens >= counters.switches > 2
    assert 0.0 < counters.catch_up_s < counters.decode_s


class Resting(SuffixDrafter):
    """Guesses nothing, and is asked again many steps later."""

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        return EMPTY

    def cooldown(self) -> int:
        return 1000


def test_steps_before_a_hand_over_are_learned_of() -> None:
    small = Engine(FakeBackend(SMALL_TABLE, VOCAB), curve=free_drafts(16), drafter=Resting())
    pair = SwitchingEngine(FakeBackend(LARGE_TABLE, VOCAB), small=small, policy=POLICIES[-1])
    turns = pair.generate(PROMPT, max_tokens=60).turns
    # The first token of a turn comes of what is caught up with.
    assert len(small.history) == sum(tokens - 1 for model, tokens in turns if model == SMALL)


def test_closing_it_closes_both_models() -> None:
    model = switching(POLICIES[0])
    model.close()
    model.close()
    for backend in (model.backend, model.small.backend):
        assert isinstance(backend, FakeBackend)
        assert backend.closed


def test_closing_it_closes_both_models_whatever_fails() -> None:
    def fail() -> None:
        raise OSError("disk full")

    model = SwitchingEngine(
        FakeBackend(LARGE_TABLE, VOCAB),
        small=Engine(FakeBackend(SMALL_TABLE, VOCAB), on_close=fail),
        policy=POLICIES[0],
        on_close=fail,
    )
    with pytest.raises(OSError, match="disk full"):
        model.close()
    for backend in (model.backend, model.small.backend):
        assert isinstance(backend, FakeBackend)
        assert backend.closed


def test_the_small_model_waits_while_the_pair_writes() -> None:
    pair = switching(POLICIES[0])
    stream = iter(pair.stream(PROMPT, max_tokens=60))
    tokens = [*next(stream).token_ids]
    found: list[tuple[int, ...]] = []

    def ask_small() -> None:
        found.append(pair.small.generate(PROMPT, max_tokens=9).token_ids)

    thread = threading.Thread(target=ask_small, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    for chunk in stream:
        tokens += chunk.token_ids
    thread.join(30)
    assert not thread.is_alive()
    expected, _ = obvious(POLICIES[0], 60)
    assert tokens == expected
    assert found == [engine(SMALL_TABLE, drafts=False).generate(PROMPT, max_tokens=9).token_ids]


def test_closing_a_pair_ends_its_stream_and_one_of_the_small_model() -> None:
    gate = Gate(SMALL_TABLE, length=len(PROMPT) + 2)
    small = Engine(FakeBackend(gate, VOCAB))
    pair = SwitchingEngine(FakeBackend(LARGE_TABLE, VOCAB), small=small, policy=POLICIES[0])
    running, written = in_thread(lambda: small.generate(PROMPT, max_tokens=9))
    assert gate.reached.wait(PATIENCE_S)
    waiting, cancelled = in_thread(lambda: pair.generate(PROMPT, max_tokens=9).finish_reason)
    until(lambda: small.scheduler._guest_until_s)  # the pair asks for the small model
    assert waiting.is_alive()
    closing, _ = in_thread(pair.close)
    join(waiting)
    assert cancelled == ["cancelled"] and closing.is_alive()
    until(lambda: small.scheduler._running[0].was_closed)
    gate.opened.set()
    join(closing)
    join(running)
    assert (len(written[0].token_ids), written[0].finish_reason) == (3, "cancelled")


def test_a_pairs_stream_that_is_not_read_on_is_no_deadlock() -> None:
    """Who waits for the pair in the same thread makes its steps, and no one else has the small."""
    pair = switching(POLICIES[0])
    stream = pair.stream(PROMPT, max_tokens=60)
    tokens = [*next(iter(stream)).token_ids]
    with pytest.raises(UnsupportedError, match="works on its cache"):
        pair.small.generate(PROMPT, max_tokens=3)
    expected, _ = obvious(POLICIES[0], 60)
    assert list(pair.generate(PROMPT, max_tokens=60).token_ids) == expected
    assert [*tokens, *(token for chunk in stream for token in chunk.token_ids)] == expected
    assert len(pair.small.generate(PROMPT, max_tokens=3).token_ids) == 3


@pytest.mark.parametrize("padded", [LARGE, SMALL])
def test_tokens_that_pad_a_vocabulary_are_never_picked(padded: str) -> None:
    """The padding has the best logits here, which no model would do."""

    def longer(context: tuple[int, ...]) -> Sequence[float]:
        table = LARGE_TABLE if padded == LARGE else SMALL_TABLE
        return [*table(context), 99.0, 99.0]

    policy = SwitchPolicy(up_nats=1.2, down_nats=1.0)
    pad = FakeBackend(longer, VOCAB + 2)
    if padded == LARGE:
        pair = SwitchingEngine(pad, small=engine(SMALL_TABLE, drafts=False), policy=policy)
    else:
        small = Engine(pad)
        pair = SwitchingEngine(FakeBackend(LARGE_TABLE, VOCAB), small=small, policy=policy)
    expected, _ = obvious(policy, 60)
    assert list(pair.generate(PROMPT, max_tokens=60).token_ids) == expected
