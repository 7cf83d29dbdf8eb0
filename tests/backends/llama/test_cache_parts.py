"""Parts of a cache in files: what is read back is what was there, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_gguf import HYBRIDS, Shape, write_hybrid
from random_gguf import F32, write_model

from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig

pytestmark = pytest.mark.model
TEXT = [(7 * place) % 251 for place in range(200)]
PARTS = ((0, 64), (64, 130), (130, 200))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("parts") / "a.gguf", "llama", F32, reads_bytes=True)


def opened(path: Path, **changes: Any) -> LlamaBackend:
    how = {"max_nodes": 8, "gpu_layers": 0, "disk_cache_bytes": 1, **changes}
    return LlamaBackend(path, RunConfig(512, 64, **how))


def reads(backend: Any, text: list[int]) -> Any:
    for first in range(backend.length, len(text), 64):
        row = backend.prefill(text[first : first + 64]).copy()
    return row


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_type_k": "q8_0", "kv_type_v": "q8_0"},
        {"max_leaves": 4},
        {"drafts_itself": True},
        {"users": 3, "cells": 1024},
        {"exact": True},
    ],
    ids=["f16", "q8_0", "trees", "window", "users", "exact"],
)
def test_parts_make_the_cache_that_was_there(
    path: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with closing(opened(path, **changes)) as backend:
        one = backend.sequences[-1]
        reads(one, TEXT)
        assert one.splits_cache
        for first, end in PARTS:
            assert one.save_cache(str(tmp_path / str(first)), first, end) > 0
        expected = [one.verify(DraftTree.chain((5, 6, 7))).copy()]
        one.commit([0])
        one.truncate(100)
        expected.append(one.prefill([9]).copy())
    with closing(opened(path, **changes)) as backend:
        one = backend.sequences[-1]
        for first, end in PARTS:
            one.load_cache(str(tmp_path / str(first)), TEXT[first:end], start=first)
        assert list(one.tokens) == TEXT and one.length == 200
        again, other = tmp_path / "again", PARTS[1]
        one.save_cache(str(again), *other)
        assert again.stat().st_size == (tmp_path / str(other[0])).stat().st_size
        found = [one.verify(DraftTree.chain((5, 6, 7))).copy()]
        one.commit([0])
        one.truncate(100)
        found.append(one.prefill([9]).copy())
        for mine, theirs in zip(found, expected, strict=True):
            assert np.array_equal(mine, theirs)
        one.truncate(130)  # a part may begin within the one before it
        one.load_cache(str(tmp_path / "64"), TEXT[64:130], start=64)
        assert list(one.tokens) == TEXT[:130]
        with pytest.raises(BackendError):
            one.load_cache(str(tmp_path / "none"), [1, 2], start=64)
        assert one.length == 0 and list(one.tokens) == []
        if len(backend.sequences) > 1:
            assert backend.length == 0


def test_other_users_keep_their_cells(path: Path, tmp_path: Path) -> None:
    with closing(opened(path, users=2, cells=1024)) as backend:
        mine, other = backend.sequences
        reads(mine, TEXT)
        reads(other, TEXT[::-1])
        mine.save_cache(str(tmp_path / "a"), 64, 128)
        mine.truncate(64)
        mine.load_cache(str(tmp_path / "a"), TEXT[64:128], start=64)
        assert np.array_equal(other.prefill([3]).argmax(), other.prefill([3]).argmax())
        assert list(other.tokens)[:200] == TEXT[::-1] and list(mine.tokens) == TEXT[:128]


def test_a_step_that_was_not_taken_is_in_no_file(path: Path, tmp_path: Path) -> None:
    with closing(opened(path)) as backend:
        reads(backend, TEXT)
        size = backend.save_cache(str(tmp_path / "a"))
        backend.verify(DraftTree.chain((5, 6, 7)))
        assert backend.save_cache(str(tmp_path / "b")) == size


@pytest.fixture(params=["exact users", "recurrent", "sliding", "off"])
def unsplit(request: pytest.FixtureRequest, path: Path, tmp_path: Path) -> Iterator[LlamaBackend]:
    if request.param == "exact users":
        backend = opened(path, exact=True, users=2, cells=1024)
    elif request.param == "recurrent":
        backend = opened(write_hybrid(tmp_path / "b.gguf", Shape(HYBRIDS[0]), F32), max_nodes=1)
    elif request.param == "sliding":
        sliding = write_model(tmp_path / "c.gguf", "gemma3", F32, reads_bytes=True)
        backend = opened(sliding)
    else:
        backend = opened(path, disk_cache_bytes=0)
    with closing(backend):
        yield backend


def test_a_cache_that_is_not_split_is_written_whole(unsplit: LlamaBackend, tmp_path: Path) -> None:
    reads(unsplit, TEXT)
    assert not unsplit.splits_cache
    unsplit.save_cache(str(tmp_path / "a"))
    expected = unsplit.prefill([3]).copy()
    unsplit.load_cache(str(tmp_path / "a"), TEXT)
    assert np.array_equal(unsplit.prefill([3]), expected)
