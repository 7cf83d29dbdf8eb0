"""Who waits for whose prompt, in made-up milliseconds: of one processor, 2.4 + 0.27 for a token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean, median

import pytest
from simulated_time import Asked, Clock, Timed, simulate

from edgespec.decode import pace
from edgespec.decode.engine import Engine
from edgespec.decode.options import GenerationOptions

VOCAB, END = 64, 63
LONG = 3000


def step_ms(tokens: int) -> float:
    return 2.4 + 0.27 * tokens


def babble(context: tuple[int, ...]) -> Sequence[float]:
    row = [0.0] * VOCAB
    row[hash(context[-2:]) % END] = 1.0
    return row


class Apart(Timed):
    """Users have cells of their own: a run over texts of different lengths would be several."""

    shares_cells = False


def engine_of(users: int, clock: Clock, latency: float = 1.0, kind: type[Timed] = Timed) -> Engine:
    sizes = {"context_size": 4096, "batch_size": 256, "users": users}
    return Engine(kind(clock, step_ms, babble, VOCAB, end=END, **sizes), latency=latency)


def asked(size: int, max_tokens: int, seed: int = 0, begins_ms: float = 0.0) -> Asked:
    rng = random.Random(seed)
    prompt = [0, 1, 2, 3, *(rng.randrange(END) for _ in range(size - 4))]
    return Asked(prompt, GenerationOptions(max_tokens=max_tokens, reuse=True), begins_ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.use(monkeypatch)
    return made


def crowd(users: int, answers: int) -> list[list[Asked]]:
    """Each asks one question after the other: prompts of 40 to 800 tokens, answers of 64."""
    sizes = random.Random(5)
    return [
        [asked(round(40 * 20 ** sizes.random()), 64, 100 * user + n) for n in range(answers)]
        for user in range(users)
    ]


def test_eight_users_have_their_first_tokens_soon(clock: Clock) -> None:
    """Pieces that take runs of their own between the steps are far later."""
    found = {}
    for kind in (Timed, Apart):
        users = crowd(8, 4)
        with engine_of(8, clock, kind=kind) as engine:
            simulate(engine, clock, users)
        found[kind] = median(one.first_ms for answers in users for one in answers)
    assert found[Timed] < 0.7 * found[Apart], found


def test_where_most_wait_for_their_first_token_prompts_have_more_of_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First tokens come sooner, all have their answers sooner, and nobody has half of the mean."""
    found = {}
    for further in (0.0, pace._FURTHER):
        monkeypatch.setattr(pace, "_FURTHER", further)
        users = crowd(8, 4)
        began_ms = clock.ms
        with engine_of(8, clock) as engine:
            simulate(engine, clock, users)
        answers = [one for asked in users for one in asked]
        speeds = [len(one.tokens) / (one.rounds_ms[-1] - one.rounds_ms[0]) for one in answers]
        assert min(speeds) > 0.5 * mean(speeds)
        found[further] = median(one.first_ms for one in answers), clock.ms - began_ms
    assert found[pace._FURTHER][0] < 0.75 * found[0.0][0], found
    assert found[pace._FURTHER][1] < found[0.0][1], found


@pytest.mark.parametrize("latency", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("writing", [1, 3, 7])
def test_a_long_prompt_delays_nobody_by_more_than_latency_steps(
    clock: Clock, writing: int, latency: float
) -> None:
    """Where what steps take is a line, and known: the first pieces have learned it."""
    with engine_of(8, clock, latency) as engine:
        simulate(engine, clock, [[asked(8, 200)], [asked(300, 2, begins_ms=20.0)]])  # learns
        users = [[asked(8, 2000, seed=user)] for user in range(writing)]
        late = asked(LONG, 2, begins_ms=clock.ms + 200.0)
        simulate(engine, clock, [*users, [late]])
    alone_ms = step_ms(writing)
    meanwhile = (late.asked_ms, late.asked_ms + late.first_ms)
    waits = [
        later - earlier
        for [one] in users
        for earlier, later in zip(one.rounds_ms, one.rounds_ms[1:], strict=False)
        if meanwhile[0] < earlier and later < meanwhile[1]
    ]
    assert max(waits) <= (1.0 + latency) * alone_ms + 0.3
    assert mean(waits) > (0.9 + 0.85 * latency) * alone_ms, "the prompt had its share"


def test_how_late_the_first_token_of_a_long_prompt_is(clock: Clock) -> None:
    """Beside one answer, half of the time is its: twice as late as alone."""
    with engine_of(2, clock) as engine:
        simulate(engine, clock, [[asked(LONG, 2)]])
        alone = asked(LONG, 2, seed=1)
        simulate(engine, clock, [[alone]])
        late = asked(LONG, 2, seed=2, begins_ms=clock.ms + 50.0)
        simulate(engine, clock, [[asked(8, 4000)], [late]])
    assert alone.first_ms == pytest.approx(12 * 2.4 + LONG * 0.27, abs=2)
    reading_ms, share = LONG * 0.27, 0.5
    assert late.first_ms == pytest.approx(reading_ms / share, rel=0.15)


def test_short_prompts_share_one_run(clock: Clock) -> None:
    """Eight of them that have nothing in common, at once: no run for each."""
    users = [[Asked([7 + n] * 20, GenerationOptions(max_tokens=1))] for n in range(8)]
    with engine_of(8, clock) as engine:
        simulate(engine, clock, users)
        assert isinstance(engine.backend, Timed)
        assert engine.backend.runs == [(0, 160)]


def test_who_came_first_is_read_first(clock: Clock) -> None:
    users = [[asked(size, 20, seed=size)] for size in (200, 300, 30, 400, 50)]
    with engine_of(8, clock) as engine:
        simulate(engine, clock, users)
    firsts = [one.rounds_ms[0] for [one] in users]
    assert firsts == sorted(firsts)


def test_a_prefix_that_is_being_read_is_waited_for(clock: Clock) -> None:
    """Of eight users with the same system prompt one reads it."""
    rng = random.Random(3)
    system = [rng.randrange(END) for _ in range(600)]
    options = GenerationOptions(max_tokens=10, reuse=True)
    with engine_of(8, clock) as engine:
        simulate(engine, clock, [[Asked([*system, n, n], options)] for n in range(8)])
        assert isinstance(engine.backend, Timed)
        assert sum(read for _, read in engine.backend.runs) == 602 + 7 * 2


def test_steps_of_answers_never_wait_for_a_run_of_their_own(clock: Clock) -> None:
    with engine_of(4, clock) as engine:
        simulate(engine, clock, crowd(4, 3))
        assert isinstance(engine.backend, Timed)
        runs = engine.backend.runs
    assert any(nodes and read for nodes, read in runs)
    begun = next(n for n, (nodes, _) in enumerate(runs) if nodes)
    assert sum(nodes == 0 for nodes, _ in runs[begun:]) <= 3, "only where nobody is answered"
