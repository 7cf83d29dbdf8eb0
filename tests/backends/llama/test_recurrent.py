"""Recurrent states that go back to snapshots: hybrids of three kinds, with random weights.

LFM2's steps of several tokens round differently from single ones in llama.cpp, by up to 0.01 where
the weights are F32 and logits have a standard deviation of 8. A wrong state moves them by more
than 1. The other kinds are compared bit for bit; `tests/backends/test_contract.py` does so in any
order of steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import Frozen
from hybrid_gguf import HYBRIDS, Shape, write_hybrid
from numpy.typing import NDArray
from random_gguf import F32, Q8_0

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.drafting import make_drafter
from edgespec.drafting.proposal import EMPTY, Drafter, Proposal, StepContext, VerifyResult
from edgespec.errors import BackendError, UnsupportedError
from edgespec.measure.noise import find_divergence
from edgespec.measure.timing import one_step
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.snapshots import most_snapshots
from edgespec.memory.plan.plan import Request
from edgespec.memory.times import CostCurve
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ")
SNAPSHOTS = 6
LOG_ROUNDING = 0.01 * 2**20


@pytest.fixture(
    scope="module",
    params=[*HYBRIDS[:3], *(pytest.param(one, marks=pytest.mark.long) for one in HYBRIDS[3:])],
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    kind = F32 if request.param.startswith("lfm2") else Q8_0
    return write_hybrid(folder / "model.gguf", Shape(request.param), kind)


def noise_of(path: Path) -> float:
    """How far the size of a step moves logits."""
    return 0.05 if read_model_spec(path).arch.startswith("lfm2") else 0.0


def assert_rows(path: Path, rows: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert float(np.abs(rows - expected).max()) <= noise_of(path)


def assert_lossless(
    engine: Engine, path: Path, prompt: list[int], plain: Result, result: Result
) -> None:
    """The same tokens, or others from where the target itself is undecided."""
    found = find_divergence(engine.backend, prompt, plain.token_ids, result.token_ids)
    assert found is None or found.gap <= noise_of(path), found


def opened(path: Path, snapshots: int = SNAPSHOTS, **changes: Any) -> RecurrentBackend:
    settings = {"batch_size": 64, "max_nodes": snapshots + 1, "gpu_layers": 0, **changes}
    return RecurrentBackend(path, RunConfig(512, snapshots=snapshots, **settings))


@pytest.fixture
def backend(path: Path) -> Iterator[RecurrentBackend]:
    made = opened(path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain_rows(path: Path) -> NDArray[np.float32]:
    """Logits after each token of the text, one a step, in a cache without snapshots."""
    backend = LlamaBackend(path, RunConfig(512, batch_size=64, max_nodes=1, gpu_layers=0))
    rows = []
    for token in TEXT:
        rows.append(backend.verify(DraftTree.chain((token,))).copy())
        backend.commit((0,))
    backend.close()
    return np.concatenate(rows)


def test_it_says_what_it_can(backend: RecurrentBackend) -> None:
    can = backend.capabilities
    assert (can.rollback, can.tree, can.truncate, can.snapshots) == (True, False, False, SNAPSHOTS)
    assert "recurrent" in can.reason and backend.max_nodes == SNAPSHOTS + 1
    with pytest.raises(UnsupportedError, match="recurrent"):
        backend.verify(DraftTree((1, 2, 3), (-1, 0, 0)))


def test_it_goes_back_as_far_as_the_last_step(
    path: Path, backend: RecurrentBackend, plain_rows: NDArray[np.float32]
) -> None:
    """Also behind what was committed, and once more after that only by reading again."""
    backend.prefill(TEXT[:40])
    assert backend.truncate(40 - SNAPSHOTS) == 40 - SNAPSHOTS == backend.length
    at = 40 - SNAPSHOTS
    row = backend.verify(DraftTree.chain(TEXT[at : at + 1]))
    assert_rows(path, row, plain_rows[at : at + 1])
    backend.commit((0,))
    backend.verify(DraftTree.chain(TEXT[at + 1 : at + 6]))
    backend.commit(range(5))
    assert backend.truncate(at + 4) == at + 4
    assert_rows(path, backend.prefill(TEXT[at + 4 : at + 6]), plain_rows[at + 5])
    assert backend.truncate(at) == 0 == backend.length, "further back than the last step"
    assert_rows(path, backend.prefill(TEXT[:9]), plain_rows[8])


def test_an_open_step_cannot_be_taken_back(backend: RecurrentBackend) -> None:
    """The state before its root is gone."""
    backend.prefill(TEXT[:9])
    backend.verify(DraftTree.chain((1, 2)))
    with pytest.raises(BackendError, match="before the last step"):
        backend.prefill(TEXT[9:12])
    assert backend.length == 0
    backend.prefill(TEXT[:9])
    backend.verify(DraftTree.chain((1, 2)))
    assert backend.truncate(9) == 0 == backend.length


def test_steps_that_are_timed_never_fill_it(backend: RecurrentBackend) -> None:
    for _ in range(600):
        one_step(backend, 1)
    assert 0 < backend.length <= backend.context_size


class Guesser(Drafter):
    """Drafts what plain decoding wrote, each token wrong with some chance."""

    name = "guesser"

    def __init__(self, right: Sequence[int], wrong: float) -> None:
        self.right, self.wrong, self.written = right, wrong, 0
        self.source = random.Random(1)

    def begin(self, tokens: Sequence[int]) -> None:
        self.written = 1

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        ahead = self.right[self.written : self.written + context.max_nodes]
        drafts = [token ^ (self.source.random() < self.wrong) for token in ahead]
        return Proposal(drafts, range(-1, len(drafts) - 1), [0.9] * len(drafts))

    def observe(self, outcome: VerifyResult) -> None:
        self.written += len(outcome.emitted)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, document: dict[str, Any] | None) -> None:
        pass


def flat() -> CostCurve:
    """Steps over many tokens cost what one does, and more than any does here: all is drafted."""
    return Frozen([0.0, *[1000.0 + size for size in range(1, SNAPSHOTS + 2)]])


@pytest.mark.parametrize("drafter", ["suffix", "recycling", "suffix,recycling"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, seed=3)])
def test_drafts_are_lossless(
    path: Path, backend: RecurrentBackend, drafter: str, params: SamplingParams
) -> None:
    """Drawn tokens only where no rounding moves them."""
    engine = Engine(backend, curve=flat(), drafter=make_drafter(drafter))
    drafted = 0
    for prompt in (TEXT * 2, list(b"abcdefg " * 12)):
        plain = engine.generate(prompt, max_tokens=60, sampling=params, speculate=False)
        result = engine.generate(prompt, max_tokens=60, sampling=params)
        assert len(result.token_ids) == len(plain.token_ids) == 60
        if params.temperature == 0.0 or not noise_of(path):
            assert_lossless(engine, path, prompt, plain, result)
        drafted += result.counters.drafted_tokens
    assert drafted > 0


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_half_right_drafts_are_lossless(
    path: Path, backend: RecurrentBackend, wrong: float
) -> None:
    plain = Engine(backend).generate(TEXT, max_tokens=80)
    engine = Engine(backend, curve=flat(), drafter=Guesser(plain.token_ids, wrong))
    result = engine.generate(TEXT, max_tokens=80)
    assert_lossless(engine, path, TEXT, plain, result)
    accepted, drafted = result.counters.accepted_tokens, result.counters.drafted_tokens
    assert drafted > 60 and accepted < 80
    assert {0.0: accepted > 60, 1.0: accepted == 0}.get(wrong, 0 < accepted < drafted)


def test_a_load_drafts_where_it_may(path: Path) -> None:
    spec = read_model_spec(path)
    plan = make_run_plan(spec, Request(context_size=512))
    assert plan.drafter == "suffix" and plan.draft_max == (
        3 if spec.arch.startswith("qwen35") else 7
    )
    alone, one = (
        make_run_plan(spec, Request(context_size=512, **options)).component_bytes["kv_cache"]
        for options in ({"drafter": "none"}, {"drafter": "suffix", "draft_max": 1})
    )
    more = plan.component_bytes["kv_cache"] - alone
    assert more == plan.draft_max * (one - alone) > 0, "a copy of its state for each"
    with edgespec.load(path, context_size=512, drafter="none", threads=1) as engine:
        assert engine.backend.length == 0, "steps that were timed cannot be taken back"
    with edgespec.load(path, context_size=512, draft_max=3, threads=1) as engine:
        assert engine.backend.capabilities.snapshots == 3
        first = engine.generate(TEXT, max_tokens=20)
        longer = [*TEXT, *first.token_ids, 5, 6]
        second = engine.generate(longer, max_tokens=20, reuse=True)
        assert second.counters.reused_tokens == len(TEXT) + 19
        fresh = engine.generate(longer, max_tokens=20)
        assert fresh.counters.reused_tokens == 0
        assert_lossless(engine, path, longer, fresh, second)
    too_many = most_snapshots(spec) + 1
    if too_many < 255:
        with pytest.raises(UnsupportedError, match="can take back"):
            make_run_plan(spec, Request(context_size=512, draft_max=too_many))


def test_exact_runs_draft(path: Path) -> None:
    load = partial(edgespec.load, path, context_size=512, draft_max=3, threads=1, exact=True)
    if noise_of(path):
        with pytest.raises(UnsupportedError, match="exact is not possible"):
            load()
        return
    with load() as engine:
        plain = engine.generate(TEXT, max_tokens=30, speculate=False)
        assert engine.generate(TEXT, max_tokens=30).token_ids == plain.token_ids
