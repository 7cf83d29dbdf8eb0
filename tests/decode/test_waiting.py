"""Who waits for whose prompt, in made-up milliseconds: of one processor, 2.4 + 0.27 for a token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median

import pytest
from simulated_time import Asked, Clock, Timed, simulate

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode import scheduler
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


class Deep(Timed):
    """A prompt's tokens take longer the more of it stands before them."""

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        for number, piece in pieces:
            self.clock.ms += deeper_ms(self.sequences[number].length) * len(piece)
        return super().verify_together(steps, pieces)


def deeper_ms(depth: int) -> float:
    return 0.0004 * depth


def engine_of(users: int, clock: Clock, kind: type[Timed] = Timed) -> Engine:
    sizes = {"context_size": 4096, "batch_size": 256, "users": users}
    return Engine(kind(clock, step_ms, babble, VOCAB, end=END, **sizes))


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
    for further in (0.0, scheduler._FURTHER):
        monkeypatch.setattr(scheduler, "_FURTHER", further)
        users = crowd(8, 4)
        began_ms = clock.ms
        with engine_of(8, clock) as engine:
            simulate(engine, clock, users)
        answers = [one for asked in users for one in asked]
        speeds = [len(one.tokens) / (one.rounds_ms[-1] - one.rounds_ms[0]) for one in answers]
        assert min(speeds) > 0.5 * mean(speeds)
        found[further] = median(one.first_ms for one in answers), clock.ms - began_ms
    assert found[scheduler._FURTHER][0] < 0.75 * found[0.0][0], found
    assert found[scheduler._FURTHER][1] < found[0.0][1], found


@pytest.mark.parametrize("writing", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 7))])
def test_a_long_prompt_makes_steps_at_most_twice_as_long(clock: Clock, writing: int) -> None:
    """Where what steps take is a line, and known: the first pieces have learned it."""
    with engine_of(8, clock) as engine:
        simulate(engine, clock, [[asked(8, 200)], [asked(300, 2, begins_ms=20.0)]])  # learns
        users = [[asked(8, 2000, seed=user)] for user in range(writing)]
        late = asked(LONG, 2, begins_ms=clock.ms + 200.0)
        simulate(engine, clock, [*users, [late]])
    alone_ms = step_ms(writing)
    waits = waits_during(late, users)
    assert max(waits) <= 2.0 * alone_ms + 0.3
    assert mean(waits) > 1.75 * alone_ms, "the prompt had its share"


@pytest.mark.parametrize(
    ("writing", "prefix"),
    [
        (1, 2500),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, 0), (7, 0), (7, 2500))),
    ],
)
def test_the_next_long_prompt_has_the_prices_of_its_depths(
    clock: Clock, writing: int, prefix: int
) -> None:
    """From its first piece on: small ones at its beginning, dear ones where it goes on from deep.

    No piece makes a step longer than twice a plain one, but for what a single token takes, and its
    share of the time is used.
    """
    with engine_of(9, clock, kind=Deep) as engine:
        first = asked(LONG, 2, begins_ms=100.0)
        simulate(engine, clock, [[asked(8, 600)], [first]])
        users = [[asked(8, 2000, seed=user)] for user in range(writing)]
        late = asked(LONG + 500, 2, seed=9, begins_ms=clock.ms + 200.0)
        late.prompt = [*first.prompt[:prefix], *late.prompt[prefix:]]
        simulate(engine, clock, [*users, [late]])
        assert isinstance(engine.backend, Timed)
    waits = waits_during(late, users)
    assert max(waits) <= 2.0 * step_ms(writing) + 0.27 + deeper_ms(LONG + 500)
    assert mean(waits[: 4 * writing]) > 1.6 * step_ms(writing), "the first steps read"


def waits_during(late: Asked, users: Sequence[Sequence[Asked]]) -> list[float]:
    """Between two rounds of the users' answers, while a prompt was read, in order."""
    start_ms, end_ms = late.asked_ms, late.asked_ms + late.first_ms
    rounds = [pair for [one] in users for pair in pairwise(one.rounds_ms)]
    return [b - a for a, b in sorted(rounds) if start_ms < a and b < end_ms]


class Whole(Timed):
    """What stands before a piece is read once for it, whatever its size."""

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        self.clock.ms += sum(0.001 * self.sequences[number].length for number, _ in pieces)
        return super().verify_together(steps, pieces)


def test_pieces_do_not_stay_at_a_single_token(clock: Clock) -> None:
    """Which one answer had no time for more than: beside seven there is time for a few."""
    with engine_of(8, clock, kind=Whole) as engine:
        for writing in (1, 7):
            users = [[asked(8, 2000, seed=user)] for user in range(writing)]
            late = asked(LONG, 2, seed=writing, begins_ms=clock.ms + 200.0)
            simulate(engine, clock, [*users, [late]])
    waits = waits_during(late, users)
    assert max(waits) <= 2.0 * step_ms(7) + 0.27
    assert mean(waits) > 1.6 * step_ms(7)


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
