"""A model that drafts for itself over a part of its cache: what it leaves behind is nothing.

Rows are compared bit for bit with those of a backend that never drafted, so a cell that is left
over, or lies elsewhere than in plain decoding, is seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import let_drafts_pay
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q8_0, write_model

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend, LlamaSequence
from edgespec.backends.llama.window import Window
from edgespec.decode.engine import Engine
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Plan, Request
from edgespec.memory.times import CostCurve
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.candidates import DraftSource, best_drafters
from edgespec.setup.planning import make_run_plan
from edgespec.setup.stored import curve_key, keep_curve

pytestmark = pytest.mark.model

TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ") * 2
FIRST, LAST, NODES = 4, 12, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("window")
    return write_hybrid(folder / "model.gguf", Shape("llama", interval=1), Q8_0, say=0.3)


def opened(path: Path, **changes: Any) -> LlamaBackend:
    """With steps of at most 64 tokens, so that all of them round alike."""
    values: dict[str, Any] = {
        "batch_size": 32,
        "max_nodes": NODES,
        "max_leaves": 1,
        "drafts_itself": True,
    }
    return LlamaBackend(path, RunConfig(512, **{**values, "threads": 1, **changes}))


def fill(backend: LlamaSequence, tokens: list[int]) -> None:
    for start in range(0, len(tokens), 32):
        backend.prefill(tokens[start : start + 32])


@pytest.fixture(params=[1, 6], ids=["chains", "trees"])
def pair(path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LlamaBackend, LlamaBackend]]:
    """One that drafts and one that never does."""
    leaves = int(request.param)
    drafting, plain = (
        opened(path, max_leaves=leaves),
        opened(path, max_leaves=leaves, drafts_itself=False),
    )
    for one in (drafting, plain):
        fill(one, TEXT)
    yield drafting, plain
    drafting.close()
    plain.close()


def test_what_comes_behind_drafts_is_as_without_them(
    pair: tuple[LlamaBackend, LlamaBackend],
) -> None:
    """Rounds with chains or trees, accepted in part, and texts that are cut back meanwhile."""
    drafting, plain = pair
    window, rng = Window(drafting, FIRST, LAST), random.Random(3)
    is_tree = drafting.capabilities.tree
    for turn in range(40):
        row = window.begin(rng.randrange(256))
        for _ in range(turn % 4):
            row = window.go_on(int(row.argmax()))
        window.end()
        count = rng.randrange(1, 6)
        parents = [-1, *(rng.randrange(node) if is_tree else node - 1 for node in range(1, count))]
        tree = DraftTree([rng.randrange(256) for _ in range(count)], parents)
        path = tree.path(rng.randrange(count))
        rows = [one.verify(tree).copy() for one in pair]
        assert np.array_equal(*rows), turn
        for one in pair:
            one.commit(path)
        if turn % 9 == 8:
            assert drafting.truncate(drafting.length - 7) == plain.truncate(plain.length - 7)
    assert drafting.tokens == plain.tokens


def test_a_window_over_all_cells_says_what_the_model_says(path: Path) -> None:
    """And a narrower one something else."""
    backend = opened(path)
    fill(backend, TEXT)
    expected = backend.verify(DraftTree.chain((7, 9, 11))).copy()
    backend.commit((0,))
    backend.truncate(len(TEXT))
    whole, narrow = Window(backend, FIRST, len(TEXT)), Window(backend, FIRST, LAST)
    rows = [whole.begin(7).copy(), whole.go_on(9).copy(), whole.go_on(11).copy()]
    whole.end()
    assert np.array_equal(np.stack(rows), expected)
    assert not np.array_equal(narrow.begin(7), expected[0])
    backend.close()


def test_accepted_tokens_that_are_not_in_the_cache_yet_are_read_first(path: Path) -> None:
    """They were accepted on a branch, and the next step of the model feeds them again."""
    backend, plain = opened(path, max_leaves=4), opened(path)
    for one in (backend, plain):
        fill(one, TEXT)
    backend.verify(DraftTree((1, 2, 3, 4), (-1, 0, 0, 2)))
    backend.commit((0, 2, 3))
    assert backend.pending == 2
    plain.prefill([1, 3, 4])
    rows = [Window(one, FIRST, len(TEXT) + 8).begin(5).copy() for one in (backend, plain)]
    assert np.array_equal(*rows)
    backend.close()
    plain.close()


# ------------------------------------------------------------------------------- engines


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that short texts are long for."""
    monkeypatch.setattr("edgespec.setup.loading.WINDOW_LAST", LAST)


def loaded(path: Path, **changes: Any) -> Engine:
    values: dict[str, Any] = {"context_size": 512, "draft_max": 7, "threads": 1, "users": 1}
    engine = edgespec.load(path, **{**values, "drafter": "suffix,window", **changes})
    let_drafts_pay(engine)
    return engine


