"""Trees: rows of every branch are those of its path decoded as a chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_cases import (
    PROMPT,
    TREES,
    RecordingBackend,
    assert_tree_rows,
    feed,
    random_parents,
    random_tokens,
    settings,
    step,
)

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.tree import DraftTree
from edgespec.models.embedded import embedded_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(wide_model: Path) -> Path:
    return wide_model


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
def test_tree_rows_equal_their_paths_decoded_as_chains(
    backend: RecordingBackend, reference: LlamaBackend, parents: Sequence[int]
) -> None:
    tree = DraftTree(random_tokens(1, len(parents)), parents)
    feed(backend, PROMPT)
    rows = backend.verify(tree).copy()
    assert rows.shape == (len(parents), backend.tokenizer.vocab_size)
    assert_tree_rows(rows, tree, reference, PROMPT)


@pytest.mark.parametrize("seed", range(6))
def test_random_tree_rows_equal_their_paths_decoded_as_chains(
    backend: RecordingBackend, reference: LlamaBackend, seed: int
) -> None:
    tree = DraftTree(random_tokens(seed, 14), random_parents(seed, 14))
    feed(backend, PROMPT[: 10 + seed])
    rows = backend.verify(tree).copy()
    assert not tree.is_chain
    assert_tree_rows(rows, tree, reference, PROMPT[: 10 + seed])


def test_equal_tokens_in_different_places_get_different_rows(backend: RecordingBackend) -> None:
    """Branches do not see each other, and a node sees its own path."""
    tree = DraftTree((7, 8, 9, 500, 500), (-1, 0, 0, 1, 2))
    feed(backend, PROMPT)
    rows = backend.verify(tree)
    assert not np.array_equal(rows[3], rows[4])
    twins = DraftTree((7, 8, 8, 500, 500), (-1, 0, 0, 1, 2))
    backend.truncate(backend.length)
    rows = backend.verify(twins)
    assert np.array_equal(rows[1], rows[2]) and np.array_equal(rows[3], rows[4])


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q8_0", "q8_0")])
def test_batches_round_like_single_tokens_up_to_256_cells(type_k: str, type_v: str) -> None:
    """llama.cpp looks at cells in blocks of 256, and splits single rows of f16 from 512 on."""
    backend = LlamaBackend(
        embedded_model(), settings(512, threads=2, kv_type_k=type_k, kv_type_v=type_v)
    )
    text = random_tokens(3, 256)
    for depth, size in ((64, 2), (64, 3), (100, 32), (200, 8), (248, 8)):
        if depth > backend.length:
            feed(backend, text[backend.length : depth])
        singles = [step(backend, token) for token in text[depth : depth + size]]
        backend.truncate(depth)
        rows = backend.verify(DraftTree.chain(text[depth : depth + size])).copy()
        backend.truncate(depth)
        assert np.array_equal(rows, np.stack(singles)), f"{size} tokens after {depth}"
    backend.close()
