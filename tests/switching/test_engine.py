"""Two models in turns: the tokens say who writes, and each has its writer's distribution."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import count, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.fake import FakeBackend
from edgespec.backends.tree import DraftTree
from edgespec.bench.loaded_model import LoadedModel
from edgespec.decode.engine import Engine
from edgespec.decode.writers import LARGE, SMALL
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.drafting.proposal import Proposal
from edgespec.errors import BackendError, EdgespecWarning, UnsupportedError
from edgespec.measure.timing import measure_reads
from edgespec.memory.times.curve import CostCurve
from edgespec.sampling.params import SamplingParams
from edgespec.switching.engine import SwitchingEngine
from edgespec.switching.entropy import entropy_nats
from edgespec.switching.forecast import Trace, choose, forecast, writers
from edgespec.switching.policy import SwitchPolicy, SwitchPrices
from edgespec.switching.switch import Switch

VOCAB = 6
PROMPT = [1, 2, 3]


class Table:
    """Logits that depend on the last two tokens, by a seed; `sharp` ones repeat themselves."""

    def __init__(self, seed: int, scale: float) -> None:
        random = np.random.default_rng(seed)
        self._rows = random.normal(0.0, scale, (VOCAB, VOCAB, VOCAB)).astype(np.float32)

    def row(self, context: tuple[int, ...]) -> NDArray[np.float32]:
        before = context[-2] if len(context) > 1 else 0
        row: NDArray[np.float32] = self._rows[before, context[-1]]
        return row

    def __call__(self, context: tuple[int, ...]) -> Sequence[float]:
        return self.row(context).tolist()  # type: ignore[no-any-return]


LARGE_TABLE, SMALL_TABLE = Table(1, 2.0), Table(2, 1.5)


def flat_curve() -> CostCurve:
    """Steps cost the same whatever their size, so that drafts are always worth it."""
    return CostCurve([math.inf, *[1.0] * 16])


def engine(table: Table, drafts: bool, end: int = -1, tree: bool = True) -> Engine:
    backend = FakeBackend(table, VOCAB, end=end, tree=tree)
    drafter = SuffixDrafter() if drafts else None
    return Engine(backend, curve=flat_curve() if drafts else None, drafter=drafter)


def switching(policy: SwitchPolicy, drafts: bool = True, end: int = -1) -> SwitchingEngine:
    backend = FakeBackend(LARGE_TABLE, VOCAB, end=end)
    return SwitchingEngine(
        backend,
        small=engine(SMALL_TABLE, drafts, end),
        policy=policy,
        curve=flat_curve() if drafts else None,
        drafter=SuffixDrafter() if drafts else None,
    )


def always_switching(**values: float) -> SwitchPolicy:
    return SwitchPolicy(**{"only_where_it_pays": False, **values})  # type: ignore[arg-type]


POLICIES = [
    always_switching(up_nats=up, down_nats=down, window=window, min_stay=stay)
    for up, down, window, stay in (
        (1.2, 1.0, 1, 0),
        (1.2, math.inf, 1, 0),
        (1.1, 1.2, 3, 0),
        (1.2, 1.0, 1, 1),
        (1.0, 1.3, 1, 1),
        (1.1, 1.1, 3, 2),
        (1.3, 0.6, 2, 4),
    )
]


def obvious(policy: SwitchPolicy, count: int) -> tuple[list[int], list[str]]:
    """The rule written out for greedy decoding, with no cache and no drafts."""
    text, models = list(PROMPT), list[str]()
    writer, recent, stay, first = SMALL, list[float](), 0, True
    while len(models) < count:
        table = LARGE_TABLE if writer == LARGE else SMALL_TABLE
        row = table.row(tuple(text))
        recent = [*recent, entropy_nats(row)][-policy.window :]
        mean = sum(recent) / len(recent)
        if writer == SMALL and mean >= policy.up_nats and (first or stay >= policy.min_stay):
            writer, recent, stay, first = LARGE, [], 0, False
            continue
        text.append(int(np.argmax(row)))
        models.append(writer)
        stay += 1
        if writer == LARGE and mean <= policy.down_nats and stay >= policy.min_stay:
            writer, recent, stay, first = SMALL, [], 0, False
    return text[len(PROMPT) :], models


# -- the text ------------------------------------------------------------------------------


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


def test_benchmarks_give_both_models_a_drafter_that_has_seen_nothing() -> None:
    pair = switching(POLICIES[0])
    loaded = LoadedModel(pair, None, ["suffix", "suffix"], None)  # type: ignore[arg-type]
    used = []
    for place in (0, 1, 0):
        loaded.renew(place)
        loaded.answer(place, PROMPT, 20)
        used.append(pair.small.drafter)
    assert None not in used and len(set(map(id, used))) == 3


def test_benchmarks_count_for_later_runs_what_the_loaded_drafter_does_alone() -> None:
    alone = engine(LARGE_TABLE, drafts=True)
    assert alone.drafter is not None
    counted = alone.history
    loaded = LoadedModel(alone, None, ["recycling", alone.drafter.name], None)  # type: ignore[arg-type]
    loaded.answer(0, PROMPT, 20)
    assert len(counted) == 0
    rounds = loaded.answer(1, PROMPT, 20).counters.rounds
    assert len(counted) == rounds > 0


@pytest.mark.parametrize("model", [LARGE, SMALL])
def test_one_model_alone_writes_what_it_writes_alone(model: str) -> None:
    result = switching(SwitchPolicy.always(model)).generate(PROMPT, max_tokens=60)
    table = LARGE_TABLE if model == LARGE else SMALL_TABLE
    alone = engine(table, drafts=False).generate(PROMPT, max_tokens=60)
    assert result.token_ids == alone.token_ids
    assert [(span.model, span.start, span.end) for span in result.spans] == [(model, 0, 60)]
    assert result.turns == ((model, 60),)
    assert result.counters.switches == 0


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


def test_each_token_is_drawn_from_the_law_of_its_writer() -> None:
    """All texts of 3 tokens, 4,000 samples: a false alarm once in a million runs (chi-square)."""
    policy = POLICIES[0]
    expected = distribution_of_texts(policy, 3)
    model = switching(policy)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(4000):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        seen[model.generate(PROMPT, max_tokens=3, sampling=sampling).token_ids] += 1
    likely = [text for text, p in expected.items() if p * 4000 >= 5]
    assert sum(seen.values()) == 4000
    statistic = sum((seen[t] - 4000 * expected[t]) ** 2 / (4000 * expected[t]) for t in likely)
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
    small = Engine(Failing(at, **options), curve=flat_curve(), drafter=SuffixDrafter())
    policy = always_switching(up_nats=1.2, down_nats=1.0)
    return SwitchingEngine(FakeBackend(LARGE_TABLE, VOCAB), small=small, policy=policy)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_the_large_model_goes_on_where_the_small_one_fails(at: int) -> None:
    """What was written stays, the rest is the large model's, and so is every later answer."""
    whole = switching(always_switching(up_nats=1.2, down_nats=1.0)).generate(PROMPT, max_tokens=60)
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
    pair = switching(POLICIES[0])
    of_small = iter(pair.small.stream(PROMPT, max_tokens=9))
    next(of_small)
    cancelled: list[str] = []

    def wait_for_small() -> None:
        cancelled.append(pair.generate(PROMPT, max_tokens=9).finish_reason)

    thread = threading.Thread(target=wait_for_small, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    closing = threading.Thread(target=pair.close, daemon=True)
    closing.start()
    for one in (closing, thread):
        one.join(30)
        assert not one.is_alive()
    assert cancelled == ["cancelled"]
    assert list(of_small) == []


@pytest.mark.parametrize("padded", [LARGE, SMALL])
def test_tokens_that_pad_a_vocabulary_are_never_picked(padded: str) -> None:
    """The padding has the best logits here, which no model would do."""

    def longer(context: tuple[int, ...]) -> Sequence[float]:
        table = LARGE_TABLE if padded == LARGE else SMALL_TABLE
        return [*table(context), 99.0, 99.0]

    policy = SwitchPolicy(up_nats=1.2, down_nats=1.0, only_where_it_pays=False)
    pad = FakeBackend(longer, VOCAB + 2)
    if padded == LARGE:
        pair = SwitchingEngine(pad, small=engine(SMALL_TABLE, drafts=False), policy=policy)
    else:
        small = Engine(pad)
        pair = SwitchingEngine(FakeBackend(LARGE_TABLE, VOCAB), small=small, policy=policy)
    expected, _ = obvious(policy, 60)
    assert list(pair.generate(PROMPT, max_tokens=60).token_ids) == expected


# -- the rule ------------------------------------------------------------------------------


def test_entropy_of_known_rows() -> None:
    assert entropy_nats(np.zeros(8, np.float32)) == pytest.approx(math.log(8))
    certain = np.array([50.0, 0.0, -np.inf], np.float32)
    assert entropy_nats(certain) == pytest.approx(0.0, abs=1e-6)
    halves = np.array([3.0, 3.0, -np.inf], np.float32)
    assert entropy_nats(halves) == pytest.approx(math.log(2))
    assert entropy_nats(np.zeros(20_001, np.float32)) == pytest.approx(math.log(20_001))
    row = np.random.default_rng(0).normal(0.0, 3.0, 20_001).astype(np.float32)
    row[5000:15000] = -np.inf
    chances = np.exp(row.astype(np.float64))
    chances = chances[chances > 0] / chances.sum()
    expected = -(chances * np.log(chances)).sum()
    for shift in (0.0, 40.0, 200.0, -200.0):  # softmax does not see it; float32's exp does
        assert entropy_nats(row + np.float32(shift)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("writer", "unseen"), [(LARGE, 2), (SMALL, 3)])
def test_entropies_that_no_decision_sees_are_not_asked_for(writer: str, unseen: int) -> None:
    """With a window of 2 and stays of 4, the first mean that counts is over the last two."""
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, window=2, min_stay=4))
    assert switch.looks  # an answer may begin with either model
    handing_over = {SMALL: 9.0, LARGE: 0.0}
    for _ in range(50):
        switch.sees(handing_over[switch.writer])
        if switch.is_due:
            switch.change()
            if switch.writer == writer:
                break
    for _ in range(unseen):
        assert not switch.looks
        switch.sees(handing_over[writer])
    assert switch.looks and not switch.is_due


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_rows_of_which_nothing_can_be_chosen_have_no_entropy(row: list[float]) -> None:
    assert math.isnan(entropy_nats(np.array(row, np.float32)))


