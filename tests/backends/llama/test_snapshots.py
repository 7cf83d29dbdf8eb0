"""Snapshots of a recurrent state: which of them steps write, and contexts that are made again."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import Frozen
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q8_0

from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.backends.llama.library import ggml_function
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.decode.engine import Engine
from edgespec.drafting import make_drafter
from edgespec.measure.timing import snapshots_cost
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.simulation import ContextRequest, simulated
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.model

TEXT = list(b"to be or not to be, that is the question: to be or not to be; 64 pears for 8 ")
SNAPSHOTS, LAYERS = 4, 2  # of 4 layers two recur


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape("qwen35")
    return write_hybrid(tmp_path_factory.mktemp("qwen35") / "model.gguf", shape, Q8_0)


def settings(**changes: Any) -> RunConfig:
    values = {"batch_size": 64, "max_nodes": SNAPSHOTS + 1, "gpu_layers": 0, "mapped": False}
    return RunConfig(512, **(values | changes))


@pytest.fixture
def backend(path: Path) -> Iterator[RecurrentBackend]:
    with closing(RecurrentBackend(path, settings(snapshots=SNAPSHOTS))) as made:
        yield made


class Watched(RecurrentBackend):
    """Sees what a step leaves in the places of convolutions' pasts, in the order of the graph."""

    def _adjust(self, params: Any) -> None:
        super()._adjust(params)
        self.seen: list[bytes] = []
        get = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._name = ggml_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._size = ggml_function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._get = ggml_function("ggml_backend_tensor_get", None, *get)
        self._callback = self._context.lib.ggml_backend_sched_eval_callback(self._look)
        params.cb_eval = self._callback

    def _look(self, tensor: int, is_question: bool, _data: Any) -> bool:
        name = self._name(tensor)
        if not (name.startswith(b"cache_r_l") and b"copy of" in name and b"conv_input" in name):
            return not is_question
        if not is_question:
            values = ctypes.create_string_buffer(self._size(tensor))
            self._get(tensor, values, 0, len(values))
            self.seen.append(values.raw)
        return True

    def step(self, tokens: list[int]) -> list[bytes]:
        """What a step over a chain leaves, the first token of it kept."""
        self.seen.clear()
        self.verify(DraftTree.chain(tokens))
        self.commit((0,))
        return list(self.seen)


@pytest.mark.parametrize("kernels", [False, True])
def test_steps_write_all_snapshots_whoever_computes(path: Path, kernels: bool) -> None:
    """As llama.cpp's graph says: kernels leave none of its operations out."""
    if kernels and (reason := refusal_of_kernels()):
        pytest.skip(f"edgespec has no kernels here: {reason}")
    with closing(Watched(path, settings(kernels=kernels, snapshots=SNAPSHOTS))) as backend:
        backend.prefill(TEXT[:20])
        for tokens in (TEXT[20:21], TEXT[21:23]):
            before = backend.step(tokens)
            after = backend.step(tokens)
            assert len(after) == LAYERS * (1 + SNAPSHOTS)
            changed = sum(a != b for a, b in zip(before, after, strict=True))
            assert changed == LAYERS * (1 + SNAPSHOTS)


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_are_those_without_snapshots(path: Path, kernels: bool) -> None:
    """Bit for bit: wrong drafts behind each token, cut in every place."""
    if kernels and (reason := refusal_of_kernels()):
        pytest.skip(f"edgespec has no kernels here: {reason}")
    chosen = settings(kernels=kernels)
    with (
        closing(RecurrentBackend(path, replace(chosen, snapshots=SNAPSHOTS))) as backend,
        closing(LlamaBackend(path, settings(kernels=kernels, max_nodes=1))) as plain,
    ):
        at = 0
        while at < len(TEXT) - SNAPSHOTS:
            right = 1 + at % SNAPSHOTS
            wrong = [9] * (SNAPSHOTS + 1 - right) if at % 3 else []
            rows = backend.verify(DraftTree.chain([*TEXT[at : at + right], *wrong]))
            backend.commit(range(right))
            for row, token in zip(rows, TEXT[at : at + right], strict=False):
                expected = plain.verify(DraftTree.chain((token,)))[0]
                plain.commit((0,))
                assert np.array_equal(row, expected)
            at += right


def test_a_context_is_made_again_with_other_snapshots(backend: RecurrentBackend) -> None:
    """The cache is empty then, and the bytes are those of what is kept."""
    with_all = backend.memory_bytes()
    row = backend.prefill(TEXT[:30]).copy()
    backend.keep_snapshots(0)
    assert backend.length == 0 and list(backend.tokens) == []
    without = backend.memory_bytes()
    assert without["kv_cache"] < with_all["kv_cache"]
    assert np.array_equal(backend.prefill(TEXT[:30]), row)
    backend.keep_snapshots(SNAPSHOTS)
    assert backend.memory_bytes() == with_all
    backend.prefill(TEXT[:30])
    assert backend.truncate(30 - SNAPSHOTS) == 30 - SNAPSHOTS


@pytest.mark.parametrize(("cost", "is_kept"), [(1.06, False), (1.0, True)])
def test_an_engine_gives_up_snapshots_that_its_drafts_are_not_worth(
    path: Path, cost: float, is_kept: bool
) -> None:
    """Between two answers, and not where that empties a cache that is used; words stay the same."""
    flat = Frozen([0.0, *[1.0 + 0.001 * size for size in range(1, SNAPSHOTS + 2)]])
    backend = RecurrentBackend(path, settings(snapshots=SNAPSHOTS))
    drafter = make_drafter("suffix")
    assert drafter is not None
    with Engine(backend, curve=flat, drafter=drafter, snapshots_cost=cost) as engine:
        text = engine.generate(TEXT, max_tokens=50).token_ids
        drafter.ledger("suffix").add(400, 400.0)
        engine.generate([*TEXT, *text], max_tokens=5, reuse=True)
        assert engine.drafter is drafter, "the cache was of use"
        fresh = [9, *TEXT]
        with_them = engine.generate(fresh, max_tokens=40, reuse=True)
        assert (engine.drafter is drafter) == is_kept
        kept = 1 + SNAPSHOTS if is_kept else 1
        shape = RunConfig(512, 64, 1 + SNAPSHOTS, snapshots=kept - 1)
        (answer,) = simulated([ContextRequest(read_model_spec(path), shape)])
        cache_bytes = backend.memory_bytes()["kv_cache"]
        assert cache_bytes == pytest.approx(answer["host"].cache, abs=0.02 * 2**20)
        again = engine.generate(fresh, max_tokens=40, speculate=False)
        assert again.token_ids == with_them.token_ids


def test_the_price_of_snapshots_leaves_the_backend_as_it_was(backend: RecurrentBackend) -> None:
    before = backend.memory_bytes()
    assert 1.0 <= snapshots_cost(backend, 1.0) < 10.0
    assert backend.memory_bytes() == before
    backend.prefill(TEXT[:30])
    assert backend.truncate(30 - SNAPSHOTS) == 30 - SNAPSHOTS
