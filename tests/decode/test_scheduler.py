"""Several generations at once: each answer is the one given alone, and each gets its turn."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any
from unittest.mock import Mock

import pytest
from fake_backend import FakeBackend
from simulated_time import Clock
from waiting import PATIENCE_S, until

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.options import GenerationOptions
from edgespec.decode.step import Job
from edgespec.drafting.proposal import Drafter
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter, Text, TextIndex
from edgespec.errors import BackendError, ContextFullError, UnsupportedError
from edgespec.memory.times import CostCurve
from edgespec.sampling.params import SamplingParams

INF = float("inf")
VOCAB, END = 24, 23


def babble(context: tuple[int, ...]) -> Sequence[float]:
    """Logits of a text that repeats itself now and then, by its last three tokens."""
    rng = random.Random(hash(context[-3:]))
    row = [4.0 * rng.random() for _ in range(VOCAB)]
    row[(context[-1] * 5 + 1) % (VOCAB - 1)] += 3.0
    row[END] -= 2.0
    return row


def flat(nodes: int = 40) -> CostCurve:
    """All sizes cost the same: everything that is proposed is verified."""
    return CostCurve([INF, *[1.0] * nodes])


def engine_of(
    users: int,
    drafter: type[Drafter] | None = SuffixDrafter,
    *,
    logits: Callable[[tuple[int, ...]], Sequence[float]] = babble,
    **options: Any,
) -> Engine:
    backend = FakeBackend(logits, VOCAB, end=END, users=users, **{"max_nodes": 32, **options})
    if drafter is None:
        return Engine(backend)
    more = [drafter() for _ in range(users - 1)]
    return Engine(backend, curve=flat(), drafter=drafter(), more_drafters=more)


def asks(seed: int, count: int) -> list[tuple[list[int], GenerationOptions]]:
    """Prompts and options of some generations, greedy and with a seed."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 120))]
        sampling = SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(100))
        asked = GenerationOptions(
            max_tokens=rng.randrange(1, 60),
            sampling=sampling,
            reuse=rng.random() < 0.5,
            speculate=rng.random() < 0.8,
        )
        found.append((prompt, asked))
    return found


def all_at_once(engine: Engine, asked: Sequence[tuple[list[int], GenerationOptions]]) -> list[Any]:
    with ThreadPoolExecutor(len(asked)) as pool:
        made = [pool.submit(engine.generate, prompt, options) for prompt, options in asked]
        return [one.result(PATIENCE_S) for one in made]


def alone(prompt: list[int], options: GenerationOptions) -> Result:
    with engine_of(1, drafter=None) as engine:
        return engine.generate(prompt, options)