def test_drafts_are_worth_what_their_model_gets_to_write() -> None:
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, min_stay=1))
    assert switch.goes_on == pytest.approx(1 - 1 / 8)
    # One that may be of no token at all is of n more with a chance of (8 / 9)^n.
    assert Switch(always_switching()).goes_on == pytest.approx(8 / 9)
    assert Switch(SwitchPolicy.always(SMALL)).goes_on == 1.0
    assert Switch(SwitchPolicy(up_nats=0.0)).goes_on == 1.0
    never_down = Switch(SwitchPolicy(), lambda *_: -1.0)
    assert (never_down.writer, never_down.goes_on) == (LARGE, 1.0)
    proposal = Proposal((1, 2, 3, 4), (-1, 0, 1, -1), (0.9, 0.8, 0.7, 0.5))
    cut = proposal.cut_off(0.5)
    assert list(cut.tokens) == [1, 4, 2, 3] and list(cut.parents) == [-1, -1, 0, 2]
    assert list(cut.probabilities) == pytest.approx([0.9, 0.5, 0.4, 0.175])


def test_means_begin_anew_and_stays_are_kept() -> None:
    switch = Switch(always_switching(up_nats=1.0, down_nats=0.5, window=2, min_stay=2))
    assert not switch.sees(0.9)
    assert not switch.sees(1.0)  # mean 0.95
    assert switch.sees(1.1)  # mean 1.05, after two tokens
    switch.change()
    assert switch.writer == LARGE
    assert not switch.sees(0.1)
    assert not switch.is_due  # a stay of one token
    assert not switch.sees(0.2)
    assert switch.is_due  # mean 0.15; its token is kept
    assert switch.sees(0.0)  # and the next one is not its own
    switch.change()
    assert not switch.sees(9.0)
    assert not switch.sees(9.0)
    assert switch.sees(9.0)


