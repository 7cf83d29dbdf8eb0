"""llama.cpp behind the Backend protocol: reading, commits, pending tokens and roll-backs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cases import (
    LOG_ROUNDING,
    PROMPT,
    TREES,
    RecordingBackend,
    assert_tree_rows,
    feed,
    plain_rows,
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


def several_seeds(count: int) -> list[Any]:
    """The first one is always tried, the others where slow tests are."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, count))]


# ------------------------------------------------------------------------- commit and pending


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("a fork", 2),
        ("three children, the first with a child", 3),
        ("three forks in depth-first order", 7),
        ("two chains, interleaved", 8),
        ("children far behind their parents", 8),
        ("as many leaves as there are sequences", 8),
    ],
)
def test_decoding_goes_on_after_a_branch_that_is_not_the_first(
    backend: RecordingBackend, reference: LlamaBackend, name: str, leaf: int
) -> None:
    """12 more tokens of plain decoding are those of a cache that never saw a tree."""
    tree = DraftTree(random_tokens(2, len(TREES[name])), TREES[name])
    path = tree.path(leaf)
    feed(backend, PROMPT)
    backend.verify(tree)
    backend.commit(path)
    assert 0 < backend.pending < len(path), "a branch out of order is fed again"
    assert backend.length == len(PROMPT) + len(path)
    feed(reference, [*PROMPT, *(tree.tokens[node] for node in path)])
    token = 1234
    for count in range(12):
        row, expected = step(backend, token), step(reference, token)
        assert np.array_equal(row, expected), f"token {count} after the tree"
        token = int(expected.argmax())
    assert (backend.pending, backend.length) == (0, reference.length)


def test_the_first_branch_leaves_nothing_pending(
    backend: RecordingBackend, reference: LlamaBackend
) -> None:
    tree = DraftTree(random_tokens(4, 8), TREES["three forks in depth-first order"])
    feed(backend, PROMPT)
    backend.verify(tree)
    backend.commit([0, 1, 2, 3])
    assert (backend.pending, backend.length) == (0, len(PROMPT) + 4)
    expected = plain_rows(reference, [*PROMPT, *tree.tokens[:4], 77], len(PROMPT) + 4)
    assert np.array_equal(step(backend, 77), expected[0])


def test_part_of_a_path_can_be_committed(
    backend: RecordingBackend, reference: LlamaBackend
) -> None:
    tree = DraftTree(random_tokens(5, 9), TREES["two chains, interleaved"])
    for path in ([0], [0, 1], [0, 2], [0, 2, 4]):
        backend.truncate(0)
        feed(backend, PROMPT)
        backend.verify(tree)
        backend.commit(path)
        text = [*PROMPT, *(tree.tokens[node] for node in path)]
        assert backend.length == len(text)
        assert np.array_equal(step(backend, 99), plain_rows(reference, [*text, 99], len(text))[0])


@pytest.mark.parametrize("follower", ["chain", "tree", "prefill", "truncate"])
def test_pending_tokens_come_with_whatever_is_next(
    backend: RecordingBackend, reference: LlamaBackend, follower: str
) -> None:
    tree = DraftTree(random_tokens(6, 9), TREES["two chains, interleaved"])
    feed(backend, PROMPT)
    backend.verify(tree)
    backend.commit([0, 2, 4, 6])
    text = [*PROMPT, *(tree.tokens[node] for node in (0, 2, 4, 6))]
    assert backend.pending == 3
    if follower == "truncate":
        assert backend.truncate(len(text) - 2) == len(text) - 2 == backend.length
        assert backend.pending == 1
        del text[-2:]
    if follower in ("chain", "truncate"):
        chain = DraftTree.chain((31, 32, 33))
        assert_tree_rows(backend.verify(chain).copy(), chain, reference, text)
    elif follower == "tree":
        assert_tree_rows(backend.verify(tree).copy(), tree, reference, text)
    else:
        row = feed(backend, [41, 42])
        assert row.argmax() == plain_rows(reference, [*text, 41, 42], len(text))[-1].argmax()
        assert backend.length == len(text) + 2