# --------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("drafter", [None, SuffixDrafter, RecyclingDrafter])
@pytest.mark.parametrize("feeds_again", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_each_answer_is_the_one_given_alone(
    seed: int, feeds_again: bool, drafter: type[Drafter] | None
) -> None:
    """Whoever comes and goes meanwhile, with prefixes shared and cells given to others."""
    asked = asks(seed, 12)
    asked += [([*prompt, 1, 2, 3], options) for prompt, options in asked[:4]]
    options: dict[str, Any] = {"feeds_again": feeds_again, "context_size": 256, "cells": 500}
    with engine_of(4, drafter, **options) as engine:
        results = all_at_once(engine, asked)
    for (prompt, options_), result in zip(asked, results, strict=True):
        expected = alone(prompt, options_)
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.finish_reason == expected.finish_reason


def test_texts_share_steps_and_their_drafts() -> None:
    """Fewer steps than tokens of the longest answer, and more nodes than texts in one."""
    prompt = [1, 2, 3, 4] * 8
    with engine_of(4) as engine:
        asked = [(prompt, GenerationOptions(max_tokens=80)) for _ in range(4)]
        results = all_at_once(engine, asked)
        assert isinstance(engine.backend, FakeBackend)
        steps = engine.backend.steps
    assert max(steps) > 4 and max(steps) <= 32
    assert len(steps) < sum(one.counters.rounds for one in results)
    assert sum(steps) == sum(r.counters.rounds + r.counters.drafted_tokens for r in results)


def test_a_step_has_room_for_fewer_texts_than_there_are() -> None:
    asked = asks(5, 6)
    with engine_of(6, max_nodes=4) as engine:
        results = all_at_once(engine, asked)
        assert isinstance(engine.backend, FakeBackend)
        assert max(engine.backend.steps) <= 4
    assert [r.token_ids for r in results] == [alone(*one).token_ids for one in asked]


# -------------------------------------------------------------------------- who may begin


class Slow(FakeBackend):
    """Waits before each joint step until the test lets it go on; a step takes 1 ms of its clock."""

    def __init__(
        self, logits: Callable[[tuple[int, ...]], Sequence[float]] = babble, **options: Any
    ) -> None:
        self.gate, self.clock = threading.Semaphore(0), Clock()
        self.together: list[int] = []  # texts of each step
        super().__init__(logits, VOCAB, **options)

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        assert self.gate.acquire(timeout=PATIENCE_S)
        self.together.append(len(steps))
        self.clock.ms += 1.0
        return super().verify_together(steps, pieces)


def known_to(engine: Engine) -> int:
    """Generations that run or wait."""
    scheduler = engine.scheduler
    return len(scheduler._running) + len(scheduler._waiting)


def test_cells_for_three_of_eight_run_three_and_none_fails() -> None:
    backend = Slow(users=8, context_size=100, cells=3 * 50)
    asked = [([n + 1] * 20, GenerationOptions(max_tokens=30)) for n in range(8)]
    with Engine(backend) as engine, ThreadPoolExecutor(8) as pool:
        made = [pool.submit(engine.generate, *one) for one in asked]
        until(lambda: known_to(engine) == 8)
        backend.gate.release(10_000)
        results = [one.result(PATIENCE_S) for one in made]
    assert max(backend.together) == 3
    assert [r.finish_reason for r in results] == ["length"] * 8
    assert [r.token_ids for r in results] == [alone(*one).token_ids for one in asked]


@pytest.mark.parametrize("written", [60, 180])
def test_as_many_answer_at_once_as_fit_whatever_they_might_have_written(
    written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of up to 200 cells each, in 500: promised 84 at first, and more while they write.

    Who gets none meanwhile waits and goes on; each answer is the one given alone.
    """

    def text(context: tuple[int, ...]) -> Sequence[float]:
        row = list(babble(context))
        row[END] += 1000.0 if len(context) >= 19 + written else -1000.0
        return row

    backend = Slow(text, end=END, users=4, context_size=200, cells=500)
    backend.clock.use(monkeypatch)  # how much of prompts a step reads depends on its time
    asked = [([n + 1] * 20, GenerationOptions(max_tokens=180)) for n in range(4)]
    with Engine(backend) as engine, ThreadPoolExecutor(4) as pool:
        made = [pool.submit(engine.generate, *one) for one in asked]
        until(lambda: known_to(engine) == 4)
        backend.gate.release(10_000)
        results = [one.result(PATIENCE_S) for one in made]
    assert max(backend.together) == 4
    assert {len(r.token_ids) for r in results} == {written}
    for (prompt, options), result in zip(asked, results, strict=True):
        with Engine(FakeBackend(text, VOCAB, end=END, context_size=200)) as one:
            assert result.token_ids == one.generate(prompt, options).token_ids


def test_what_never_fits_is_refused_with_its_numbers() -> None:
    with engine_of(2, context_size=50, cells=60) as engine:
        with pytest.raises(ContextFullError, match="the prompt has 50 tokens and the context 50"):
            engine.stream([1] * 50)


def test_what_no_cells_are_there_for_is_refused_and_does_not_wait_for_ever() -> None:
    """Where a sequence may be longer than all cells together."""
    with engine_of(2, context_size=100, cells=60) as engine:
        with pytest.raises(ContextFullError, match="up to 50, and the cache has room for 60"):
            engine.generate([1] * 30, max_tokens=50)
        assert len(engine.generate([1] * 30, max_tokens=20).token_ids) > 0


def test_a_queue_does_not_wake_up_with_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one user: each of those who wait would need the interpreter's lock."""
    gate = threading.Event()

    def babble_later(context: tuple[int, ...]) -> Sequence[float]:
        assert gate.wait(PATIENCE_S)
        return babble(context)

    woken = 0
    with engine_of(1, drafter=None, logits=babble_later) as engine, ThreadPoolExecutor(5) as pool:
        condition = engine.scheduler._change
        notify_all = condition.notify_all

        def counted() -> None:
            nonlocal woken
            woken += 1
            notify_all()

        monkeypatch.setattr(condition, "notify_all", counted)
        made = [pool.submit(engine.generate, [7, 8, n], max_tokens=60) for n in range(5)]
        until(lambda: known_to(engine) == 5)
        gate.set()
        tokens = sum(len(one.result(PATIENCE_S).token_ids) for one in made)
    assert tokens == 300 and woken < 240, "184 at most, and 300 if each token woke them"


@pytest.mark.parametrize("apart", [False, True])
def test_a_long_prompt_is_read_in_pieces_by_the_steps_of_others(apart: bool) -> None:
    """Or between them: the answer under way goes on at least every few tokens of the prompt."""
    runs: list[str] = []

    class Noting(FakeBackend):
        shares_cells = not apart

        def prefill(self, tokens: Sequence[int]) -> Logits:
            runs.append("read")
            return super().prefill(tokens)

        def verify_together(
            self,
            steps: Sequence[tuple[int, DraftTree]],
            pieces: Sequence[tuple[int, Sequence[int]]] = (),
        ) -> list[Logits]:
            runs.append("step")
            sleep(0.001)  # the second text arrives while the first goes on
            return super().verify_together(steps, pieces)

    backend = Noting(babble, VOCAB, users=2, context_size=4096)
    with Engine(backend) as engine:
        first = engine.stream([1, 2], max_tokens=2900)
        chunks = iter(first)
        next(chunks)
        second = engine.generate([3] * 1000, max_tokens=2)
        first.close()
    assert len(second.token_ids) == 2 and sum(backend.reads) == 1002
    if apart:
        end = len(runs) - runs[::-1].index("read")
        assert "read read" not in " ".join(runs[runs.index("step") : end])
    else:
        assert runs.count("read") == 1, "the first prompt, which nobody waited for"


# ------------------------------------------------------------------------------- prefixes


@pytest.mark.parametrize("users", [1, 2])
def test_a_long_prompt_is_indexed_with_the_pieces_that_are_read(users: int) -> None:
    """No step of others waits until all of it is: 4 us a token, 160 ms of 40,000."""
    added: list[int] = []

    class Watched(TextIndex):
        def extend(self, text: Text, tokens: Sequence[int]) -> Text:
            added.append(len(tokens))
            return super().extend(text, tokens)

    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB - 1) for _ in range(600)]
    backend = FakeBackend(babble, VOCAB, end=END, users=users, max_nodes=32, batch_size=50)
    drafter = SuffixDrafter(Watched())
    with Engine(backend, curve=flat(), drafter=drafter) as engine:
        result = engine.generate(prompt, max_tokens=5)
    assert sum(added) >= 600 and max(added) <= 50 + 1  # and the first token
    assert result.token_ids == alone(prompt, GenerationOptions(max_tokens=5)).token_ids