def test_a_way_down_that_costs_more_than_it_saves_is_not_made() -> None:
    curve = CostCurve([math.inf, *(float(n) for n in range(4, 20))])  # a step of n: n + 3 ms
    cheap, dear = (CostCurve([math.inf, ms, *[ms] * 15]) for ms in (0.5, 3.9))
    policy = SwitchPolicy(up_nats=1.0, down_nats=0.5, expected_stay=4.0)
    for small, pays in ((cheap, True), (dear, False)):
        prices = SwitchPrices(curve, small)
        # 4 tokens at 4 ms against a step and 4 tokens of the small one, and 4 more to read.
        assert prices.saved_ms(4.0, 2, 0) == pytest.approx(16 - 5 * small.base[1] - 4)
        switch = Switch(policy, prices.saved_ms)
        assert switch.writer == (SMALL if pays else LARGE)
        if pays:
            assert switch.sees(2.0)
            switch.change()
        switch.sees(0.0)
        assert switch.is_due == pays


def test_what_an_average_stay_saves_is_between_whole_ones() -> None:
    curve = CostCurve([math.inf, *(float(n) for n in range(4, 20))])
    prices = SwitchPrices(curve, CostCurve([math.inf, *[0.5] * 16]))
    asked_in_vain = prices.saved_ms(0.0, 1, 0)
    assert asked_in_vain == pytest.approx(-0.5)  # it read one token
    one = prices.saved_ms(1.0, 1, 0)
    assert prices.saved_ms(0.25, 1, 0) == pytest.approx(0.75 * asked_in_vain + 0.25 * one)


