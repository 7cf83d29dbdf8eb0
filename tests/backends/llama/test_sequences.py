"""Several conversations in one cache of llama.cpp: each is as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.base import HoldsSequences, Logits
from edgespec.backends.llama.backend import LlamaBackend, LlamaSequence
from edgespec.backends.tree import DraftTree
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig

pytestmark = pytest.mark.model

USERS = 3
NOISE = (
    1.5  # of a logit: cells lie in another order, so sums round otherwise; wrong ones are off by 5
)


def settings(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {"batch_size": 32, "max_nodes": 16, "max_leaves": 6, "threads": 1}
    return RunConfig(256, **{**values, "kv_type_k": "bf16", **changes})


@pytest.fixture(scope="module")
def loaded(wide_model: Path) -> Iterator[LlamaBackend]:
    made = LlamaBackend(wide_model, settings(users=USERS, cells=512))
    yield made
    made.close()


@pytest.fixture(scope="module")
def loaded_alone(wide_model: Path) -> Iterator[LlamaBackend]:
    made = LlamaBackend(wide_model, settings(max_leaves=1))
    yield made
    made.close()


@pytest.fixture
def backend(loaded: LlamaBackend) -> LlamaBackend:
    for sequence in loaded.sequences:
        sequence.truncate(0)
    return loaded


@pytest.fixture
def alone(loaded_alone: LlamaBackend) -> LlamaBackend:
    loaded_alone.truncate(0)
    return loaded_alone


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 20_000) for _ in range(count)]


def random_tree(rng: random.Random, count: int, most_leaves: int) -> DraftTree:
    while True:
        parents = [-1, *(rng.randrange(node) for node in range(1, count))]
        tree = DraftTree(random_tokens(rng, count), parents)
        if len(tree.leaves()) <= most_leaves:
            return tree


def row_alone(alone: LlamaBackend, text: list[int]) -> Logits:
    """Logits after a text, by single sequence and chain."""
    known = 0
    for ours, theirs in zip(alone.tokens, text[:-1], strict=False):
        if ours != theirs:
            break
        known += 1
    for start in range(alone.truncate(known), len(text), alone.batch_size):
        row = alone.prefill(text[start : start + alone.batch_size])
    return np.array(row)


def assert_rows(
    alone: LlamaBackend, sequence: LlamaSequence, tree: DraftTree, rows: Logits
) -> None:
    assert len(rows) == len(tree)
    text = list(sequence.tokens)
    for node in range(len(tree)):
        path = [tree.tokens[i] for i in tree.path(node)]
        assert np.abs(rows[node] - row_alone(alone, text + path)).max() < NOISE


def test_a_backend_of_one_user_holds_one_sequence(alone: LlamaBackend) -> None:
    assert isinstance(alone, HoldsSequences)
    assert (alone.sequences, alone.cells) == ((alone,), 256)


@pytest.mark.parametrize("seed", [0, 1])
def test_trees_and_chains_of_several_users_in_one_step(
    backend: LlamaBackend, alone: LlamaBackend, seed: int
) -> None:
    """Rows come back by user, whoever takes part; each commits, rolls back and goes on alone."""
    rng = random.Random(seed)
    for sequence in backend.sequences:
        sequence.prefill(random_tokens(rng, rng.randrange(5, 20)))
    for _ in range(5):
        users = rng.sample(range(USERS), rng.randrange(1, USERS + 1))
        steps = [(user, random_tree(rng, rng.randrange(1, 6), 3)) for user in users]
        texts = {user: list(backend.sequences[user].tokens) for user in range(USERS)}
        found = [rows.copy() for rows in backend.verify_together(steps)]
        for (user, tree), rows in zip(steps, found, strict=True):
            sequence = backend.sequences[user]
            assert_rows(alone, sequence, tree, rows)
            path = tree.path(rng.choice(tree.leaves()))[: rng.randrange(1, 5)]
            sequence.commit(path)
            texts[user] += [tree.tokens[node] for node in path]
        assert [list(one.tokens) for one in backend.sequences] == list(texts.values())


def test_a_prompt_is_read_between_the_steps_of_another(
    backend: LlamaBackend, alone: LlamaBackend
) -> None:
    rng = random.Random(7)
    first, second, _ = backend.sequences
    first.prefill(random_tokens(rng, 10))
    prompt = random_tokens(rng, 40)
    for start in range(0, 40, 8):
        row = second.prefill(prompt[start : start + 8]).copy()
        tree = DraftTree.chain(random_tokens(rng, 3))
        assert_rows(alone, first, tree, first.verify(tree).copy())
        first.commit((0,))
    assert np.abs(row - row_alone(alone, prompt)).max() < NOISE


def test_prompts_are_read_in_the_step_of_others(backend: LlamaBackend, alone: LlamaBackend) -> None:
    """Two prompts of different lengths beside a tree of a third user; the last pieces alone."""
    rng = random.Random(11)
    first, _, third = backend.sequences
    first.prefill(random_tokens(rng, 10))
    prompts = {1: random_tokens(rng, 14), 2: random_tokens(rng, 9)}
    third.prefill(prompts[2][:4])
    tree = random_tree(rng, 5, 3)
    pieces = [(1, prompts[1][:12]), (2, prompts[2][4:])]
    rows, _, last = (one.copy() for one in backend.verify_together([(0, tree)], pieces))
    assert_rows(alone, first, tree, rows)
    assert last.shape == (1, backend.tokenizer.vocab_size)
    assert np.abs(last[0] - row_alone(alone, prompts[2])).max() < NOISE
    path = tree.path(tree.leaves()[-1])
    first.commit(path)
    [last] = (one.copy() for one in backend.verify_together([], [(1, prompts[1][12:])]))
    assert np.abs(last[0] - row_alone(alone, prompts[1])).max() < NOISE
    tree = random_tree(rng, 3, 2)
    assert_rows(alone, first, tree, first.verify(tree).copy())
    assert [one.length for one in backend.sequences] == [10 + len(path), 14, 9]


def test_a_shared_prefix_outlives_whoever_read_it(
    backend: LlamaBackend, alone: LlamaBackend
) -> None:
    rng = random.Random(3)
    first, second, third = backend.sequences
    prompt = random_tokens(rng, 30)
    first.prefill(prompt)
    backend.share(0, 1, 20)
    backend.share(1, 2, 12)
    assert (second.tokens, third.tokens) == (prompt[:20], prompt[:12])
    first.truncate(0)
    second.truncate(5)
    tree = random_tree(rng, 4, 2)
    assert_rows(alone, third, tree, third.verify(tree).copy())
    assert_rows(alone, second, tree, second.verify(tree).copy())


def test_what_one_user_gives_back_another_can_have(backend: LlamaBackend) -> None:
    """512 cells for three users of at most 256."""
    rng = random.Random(5)

    def read(user: int) -> None:
        for _ in range(8):
            backend.sequences[user].prefill(random_tokens(rng, 32))

    read(0)
    read(1)
    with pytest.raises(BackendError, match="llama_decode failed with 1"):
        backend.sequences[2].prefill([1000])
    backend.sequences[0].truncate(0)
    read(2)
    assert [one.length for one in backend.sequences] == [0, 256, 256]


def test_more_than_a_step_has_room_for_is_refused(backend: LlamaBackend) -> None:
    steps = [(user, DraftTree.chain(range(1000, 1006))) for user in range(USERS)]
    with pytest.raises(UnsupportedError, match="a step has room for 16 nodes, not 18"):
        backend.verify_together(steps)
    stars = [(user, DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 0, 0))) for user in range(2)]
    with pytest.raises(
        UnsupportedError, match="a tree with 4 leaves cannot be verified: at most 3"
    ):
        backend.verify_together(stars)