def test_a_shared_prefix_is_read_once() -> None:
    system = [random.Random(1).randrange(VOCAB - 1) for _ in range(100)]
    asked = [([*system, n, n + 1], GenerationOptions(max_tokens=10, reuse=True)) for n in range(8)]
    with engine_of(8) as engine:
        results = all_at_once(engine, asked)
    assert sorted(r.counters.reused_tokens for r in results) == [0] + [100] * 7
    assert [r.token_ids for r in results] == [alone(*one).token_ids for one in asked]


def test_shared_cells_count_once() -> None:
    """Cells for one prompt and eight answers are enough for all eight at once."""
    backend = Slow(users=8, context_size=200, cells=100 + 8 * 20)
    prompt = [n % (VOCAB - 1) for n in range(99)]
    asked = [(prompt, GenerationOptions(max_tokens=10, reuse=True)) for n in range(8)]
    with Engine(backend) as engine, ThreadPoolExecutor(8) as pool:
        made = [pool.submit(engine.generate, *one) for one in asked]
        until(lambda: known_to(engine) == 8)
        backend.gate.release(7)  # one prompt is read a turn
        until(lambda: len(engine.scheduler._running) == 8)
        backend.gate.release(1000)
        results = [one.result(PATIENCE_S) for one in made]
        assert engine.generate([5] * 150, max_tokens=20).token_ids  # all of these cells are free
    assert len({one.token_ids for one in results}) == 1