def test_a_small_model_that_was_asked_in_vain_is_asked_again_later() -> None:
    """A stay of 3 pays; five refusals later none would, and 26 tokens later the average one."""
    policy = SwitchPolicy(up_nats=1.0, down_nats=math.inf, expected_stay=3.0)
    switch = Switch(policy, lambda stay, _missed, _depth: stay - 1.5)
    assert switch.writer == SMALL
    refusals = 0
    while switch.writer == SMALL:
        assert switch.sees(9.0)
        switch.change()
        refusals += 1
        switch.sees(0.0)
        if switch.is_due:
            switch.change()
    assert refusals == 4  # 3.0, 2.4, 1.92, 1.54, 1.23
    waited = 1
    while not switch.is_due:
        switch.sees(0.0)
        waited += 1
    stay = 3.0 * 0.8**4
    expected = next(n for n in count(1) if 3.0 - (3.0 - stay) * 0.98**n > 1.5)
    assert waited == expected + 1


def test_catching_up_is_priced_as_it_is_done() -> None:
    """Reading for one row of logits, and the next step, which builds its graph anew."""
    steps = CostCurve([math.inf, *(10.0 + n for n in range(1, 9))], change_ms=0.5)
    reads = CostCurve([math.inf, 11.0, math.inf, math.inf, 12.5])
    prices = SwitchPrices(steps, steps, reads, None)
    assert prices.catch_up_ms(LARGE, 4, 0) == 12.5 + 0.5
    assert prices.catch_up_ms(SMALL, 4, 0) == 14.0 + 0.5
    assert prices.catch_up_ms(LARGE, 1, 0) == 11.0


@pytest.mark.parametrize(
    ("tick_s", "sizes"), [(0.01, [1, 2, 4, 8, 16, 32]), (0.2, [1, 2, 8]), (9.0, [1, 8])]
)
def test_reads_are_measured_for_a_second_the_most_useful_first(
    tick_s: float, sizes: list[int]
) -> None:
    """With a clock that ticks when it is looked at, four times for each read."""
    times = (tick_s * n for n in count())
    curve = CostCurve([math.inf, 5.0], depth_ms=0.25)
    reads = measure_reads(FakeBackend(LARGE_TABLE, VOCAB), curve, clock=lambda: next(times))
    measured = {size: ms for size, ms in enumerate(reads.base) if ms != math.inf}
    assert measured == pytest.approx(dict.fromkeys(sizes, 1e3 * tick_s))
    assert reads.depth_ms == 0.25 and reads.scaled(2.0).base[8] == pytest.approx(2e3 * tick_s)


