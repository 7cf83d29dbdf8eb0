"""Heads inside a model's file and beside it: tiny models with random weights, of several kinds.

The head of random weights is nearly always wrong. What is compared are its rows: those of one that
followed its model through steps, cuts and rejected drafts, and those of one that read it all anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import Frozen
from head_cases import BESIDE, DRAFTS, INSIDE, Files, opened, written
from random_gguf import F32, Q8_0, write_model

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.following import DraftHead
from edgespec.backends.llama.head import BackendWithHead, CacheHead
from edgespec.decode.engine import Engine
from edgespec.drafting import make_drafter
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.model import HeadDrafter, HeadText
from edgespec.drafting.proposal import Drafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import Component, footprint
from edgespec.memory.bytes.head_footprint import block_footprint, wanted_head
from edgespec.memory.bytes.simulation import ContextRequest, simulated
from edgespec.memory.plan.plan import Request
from edgespec.memory.times import CostCurve
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ")
ROUNDING = 0.01 * 2**20
NOISE = 0.15  # of F32 weights in batches of several sizes; logits have a deviation of 8


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, marks=[pytest.mark.long] if "moe" in one and "35" in one else [])
        for one in (*INSIDE, *BESIDE)
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(name: str, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return written(tmp_path_factory.mktemp("head"), name, F32)


@pytest.fixture(scope="module", params=INSIDE)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("head"), request.param, F32).model


@pytest.fixture
def backend(files: Files) -> Iterator[BackendWithHead]:
    made = opened(files)
    yield made
    made.close()


def head_of(backend: BackendWithHead) -> DraftHead:
    assert backend.head is not None
    return backend.head


def read_anew(files: Files, text: list[int], token: int) -> Any:
    """The first row that a head drafts behind `text` and `token`, having read it in one go."""
    fresh = opened(files, batch_size=128)
    fresh.prefill(text)
    row = head_of(fresh).begin(token).copy()
    fresh.close()
    return row


def assert_follows(backend: BackendWithHead, files: Files, text: list[int]) -> None:
    head = head_of(backend)
    assert head.followed == backend.length == len(text)
    row = head.begin(7)
    assert float(np.abs(row - read_anew(files, text, 7)).max()) < NOISE


def test_a_head_follows_prompts_in_pieces(backend: BackendWithHead, files: Files) -> None:
    for start in range(0, len(TEXT), 10):
        backend.prefill(TEXT[start : start + 10])
    assert_follows(backend, files, TEXT)


def test_a_head_follows_prompts_in_small_batches(files: Files) -> None:
    """More tokens wait for it than one of its model's batches has."""
    backend, text = opened(files, batch_size=32), [*TEXT, *TEXT]
    for start in range(0, len(text), 32):
        backend.prefill(text[start : start + 32])
    head = head_of(backend)
    assert head.followed == len(text)
    row = head.begin(7)
    fresh = opened(files, batch_size=256)
    fresh.prefill(text)
    assert float(np.abs(row - head_of(fresh).begin(7)).max()) < NOISE
    backend.close()
    fresh.close()


def test_a_head_follows_rounds(backend: BackendWithHead, files: Files) -> None:
    """Rounds with drafts of its own, all wrong, half right or not drafted at all."""
    backend.prefill(TEXT[:20])
    head, at, turn = head_of(backend), 20, 0
    while at < len(TEXT) - DRAFTS:
        turn += 1
        if turn % 3:
            row = head.begin(TEXT[at])
            for _ in range(turn % 4):
                row = head.go_on(int(row.argmax()))
        right = TEXT[at : at + 1 + turn % DRAFTS]
        backend.verify(DraftTree.chain([*right, 1, 2][: DRAFTS + 1]))
        backend.commit(range(len(right)))
        at += len(right)
        if turn % 5 == 0:
            assert_follows(backend, files, TEXT[:at])
    assert_follows(backend, files, TEXT[:at])


def test_what_a_head_has_drafted_behind_is_not_read_again(
    backend: BackendWithHead, files: Files
) -> None:
    """The next token's cell is there already, as the draft began with it; what was accepted is not.

    A block's first cell is a query, and no cell of the text; an assistant has no cells at all.
    """
    head, unread = head_of(backend), []
    backend.prefill(TEXT[:20])
    for at, accepted in ((20, 0), (21, 2), (24, 0)):
        row = head.begin(TEXT[at])
        head.go_on(int(row.argmax()))
        backend.verify(DraftTree.chain(TEXT[at : at + 3]))
        backend.commit(range(1 + accepted))
        unread.append(head.num_unread)
    cells = [1, 3, 1] if head.block else [0, 0, 0] if isinstance(head, CacheHead) else [0, 2, 0]
    assert unread == cells
    head.begin(TEXT[25])  # behind which comes another one after all
    backend.verify(DraftTree.chain((TEXT[30],)))
    backend.commit((0,))
    assert_follows(backend, files, [*TEXT[:25], TEXT[30]])


