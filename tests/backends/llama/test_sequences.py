"""What one step and one cache of llama.cpp hold of several conversations.

That each is as if it were alone is shown in `tests/backends/test_contract.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hybrid_gguf import Shape, write_hybrid

from edgespec.backends.base import DraftTree, HoldsSequences
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig

pytestmark = pytest.mark.model

USERS = 3


def opened(folder: Path, users: int, cells: int) -> LlamaBackend:
    path = write_hybrid(folder / "model.gguf", Shape("llama", interval=1))
    sizes: dict[str, Any] = {"batch_size": 32, "max_nodes": 16, "max_leaves": 6, "threads": 1}
    return LlamaBackend(path, RunConfig(256, users=users, cells=cells, **sizes))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LlamaBackend]:
    with closing(opened(tmp_path, USERS, 512)) as made:
        yield made


def test_a_backend_of_one_user_holds_one_sequence(tmp_path: Path) -> None:
    with closing(opened(tmp_path, 1, 0)) as alone:
        assert isinstance(alone, HoldsSequences)
        assert (alone.sequences, alone.cells) == ((alone,), 256)


def test_what_one_user_gives_back_another_can_have(backend: LlamaBackend) -> None:
    """512 cells for three users of at most 256."""

    def read(user: int) -> None:
        for _ in range(8):
            backend.sequences[user].prefill(range(32))

    read(0)
    read(1)
    with pytest.raises(BackendError, match="llama_decode failed with 1"):
        backend.sequences[2].prefill([100])
    backend.sequences[0].truncate(0)
    read(2)
    assert [one.length for one in backend.sequences] == [0, 256, 256]


def test_more_than_a_step_has_room_for_is_refused(backend: LlamaBackend) -> None:
    steps = [(user, DraftTree.chain(range(100, 106))) for user in range(USERS)]
    with pytest.raises(UnsupportedError, match="a step has room for 16 nodes, not 18"):
        backend.verify_together(steps)
    stars = [(user, DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 0, 0))) for user in range(2)]
    with pytest.raises(
        UnsupportedError, match="a tree with 4 leaves cannot be verified: at most 3"
    ):
        backend.verify_together(stars)