def test_conversations_come_back_after_others() -> None:
    with engine_of(3, context_size=200) as engine:
        talks = {n: [n] * 40 for n in range(3)}
        for _ in range(3):
            for talk in talks.values():
                known = len(talk)
                result = engine.generate(talk, max_tokens=8, reuse=True)
                talk += [*result.token_ids, 5, 6]
        assert result.counters.reused_tokens >= known - 3


def test_the_text_used_least_recently_makes_room() -> None:
    with engine_of(4, context_size=100, cells=120) as engine:
        for n in range(4):
            engine.generate([n] * 40, max_tokens=5, reuse=True)
        lengths = [one.length for one in engine.backend.sequences]  # type: ignore[attr-defined]
        assert lengths[0] == lengths[1] == 0 and sum(lengths) <= 120
        assert engine.generate([3] * 41, max_tokens=2, reuse=True).counters.reused_tokens >= 40


# --------------------------------------------------------------------- ends and failures


def test_one_that_is_closed_leaves_the_others_going() -> None:
    with engine_of(3) as engine:
        first = engine.stream([1, 2, 3], max_tokens=500)
        next(iter(first))
        other = engine.generate([4, 5], max_tokens=40)
        first.close()
        again = engine.generate([1, 2, 3], max_tokens=40)
    assert other.token_ids == alone([4, 5], GenerationOptions(max_tokens=40)).token_ids
    assert again.token_ids == alone([1, 2, 3], GenerationOptions(max_tokens=40)).token_ids


def test_one_that_waits_can_be_cancelled() -> None:
    backend = Slow(users=2, context_size=100, cells=100)
    cancel = threading.Event()
    with Engine(backend) as engine, ThreadPoolExecutor(2) as pool:
        first = pool.submit(engine.generate, [1], max_tokens=99)
        second = pool.submit(engine.generate, [2], max_tokens=50, cancel=cancel)
        cancel.set()
        backend.gate.release(10_000)
        assert second.result(PATIENCE_S).finish_reason == "cancelled"
        assert first.result(PATIENCE_S).finish_reason == "length"