def test_a_draft_of_which_nothing_was_read_leaves_nothing(backend: BackendWithHead) -> None:
    """As behind a step that failed: it begins again at the same place."""
    head = head_of(backend)
    backend.prefill(TEXT[:20])
    row = head.begin(TEXT[20]).copy()
    head.go_on(int(row.argmax()))
    assert float(np.abs(head.begin(TEXT[20]) - row).max()) < NOISE / 3


def test_a_head_is_told_apart_from_one_that_missed_a_token(
    backend: BackendWithHead, files: Files
) -> None:
    """What the comparisons above would show."""
    text = TEXT[:60]
    backend.prefill(text)
    row = head_of(backend).begin(7).copy()
    changed = 20 if head_of(backend).block else 1  # a block looks at all places nearly alike
    wrong = [*text[: -changed - 2], *(one ^ 1 for one in text[-changed - 2 : -2]), *text[-2:]]
    assert float(np.abs(row - read_anew(files, wrong, 7)).max()) > 5 * NOISE


def test_a_head_that_nobody_asked_begins_anew_with_the_last_tokens(
    backend: BackendWithHead, files: Files
) -> None:
    """Nothing is computed for it meanwhile; it then drafts as if the text began there."""
    if isinstance(backend.head, CacheHead):
        return  # it looks into its model's cache, and misses nothing
    backend.prefill(TEXT[:10])
    head = head_of(backend)
    text = [*TEXT[:10], *TEXT, *TEXT]
    for token in text[10:]:
        backend.verify(DraftTree.chain((token,)))
        backend.commit((0,))
    assert head.length == head.headless and head.num_unread == 16 and head.followed == len(text)
    row = head.begin(7).copy()
    assert head.length == len(text) and head.num_unread == 0
    assert float(np.abs(row - read_anew(files, text[:100], 7)).max()) > NOISE
    anew = head.begin(7)
    assert np.allclose(anew, row, atol=NOISE / 3)
    backend.prefill(TEXT[:20])
    assert head.followed == len(text) + 20
    assert backend.truncate(len(text) + 20) == len(text) + 20
    backend.truncate(30)
    assert head.followed == backend.length


def test_a_head_goes_back_with_its_model(backend: BackendWithHead, files: Files) -> None:
    """The row of the last token is gone then; the tokens behind it are followed again."""
    backend.prefill(TEXT[:40])
    kept = backend.truncate(38)
    head = head_of(backend)
    assert kept == 38 == head.followed
    backend.prefill(TEXT[kept : kept + 22])
    assert backend.truncate(10) in (0, 10)
    assert backend.length == head.followed
    backend.truncate(0)
    backend.prefill(TEXT[:30])
    assert_follows(backend, files, TEXT[:30])


def test_a_loaded_cache_is_one_that_the_head_has_not_read(
    backend: BackendWithHead, files: Files, tmp_path: Path
) -> None:
    backend.prefill(TEXT[:40])
    backend.save_cache(str(tmp_path / "cache"))
    backend.load_cache(str(tmp_path / "cache"), TEXT[:40])
    head = head_of(backend)
    assert head.length == 40 and head.num_unread == 0
    backend.prefill(TEXT[40:50])
    assert np.isfinite(head.begin(5)).all()


def flat(most: int) -> CostCurve:
    """Slower than any step is here: no answer's drafts ever seem to have lost time."""
    return Frozen([0.0, *[1000.0 + size for size in range(1, most + 1)]])


OFTEN = ((0.02, True, 0.0), (0.2, False, 0.0))  # of drafts that are greedy; the rest runs long


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize(
    ("say", "with_suffix", "params"),
    [
        pytest.param(
            say,
            beside,
            params,
            marks=() if (say, beside, no) in OFTEN else pytest.mark.long,
        )
        for say in (0.02, 0.2, 1.0)
        for beside in (False, True)
        for params, no in ((SamplingParams(), 0.0), (SamplingParams(temperature=0.7, seed=3), 0.2))
    ],
)
def test_drafts_of_a_head_are_lossless(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    say: float,
    with_suffix: bool,
) -> None:
    """Greedy tokens are those of plain decoding, with heads that are right often, at times, never.

    Drawn drafts keep the distribution, not the tokens, as `tests/test_lossless_sampled.py` shows.
    """
    # A busy machine's rounds take longer than the curve says, and drafts would be given up.
    monkeypatch.setattr("edgespec.decode.step.perf_counter", lambda: 0.0)
    backend = opened(written(tmp_path, name, Q8_0, say))
    curve = Frozen([0.0, *[0.01] * 8])
    drafter: Drafter = HeadDrafter(HeadText(head_of(backend)), curve, 258)
    if with_suffix:
        drafter = CombinedDrafter([SuffixDrafter(), drafter])
    engine = Engine(backend, curve=flat(DRAFTS + 1), drafter=drafter)
    drafted = accepted = 0
    for prompt in (TEXT, list(b"abcdefg " * 12)):
        plain = engine.generate(prompt, max_tokens=50, sampling=params, speculate=False)
        result = engine.generate(prompt, max_tokens=50, sampling=params)
        assert len(result.token_ids) == 50
        assert params.temperature > 0.0 or result.token_ids == plain.token_ids
        drafted += result.counters.drafted_tokens
        accepted += result.counters.accepted_tokens
    assert drafted > 0
    assert say > 0.1 or accepted > 0
    engine.close()