@pytest.mark.usefixtures("narrow", "cache_folder", "frozen_clock")
@pytest.mark.parametrize("drafter", ["window", "suffix,window", "suffix,recycling,window"])
def test_drafts_of_a_window_are_lossless(path: Path, drafter: str) -> None:
    """Greedy tokens are those of plain decoding, in the turns of a session, too.

    Drawn drafts keep the distribution, as `tests/test_lossless_sampled.py` shows.
    """
    with loaded(path, drafter=drafter) as engine:
        text, drafted, accepted = TEXT, 0, 0
        for _ in range(3):
            plain = engine.generate(text, max_tokens=50, speculate=False)
            result = engine.generate(text, max_tokens=50)
            assert result.token_ids == plain.token_ids
            drafted += result.counters.drafted_by.get("window", 0)
            accepted += result.counters.accepted_tokens
            text = [*text, *result.token_ids, 32]
        assert 0 < accepted and 0 < drafted
        params = SamplingParams(temperature=0.8, seed=4)
        drawn = engine.generate(TEXT, max_tokens=60, sampling=params)
        assert len(drawn.token_ids) == 60 and drawn.counters.drafted_by["window"] > 0
        assert engine.draft_failure is None


@pytest.mark.usefixtures("narrow", "cache_folder", "frozen_clock")
def test_texts_of_several_users_each_have_their_window(path: Path) -> None:
    prompts = [TEXT[start:] for start in range(0, 40, 10)]
    with loaded(path, users=4) as engine:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(engine.generate, one, max_tokens=40) for one in prompts]
            results = [one.result(300.0) for one in asked]
        plain = [engine.generate(one, max_tokens=40, speculate=False) for one in prompts]
    assert [one.token_ids for one in results] == [one.token_ids for one in plain]
    assert sum(one.counters.drafted_by.get("window", 0) for one in results) > 0


@pytest.mark.usefixtures("narrow", "cache_folder", "frozen_clock")
def test_a_window_that_fails_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(path, drafter="window") as engine:
        plain = engine.generate(TEXT, max_tokens=30, speculate=False)

        def broken(_self: Window, _token: int) -> Any:
            raise BackendError("no more of this")

        monkeypatch.setattr(Window, "go_on", broken)
        with pytest.warns(edgespec.errors.DraftModelWarning, match="the window failed"):
            result = engine.generate(TEXT, max_tokens=30)
        assert result.token_ids == plain.token_ids
        assert engine.draft_failure == "no more of this"


# --------------------------------------------------------------------------------- plans


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize(
    ("arch", "changes", "why"),
    [
        ("gemma3", {}, "gemma3 has sliding windows itself"),
        ("qwen35", {}, "qwen35 keeps a recurrent state"),
        ("llama", {"backend": "onnx"}, "ONNX Runtime"),
        ("llama", {"exact": True, "users": 2}, "users share no cells"),
        ("llama", {"drafter": "window,head"}, "cannot draft together"),
    ],
)
def test_what_cannot_have_a_window(
    tmp_path: Path, arch: str, changes: dict[str, Any], why: str
) -> None:
    path = tmp_path / "model.gguf"
    if arch == "gemma3":
        write_model(path, arch, Q8_0)
    else:
        write_hybrid(path, Shape(arch, interval=1 if arch == "llama" else 4), Q8_0)
    spec = read_model_spec(path)
    with pytest.raises(UnsupportedError, match=why):
        make_run_plan(spec, Request(**{"context_size": 512, "drafter": "window", **changes}))


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize(("slope", "used"), [(0.0, False), (0.002, True)])
def test_it_is_used_where_contexts_are_deep(path: Path, slope: float, used: bool) -> None:
    """And where steps over a deep cache take much longer than those over a window."""
    spec, request = read_model_spec(path), Request(context_size=4096, kernels="off")
    plan = make_run_plan(spec, request)
    assert plan.drafter == "suffix", "nothing was measured yet"
    times = [float("inf"), *[1.0 + 0.3 * more for more in range(32)]]
    curve = CostCurve(times, depth_ms=slope, depth_node_ms=slope / 16)
    keep_curve(curve_key(spec, plan), curve, replaced=True)
    plan = make_run_plan(spec, request)
    assert plan.drafter == ("suffix,window" if used else "suffix")
    assert any(one.name == "window" for one in plan.choices) == used


@pytest.mark.usefixtures("cache_folder")
def test_an_early_exit_drafts_in_the_place_of_a_window(path: Path, tmp_path: Path) -> None:
    """Where both would pay: one engine drafts."""
    spec = read_model_spec(path)
    request = Request(context_size=4096, kernels="off", users=1)
    plan = make_run_plan(spec, request)
    curve = CostCurve([float("inf"), *[1.0] * 32], depth_ms=0.002)
    keep_curve(curve_key(spec, plan), curve, replaced=True)
    plan = make_run_plan(spec, request)
    assert plan.drafter.endswith(",window")
    source = DraftSource("early_exit", None, is_named=True)
    asked: list[str] = []

    def plan_of(one: Request) -> Plan:
        asked.append(one.drafter)
        return plan

    best_drafters(spec, request, source, plan_of)
    assert asked == ["auto", f"{plan.drafter.removesuffix(',window')},model"]