class Bad(SuffixDrafter):
    def propose(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake")


def test_a_failure_ends_its_own_answer_alone() -> None:
    backend = FakeBackend(babble, VOCAB, end=END, users=2)
    with Engine(backend, curve=flat(), drafter=SuffixDrafter(), more_drafters=[Bad()]) as engine:
        asked = [([7, 8, 9], GenerationOptions(max_tokens=50)) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(engine.generate, *one) for one in asked]
            problems = [one.exception(PATIENCE_S) for one in made]
            assert sorted(map(str, problems)) == ["None", "a mistake"]
            good = made[problems.index(None)]
        assert good.result().token_ids == alone(*asked[0]).token_ids


def test_steps_of_answers_tell_what_a_chunk_may_take() -> None:
    """While nothing is known of their times, a prompt waits for the answers that are written."""
    with engine_of(2, drafter=None) as engine:
        pace = engine.scheduler.chunked_prefill
        assert pace.chunk_size(1, 8) == 0
        engine.generate([1, 2, 3], max_tokens=40)
        assert pace.chunk_size(1, 8) > 0


def test_a_backend_that_fails_ends_what_was_in_the_step_and_no_more() -> None:
    class Failing(FakeBackend):
        fails = True

        def verify(self, tree: DraftTree) -> Logits:
            if self.fails:
                raise BackendError("no memory")
            return super().verify(tree)

    backend = Failing(babble, VOCAB, end=END, users=2)
    with Engine(backend) as engine:
        with pytest.raises(BackendError, match="no memory"):
            engine.generate([1, 2], max_tokens=5)
        Failing.fails = False
        assert engine.generate([1, 2], max_tokens=5).token_ids


@pytest.mark.parametrize("users", [1, 2])
def test_a_mistake_at_the_end_is_told_and_gives_everything_back(users: int) -> None:
    fails = True

    class Ending(Engine):
        def end(self, job: Job) -> None:
            if fails:
                raise RuntimeError("a mistake at the end")

    with Ending(FakeBackend(babble, VOCAB, end=END, users=users)) as engine:
        for _ in range(users + 1):
            with pytest.raises(RuntimeError, match="a mistake at the end"):
                engine.generate([1, 2], max_tokens=5)
        fails = False
        assert engine.generate([1, 2], max_tokens=5).token_ids


@pytest.mark.parametrize("users", [1, 2])
def test_the_time_to_a_first_token_has_the_wait_for_a_turn(users: int) -> None:
    """Of three calls at once the last one waits for the first two; reading takes it no longer."""

    class Slow(FakeBackend):
        def verify_together(self, *arguments: Any) -> list[Logits]:
            sleep(0.002)
            return super().verify_together(*arguments)

        def verify(self, tree: DraftTree) -> Logits:
            sleep(0.002)
            return super().verify(tree)

    with Engine(Slow(babble, VOCAB, end=END, users=users)) as engine:
        asked = [([7, 8, 9], GenerationOptions(max_tokens=60)) for _ in range(users + 1)]
        counted = [one.counters for one in all_at_once(engine, asked)]
    last = max(counted, key=lambda one: one.time_to_first_token_s)
    others = [one for one in counted if one is not last]
    assert last.time_to_first_token_s > 0.5 * min(one.decode_s for one in others) > 0.0
    assert last.prompt_s < last.time_to_first_token_s / 2


def test_closing_ends_all_and_refuses_who_waits() -> None:
    backend = Slow(users=2, context_size=100, cells=100)
    engine = Engine(backend)
    with ThreadPoolExecutor(2) as pool:
        first = engine.stream([1], max_tokens=90)
        chunks = iter(first)
        next(chunks)
        waits = pool.submit(engine.generate, [2], max_tokens=50)
        until(lambda: len(engine.scheduler._waiting) > 0)
        backend.gate.release(5)
        engine.close()
        with pytest.raises(UnsupportedError, match="the engine is closed"):
            waits.result(PATIENCE_S)
    assert len(list(chunks)) <= 5
    assert first.result.finish_reason == "cancelled"
    with pytest.raises(UnsupportedError, match="the engine is closed"):
        engine.generate([1])
    assert backend.closed
    engine.close()


def test_tasks_run_at_once() -> None:
    """Under asyncio: none waits for another's end."""
    asked = asks(9, 3)

    async def all_of_them(engine: Engine) -> list[Result]:
        return await asyncio.gather(*(engine.agenerate(*one) for one in asked))

    with engine_of(3) as engine:
        results = asyncio.run(all_of_them(engine))
    assert [r.token_ids for r in results] == [alone(*one).token_ids for one in asked]


def test_the_cache_can_be_worked_on_between_steps() -> None:
    with engine_of(2) as engine:
        stream = engine.stream([1, 2, 3], max_tokens=300)
        chunks = iter(stream)
        next(chunks)
        with engine.scheduler.exclusive() as is_mine:
            before = list(engine.backend.tokens)
            assert is_mine and list(engine.backend.tokens) == before
        assert len(list(chunks)) > 0
    assert stream.result.token_ids == alone([1, 2, 3], GenerationOptions(300)).token_ids


def test_work_on_the_cache_leaves_running_answers_their_sequence() -> None:
    has_worked = threading.Event()

    def babble_slowly(context: tuple[int, ...]) -> Sequence[float]:
        """The answer must not be over when this thread is late."""
        has_worked.wait(0.02 * (len(context) > 8))
        return babble(context)

    with engine_of(2, context_size=400, cells=450, logits=babble_slowly) as engine:
        stream = engine.stream([1, 2, 3], max_tokens=300)
        chunks = iter(stream)
        next(chunks)
        with engine.scheduler.exclusive():
            assert engine.slots.spare(400) is None  # some of these cells are promised
            spare = engine.slots.spare(100)
            assert spare is not None and spare.length == 0
            spare.prefill([7] * 60)
        has_worked.set()
        assert len(list(chunks)) > 0
    assert stream.result.token_ids == alone([1, 2, 3], GenerationOptions(300)).token_ids


def test_one_works_on_the_cache_at_a_time() -> None:
    """Whoever looks for a spare sequence must not find that of somebody who fills it."""
    inside, most = 0, 0
    found = []
    gate = threading.Barrier(4)

    with engine_of(2) as engine:

        def work(token: int) -> None:
            nonlocal inside, most
            gate.wait(PATIENCE_S)
            with engine.scheduler.exclusive():
                inside += 1
                most = max(most, inside)
                spare = engine.slots.spare(50)
                assert spare is not None
                sleep(0.02)  # others want to come in
                spare.prefill([token] * 20)
                found.append(list(spare.tokens) == [token] * 20)
                inside -= 1

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, token) for token in range(4)]:
                done.result(PATIENCE_S)
    assert most == 1 and found == [True] * 4