def test_turns_are_priced_by_hand() -> None:
    large = CostCurve([math.inf, *(10.0 + n for n in range(1, 9))])
    small = CostCurve([math.inf, *(1.0 + n for n in range(1, 9))])
    prices = SwitchPrices(large, small, prompt_ms=0.5)
    turns = [(SMALL, 3), (LARGE, 2), (SMALL, 1)]
    # Two steps and a thrown row of the small one; the large one reads 5 of the prompt and 3 and
    # goes on by one; the small one reads 2.
    assert prices.turns_ms(turns, 5) == 2 * 2.0 + 2.0 + 8 * 0.5 + 11.0 + 3.0
    # Nothing of the prompt: its own last token and 3.
    assert prices.turns_ms(turns, 5, 5) == 2 * 2.0 + 2.0 + 14.0 + 11.0 + 3.0
    # The small one reads 2 and hands back; the large one goes on with its own last token.
    asked = [(LARGE, 2), (SMALL, 0), (LARGE, 2)]
    assert prices.turns_ms(asked, 5, 5) == 11.0 + 3.0 + 2 * 11.0


@pytest.mark.parametrize(
    "values",
    [
        {"window": 0},
        {"min_stay": -1},
        {"expected_stay": -0.5},
        {"expected_stay": math.inf},
        {"window": 1.5},
        {"up_nats": math.nan},
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError):
        SwitchPolicy(**values)  # type: ignore[arg-type]


# -- forecasts -----------------------------------------------------------------------------


def traces() -> list[Trace]:
    """Texts in which the models differ where the small one is unsure."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(8):
        small = random.exponential(1.0, 200)
        agrees = random.random(200) > small / 4
        made.append(Trace((0.7 * small).tolist(), small.tolist(), agrees.tolist(), 20))
    return made


def prices() -> SwitchPrices:
    large = CostCurve([math.inf, *(9.0 + 0.5 * n for n in range(1, 33))])
    return SwitchPrices(large, CostCurve([math.inf, *(3.0 + 0.2 * n for n in range(1, 33))]))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forecast_runs_the_rule_itself(policy: SwitchPolicy) -> None:
    text, models = obvious(policy, 60)
    contexts = [(*PROMPT, *text[:place]) for place in range(60)]
    trace = Trace(
        [entropy_nats(LARGE_TABLE.row(c)) for c in contexts],
        [entropy_nats(SMALL_TABLE.row(c)) for c in contexts],
        [True] * 60,
    )
    said, turns = writers(policy, trace, prices())
    assert said == models == [model for model, tokens in turns for _ in range(tokens)]
    assert tuple(turns) == switching(policy, drafts=False).generate(PROMPT, max_tokens=60).turns


def test_single_models_are_the_ends_of_every_forecast() -> None:
    large, small = (forecast(SwitchPolicy.always(m), traces(), prices()) for m in (LARGE, SMALL))
    assert (large.large_share, large.quality, large.agreement) == (1.0, 1.0, 1.0)
    assert (small.large_share, small.quality) == (0.0, 0.0)
    assert large.ms_per_token == pytest.approx(9.5)
    assert small.ms_per_token == pytest.approx(3.2)


def test_thresholds_are_chosen_for_a_share_or_a_quality() -> None:
    for share in (0.2, 0.4, 0.7):
        found, _ = choose(traces(), prices(), large_share=share)
        assert found.large_share == pytest.approx(share, abs=0.03)
    better, _ = choose(traces(), prices(), quality=0.8)
    worse, _ = choose(traces(), prices(), quality=0.3)
    assert better.quality >= 0.8
    assert worse.quality >= 0.3
    assert worse.ms_per_token < better.ms_per_token