class Mirror:
    """Random operations on a backend, with the text it should hold beside it."""

    def __init__(self, backend: LlamaBackend, reference: LlamaBackend, seed: int) -> None:
        self.backend, self.reference = backend, reference
        self.random = random.Random(seed)
        self.text: list[int] = []

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(100, 40_000), k=count)

    def prefill(self) -> None:
        added = self.tokens(self.random.randint(1, 20))
        self.text += added
        self.backend.prefill(added)

    def chain(self) -> None:
        self._verify(DraftTree.chain(self.tokens(self.random.randint(1, 8))))

    def tree(self) -> None:
        count = self.random.randint(3, 12)
        parents = random_parents(self.random.randrange(10**6), count)
        self._verify(DraftTree(self.tokens(count), parents))

    def truncate(self) -> None:
        length = self.random.randint(max(0, len(self.text) - 30), len(self.text))
        del self.text[length:]
        assert self.backend.truncate(length) == length

    def abandon(self) -> None:
        """A step whose result nobody wanted, as after an interrupt."""
        self.backend.verify(DraftTree(self.tokens(4), (-1, 0, 0, 1)))
        if self.random.random() < 0.5:
            self.backend.truncate(self.backend.length)
        else:
            self.prefill()

    def _verify(self, tree: DraftTree) -> None:
        assert_tree_rows(self.backend.verify(tree).copy(), tree, self.reference, self.text)
        path = tree.path(self.random.randrange(len(tree)))
        self.text += [tree.tokens[node] for node in path]
        self.backend.commit(path)


@pytest.mark.parametrize("seed", several_seeds(3))
def test_any_order_of_operations_keeps_the_text(
    backend: RecordingBackend, reference: LlamaBackend, seed: int
) -> None:
    """Trees after chains after trees, prefills and truncations between them."""
    mirror = Mirror(backend, reference, seed)
    operations = [mirror.prefill, mirror.chain, mirror.tree, mirror.truncate, mirror.abandon]
    mirror.prefill()
    for _ in range(14):
        mirror.random.choices(operations, (2, 3, 5, 2, 2))[0]()
        assert backend.length == len(mirror.text)
        if len(mirror.text) > 150:
            assert backend.truncate(20) == 20
            del mirror.text[20:]
    mirror.chain()
    assert any(leaves > 1 for _, leaves, _ in backend.seen)
    assert any(pending > 0 for _, _, pending in backend.seen)


# ---------------------------------------------------------------------- prefill and truncation


@pytest.mark.parametrize("seed", several_seeds(2))
def test_chunks_of_a_prefill_do_not_change_the_choice(backend: RecordingBackend, seed: int) -> None:
    text = random_tokens(seed, 70)
    rows = []
    for chunk in (1, 7, 20, 32):
        backend.truncate(0)
        rows.append(feed(backend, text, chunk))
        assert backend.length == len(text)
    assert all(np.array_equal(row, rows[0]) for row in rows)
    assert not np.array_equal(feed(backend, text[:7]), rows[0]), "the text matters"


@pytest.mark.long
def test_large_chunks_of_a_prefill_choose_alike() -> None:
    """Chunks of 64 and more round differently, so only the choice of a clear case is the same."""
    backend = LlamaBackend(embedded_model(), settings(batch_size=256))
    text = backend.tokenizer.encode("one two three four five six seven eight nine ten\n" * 15)
    del text[-2:]  # " ten" is next
    assert 150 < len(text) < 256
    expected = feed(backend, text, 32)
    for chunk in (64, 100, 256):
        backend.truncate(0)
        row = feed(backend, text, chunk)
        assert row.argmax() == expected.argmax(), chunk
        assert float(np.abs(row - expected).max()) < 1.5, chunk
    backend.close()


def test_truncated_text_can_be_continued(
    backend: RecordingBackend, reference: LlamaBackend
) -> None:
    feed(backend, PROMPT)
    assert backend.truncate(1000) == len(PROMPT), "more than there is keeps everything"
    assert backend.truncate(25) == 25 == backend.length
    other = random_tokens(8, 10)
    rows = [step(backend, token) for token in other]
    assert all(map(np.array_equal, rows, plain_rows(reference, [*PROMPT[:25], *other], 25)))
    assert backend.truncate(0) == 0 == backend.length
    feed(backend, other)
    expected = plain_rows(reference, [*other, 5], len(other))
    assert np.array_equal(step(backend, 5), expected[0])


def test_two_backends_live_side_by_side(
    backend: RecordingBackend, reference: LlamaBackend, model: Path
) -> None:
    one, two = random_tokens(11, 30), random_tokens(12, 50)
    expected_one = plain_rows(reference, one, 20)
    expected_two = plain_rows(reference, two, 40)
    other = LlamaBackend(model, settings(256))
    feed(backend, one[:20])
    feed(other, two[:40])
    for i in range(5):
        assert np.array_equal(step(backend, one[20 + i]), expected_one[i])
        assert np.array_equal(step(other, two[40 + i]), expected_two[i])
    caches = [made.memory_bytes()["kv_cache"] for made in (backend, other)]
    assert caches[0] == pytest.approx(2 * caches[1], abs=3 * LOG_ROUNDING)
    other.close()
    for i in range(5, 10):
        assert np.array_equal(step(backend, one[20 + i]), expected_one[i])