def test_an_interrupt_while_it_waits_leaves_the_engine_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of who wants to work on the cache, and waits for the step under way."""
    backend = Slow(users=2, context_size=300)
    with Engine(backend) as engine, ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [1], max_tokens=20)
        until(lambda: engine.scheduler._owner is not None)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(engine.scheduler._change, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt), engine.scheduler.exclusive():
                pass
        backend.gate.release(10_000)
        assert len(running.result(PATIENCE_S).token_ids) == 20
        again = pool.submit(engine.generate, [1, 2, 3], max_tokens=5)
        assert len(again.result(PATIENCE_S).token_ids) == 5


def test_who_waits_for_an_engine_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(2)
    monkeypatch.setattr(engine.slots, "take", Mock(side_effect=BackendError("no room")))
    monkeypatch.setattr(threading, "excepthook", told := Mock())
    with pytest.raises(BackendError, match=r"the engine failed: .*no room"):
        engine.generate([1], max_tokens=4)
    with pytest.raises(UnsupportedError, match="closed"):
        engine.generate([1], max_tokens=4)
    until(lambda: told.called)


def test_closing_waits_for_who_works_on_the_cache() -> None:
    """It frees the model; who comes later is told that the engine is closed."""
    has_ended = threading.Event()
    engine = engine_of(2)
    is_inside, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with engine.scheduler.exclusive():
            is_inside.set()
            may_end.wait(PATIENCE_S)
            has_ended.set()

    with ThreadPoolExecutor(3) as pool:
        working = pool.submit(work)
        assert is_inside.wait(PATIENCE_S)
        late = engine.scheduler.exclusive()
        closing = pool.submit(engine.close)
        until(lambda: engine.scheduler.is_closed)
        assert not closing.done()
        may_end.set()
        closing.result(PATIENCE_S)
        working.result(PATIENCE_S)
        assert has_ended.is_set()
    with pytest.raises(UnsupportedError, match="closed"), late:
        pass


def drafted_again(users: int, histories: Sequence[str]) -> tuple[list[int], list[int]]:
    """One job a history, one after the other: how much each drafted, and accepted."""
    prompt = [n % (VOCAB - 1) for n in range(0, 90, 7)]
    first, *more = [SuffixDrafter() for _ in range(users)]
    for other in more:
        other.share_with(first)
    backend = FakeBackend(never_again, VOCAB, end=END, users=users, max_nodes=32)
    with Engine(backend, curve=flat(), drafter=first, more_drafters=more) as engine:
        results = [engine.generate(prompt, max_tokens=60, history=history) for history in histories]
    assert len({result.token_ids for result in results}) == 1
    counters = [result.counters for result in results]
    return [one.drafted_tokens for one in counters], [one.accepted_tokens for one in counters]


def never_again(context: tuple[int, ...]) -> Sequence[float]:
    """Logits of a text in which nothing comes twice in the same order, but for by chance."""
    row = [0.0] * VOCAB
    row[random.Random(hash(context)).randrange(VOCAB - 1)] = 9.0
    return row


def test_what_one_user_wrote_drafts_for_all() -> None:
    """The second job has another sequence of the cache than the first one."""
    drafted, accepted = drafted_again(4, ["", "", ""])
    assert accepted[0] < 10 and accepted[1] == drafted[1] > 45


@pytest.mark.parametrize("users", [2, 4])
def test_what_one_history_has_does_not_draft_for_another(users: int) -> None:
    """Not even by the same sequence: as many drafts are accepted as the first time."""
    histories = ["one", "two", "three", "four", "five", "one"]
    _, accepted = drafted_again(users, histories)
    assert max(accepted[:5]) < 10 and accepted[5] > 45


def test_the_thread_ends_with_the_last_answer() -> None:
    with engine_of(2) as engine:
        engine.generate([1, 2, 3], max_tokens=5)
        for _ in range(100):
            names = {thread.name for thread in threading.enumerate()}
            if "edgespec-steps" not in names:
                return
            threading.Event().wait(0.05)
    raise AssertionError("the thread goes on")