@pytest.mark.usefixtures("frozen_clock")
def test_a_head_that_is_always_wrong_is_hardly_asked(tmp_path: Path) -> None:
    """Where each draft takes half a step, tries are all that it gets."""
    backend = opened(written(tmp_path, "qwen35", F32))
    head = HeadDrafter(HeadText(head_of(backend)), Frozen([0.0, *[0.5] * 8]), 258)
    engine = Engine(
        backend,
        curve=Frozen([0.0, *[0.5 + 0.5 * size for size in range(1, DRAFTS + 2)]]),
        drafter=CombinedDrafter([SuffixDrafter(), head]),
    )
    for seed in range(4):
        params = SamplingParams(temperature=1.5, seed=seed)
        counters = engine.generate(TEXT, max_tokens=100, sampling=params).counters
    assert counters.drafted_by["head"] < 10
    engine.close()


def test_a_plan_has_the_head_in_it(path: Path) -> None:
    """Tried as long as nobody knows whether it pays; named, it is there in any case."""
    spec = read_model_spec(path)
    shape = RunConfig(512, 64, DRAFTS + 1, head=True)
    plan = make_run_plan(spec, Request(context_size=512, draft_max=DRAFTS, kernels="off"))
    assert plan.drafter == "suffix,head"
    assert {"head_kv_cache", "head_compute", "head_rows", "head_logits"} <= set(
        plan.component_bytes
    )
    plain = make_run_plan(spec, Request(context_size=512, drafter="suffix", kernels="off"))
    weights = [sum(part.nbytes for part in one.components if "weights" in part.name)
               for one in (plain, plan)]  # fmt: skip
    of_head = sum(
        tensor.data_bytes for name, tensor in spec.tensors.items() if name.startswith("blk.4.")
    )
    assert weights[1] - weights[0] in (0, of_head), "a mapped file counts whole"
    planned = {part.name: part.nbytes for part in block_parts(spec, shape)}
    backend = opened(Files(path))
    found = head_of(backend).memory_bytes()
    backend.close()
    assert found["kv_cache"] == pytest.approx(planned["head_kv_cache"], abs=ROUNDING)
    assert found["compute"] == pytest.approx(planned["head_compute"], abs=ROUNDING)
    assert found["logits"] == planned["head_logits"] and found["rows"] == planned["head_rows"]


def block_parts(spec: ModelSpec, shape: RunConfig) -> tuple[Component, ...]:
    (_, answer) = simulated([ContextRequest(spec, shape), wanted_head(spec, shape, shape)])
    return block_footprint(spec, shape, answer)


def test_weights_of_a_head_that_is_not_loaded_are_not_planned(path: Path) -> None:
    spec = read_model_spec(path)
    totals = []
    for head in (False, True):
        backend = opened(Files(path), has_head=False, mapped=False) if head else None
        shape = RunConfig(512, 64, 5, snapshots=4, mapped=False, head=head)
        (answer,) = simulated([ContextRequest(spec, shape)])
        parts = footprint(spec, shape, answer)
        planned = sum(one.nbytes for one in parts if "weights" in one.name)
        totals.append(planned)
        if backend is not None:
            found = backend.memory_bytes()
            backend.close()
            loaded = sum(size for name, size in found.items() if "weights" in name)
            assert planned == pytest.approx(loaded, abs=2 * ROUNDING)
    assert totals[0] < totals[1]


def test_an_engine_loads_its_head_and_learns_of_it(path: Path, cache_folder: Path) -> None:
    with edgespec.load(path, context_size=512, draft_max=3, threads=1) as engine:
        assert isinstance(engine.drafter, CombinedDrafter)
        assert engine.drafter.name == "suffix,head"
        assert {"head_kv_cache", "head_compute"} <= set(engine.drafter.memory_bytes())
        assert isinstance(engine.backend, BackendWithHead)
        head = head_of(engine.backend)
        engine.generate(TEXT, max_tokens=30)
        session = engine.generate([*TEXT, 5], max_tokens=10, reuse=True)
        assert len(session.token_ids) == 10
    assert not head._context.handle, "it is freed with its model"
    learned = list(cache_folder.glob("learned/*.json"))
    assert len(learned) == 1, "how the head did is kept"
    with edgespec.load(path, context_size=512, draft_max=0, threads=1) as engine:
        assert len(engine.generate(TEXT, max_tokens=5).token_ids) == 5


def test_a_head_that_is_not_there_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "model.gguf", "llama", Q8_0)
    with pytest.raises(UnsupportedError, match="no head") as caught:
        edgespec.load(other, context_size=512, drafter="suffix,head")
    assert "'head'" in caught.value.hint
    with pytest.raises(UnsupportedError, match="needs a head"):
        make_drafter("suffix,head")
    with pytest.raises(UnsupportedError, match="cannot draft together"):
        make_drafter("head,model")
