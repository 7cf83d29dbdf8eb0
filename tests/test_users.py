"""Several users of a model: exact answers, planned bytes, and turns for everybody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import pytest
from frozen_times import let_drafts_pay
from random_gguf import Q8_0, write_model
from waiting import until

import edgespec
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.decode.options import GenerationOptions
from edgespec.models.embedded import embedded_model
from edgespec.sampling.params import SamplingParams

pytestmark = pytest.mark.model

PATIENCE_S = 300.0
LOG_ROUNDING = 0.006 * 2**20  # llama.cpp's log gives sizes with two decimals
USERS = 8
PROMPTS = (
    "Repeat five times: the cat sat on the mat.",
    "Name the planets.",
    "Repeat: one two three one two three one two three",
    "What is 12 times 12?",
    "Say good morning in French.",
    "Count from one to twenty.",
    "Repeat: a b c d a b c d a b c d",
    "Which colours has a rainbow?",
    "Say it again and again: tick tock.",
    "Name three rivers.",
)
ASKED = [
    (
        prompt,
        GenerationOptions(
            max_tokens=24,
            sampling=SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number),
        ),
    )
    for number, prompt in enumerate(PROMPTS)
]


def at_once(engine: Engine, asked: Sequence[tuple[str, GenerationOptions]]) -> list[Result]:
    with ThreadPoolExecutor(len(asked)) as pool:
        made = [pool.submit(engine.generate, prompt, options) for prompt, options in asked]
        return [one.result(PATIENCE_S) for one in made]


@pytest.fixture(scope="module", params=["random", pytest.param("embedded", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "embedded":
        return embedded_model()
    path = tmp_path_factory.mktemp("users") / "random.gguf"
    return write_model(path, "llama", Q8_0, reads_bytes=True)


@contextmanager
def loaded(model: Path, users: int, cache: Path) -> Iterator[Engine]:
    """With exact settings, as those of `exact_engine`; drafts are made whatever they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE", str(cache))
        options: dict[str, Any] = {"context_size": 256, "threads": 1, "drafter": "suffix"}
        with edgespec.load(model, draft_max=7, exact=True, users=users, **options) as engine:
            let_drafts_pay(engine)
            yield engine


@pytest.fixture(scope="module")
def engine(model: Path, measured_cache: Path) -> Iterator[Engine]:
    """For eight."""
    with loaded(model, USERS, measured_cache) as made:
        yield made


def test_each_exact_answer_is_the_one_given_alone(
    engine: Engine, model: Path, measured_cache: Path
) -> None:
    """By an engine of one user: greedy and with a seed, drafts on, more answers than slots."""
    results = at_once(engine, ASKED)
    with loaded(model, 1, measured_cache) as alone:
        expected = [alone.generate(prompt, options) for prompt, options in ASKED]
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert sum(one.counters.accepted_tokens for one in results) > 0


def test_drafting_for_several_changes_nothing(engine: Engine) -> None:
    plain = [(prompt, GenerationOptions.of(o, speculate=False)) for prompt, o in ASKED]
    drafted, undrafted = at_once(engine, ASKED), at_once(engine, plain)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in undrafted]
    assert sum(one.counters.drafted_tokens for one in undrafted) == 0


def test_a_prefix_is_shared_by_cells_of_their_own(engine: Engine) -> None:
    """Copied from user to user, it makes the same rows."""
    story = "Once upon a time there was a lighthouse keeper who found a message in a bottle. " * 2
    asked = [
        (story + ending, GenerationOptions(max_tokens=12, raw=True, reuse=True))
        for ending in ("He", "She", "The sea", "They")
    ]
    results = at_once(engine, asked)
    fresh = [engine.generate(p, GenerationOptions.of(o, reuse=False)) for p, o in asked]
    assert [one.token_ids for one in results] == [one.token_ids for one in fresh]
    if engine.reuses_cache:
        assert sorted(one.counters.reused_tokens > 30 for one in results) == [False] + [True] * 3


@pytest.mark.parametrize(
    ("users", "exact"),
    [
        (8, False),
        *(
            pytest.param(users, exact, marks=pytest.mark.long)
            for users in (1, 2, 5, 8)
            for exact in (False, True)
            if (users, exact) != (8, False)
        ),
    ],
)
def test_what_is_allocated_is_what_was_planned(model: Path, users: int, exact: bool) -> None:
    options: dict[str, Any] = {"context_size": 500, "threads": 1, "draft_max": 7, "exact": exact}
    plan = edgespec.plan(model, users=users, **options)
    with edgespec.load(model, users=users, **options) as engine:
        allocated = engine.memory_bytes()
    assert allocated["kv_cache"] == plan.component_bytes["kv_cache"]
    assert allocated["compute"] <= plan.component_bytes["compute"] + LOG_ROUNDING
    assert allocated["logits"] <= plan.component_bytes["logits"]


@pytest.mark.long
def test_a_long_prompt_does_not_stop_the_others() -> None:
    """Each answer goes on in between: more rounds than pieces that are read without a pause."""
    with edgespec.load(context_size=2048, threads=1, users=3) as engine:
        stamps: list[float] = []

        def write() -> None:
            for _ in engine.stream("Tell a long story.", max_tokens=300):
                stamps.append(perf_counter())

        writer = Thread(target=write)
        writer.start()
        until(lambda: len(stamps) >= 5)
        began = perf_counter()
        engine.generate("word " * 900, max_tokens=2)
        ended = perf_counter()
        writer.join()
    meanwhile = sum(began < stamp < ended for stamp in stamps)
    assert meanwhile >= 10
