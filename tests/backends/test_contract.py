"""What every backend promises (`backends/base.py`): it holds the texts that lists beside it hold.

Prompts, trees, commits, cuts, shared prefixes and files come in any order. Every row is compared
with that of a second backend which reads the text alone, its last tokens one a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_backend import FakeBackend
from hybrid_gguf import Shape, write_hybrid
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from random_gguf import F32, Q8_0, write_model

from edgespec.backends.base import (
    Backend,
    DraftTree,
    HoldsSequences,
    KeepsLogits,
    Logits,
    sequences_of,
)
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.backends.ort.cache import converted
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.onnx.facts import SPLIT, GraphOptions, read_facts
from edgespec.models.onnx.folder import GRAPH_FILE
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.model

LONGEST, VOCABULARY = 160, 250  # below 256 cells llama.cpp rounds all steps alike
FACTOR = int(os.environ.get("EDGESPEC_FUZZ", "1"))


class Pair(NamedTuple):
    """A backend, the one that reads everything alone, and how near their rows have to be."""

    backend: Backend
    reference: Backend
    noise: float = 0.0  # of logits with a standard deviation of 8: five times what was seen
    likeness: float = 1.0  # correlation of rows whose activations are rounded on the way
    feeds_again: bool = False  # accepted nodes that were fed out of order
    examples: int = 12  # of which each makes up to 30 steps


def llama_pair(path: Path, noise: float = 0.0, **changes: Any) -> Pair:
    values: dict[str, Any] = {"batch_size": 32, "max_nodes": 32, "max_leaves": 24, "threads": 1}
    values |= {"gpu_layers": 0} | changes
    alone = values | {"users": 1, "max_leaves": 1, "cells": 0}
    ours, theirs = (LlamaBackend(path, RunConfig(512, **one)) for one in (values, alone))
    return Pair(ours, theirs, noise, feeds_again=True)


def recurrent_pair(path: Path, noise: float = 0.0, snapshots: int = 6) -> Pair:
    values: dict[str, Any] = {"batch_size": 64, "gpu_layers": 0, "threads": 1}
    chosen = RunConfig(512, max_nodes=snapshots + 1, snapshots=snapshots, **values)
    alone = LlamaBackend(path, RunConfig(512, max_nodes=1, **values))
    return Pair(RecurrentBackend(path, chosen), alone, noise)


def ort_pair(path: Path, folder: Path, *, split: bool = False, exact: bool = False) -> Pair:
    from edgespec.backends.ort.backend import OrtBackend

    spec, facts = read_model_spec(path), None
    graphs = {GRAPH_FILE: GraphOptions(SPLIT, plain=True)} if split else None
    place, facts = converted(spec, folder / "converted", "cpu", graphs=graphs), read_facts(spec)
    ours, theirs = (
        OrtBackend(spec, facts, place, RunConfig(512, batch_size=32, max_nodes=16, exact=exact))
        for _ in range(2)
    )
    noise, likeness = (2e-3, 1.0) if split else (0.0, 1.0) if exact else (0.0, 0.99)
    return Pair(ours, theirs, noise, likeness, examples=5)  # ten times as slow as llama.cpp


def fake_pair(**changes: Any) -> Pair:
    def whole_context(context: tuple[int, ...]) -> Sequence[float]:
        return [float(hash((context, token)) % 97) for token in range(16)]

    ours = FakeBackend(whole_context, 16, context_size=512, **changes)
    alone = FakeBackend(whole_context, 16, context_size=512)
    return Pair(ours, alone, feeds_again=changes.get("feeds_again", False))


def dense(folder: Path, kind: Any = Q8_0) -> Path:
    return write_hybrid(folder / "model.gguf", Shape("llama", interval=1), kind)


def hybrid(arch: str, kind: Any, noise: float = 0.0) -> Callable[[Path], Pair]:
    return lambda one: recurrent_pair(
        write_hybrid(one / "model.gguf", Shape(arch), kind), noise=noise
    )


def onnx(arch: str, **changes: bool) -> Callable[[Path], Pair]:
    return lambda one: ort_pair(write_model(one / "model.gguf", arch, Q8_0), one, **changes)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "llama.cpp": lambda one: llama_pair(dense(one)),
    # Cells lie in another order where several are at work, so sums round otherwise.
    "llama.cpp, three users": lambda one: llama_pair(dense(one, F32), 0.4, users=3, cells=512),
    "llama.cpp, three users whose rows depend on nobody": lambda one: llama_pair(
        dense(one), users=3, exact=True, max_leaves=1
    ),
    "llama.cpp, a cache of 8 bits": lambda one: llama_pair(
        dense(one), kv_type_k="q8_0", kv_type_v="q8_0"
    ),
    "a sliding window": lambda one: llama_pair(
        write_model(one / "model.gguf", "gemma3", F32), 0.1, max_leaves=1
    ),
    "a recurrent state": lambda one: llama_pair(
        write_hybrid(one / "model.gguf", Shape("mamba"), F32), 1e-3, max_leaves=1, max_nodes=1
    ),
    "snapshots of delta nets": hybrid("qwen35", Q8_0),
    # Steps of several tokens round otherwise than single ones in llama.cpp.
    "snapshots of short convolutions": hybrid("lfm2", F32, 0.05),
    "snapshots of Mamba 2": hybrid("nemotron_h", Q8_0),
    "ONNX Runtime": onnx("gemma3"),
    "ONNX Runtime, exact": onnx("llama", exact=True),
    "ONNX Runtime, split graphs": onnx("gemma3", split=True),
    "ONNX Runtime, split graphs with biases": onnx("qwen2", split=True),
    "the fake": lambda _one: fake_pair(feeds_again=True),
    "the fake, three users": lambda _one: fake_pair(users=3),
    "the fake without branches": lambda _one: fake_pair(tree=False),
    "the fake that takes nothing back": lambda _one: fake_pair(rollback=False),
}

USERS = st.integers(0, 2)
TEXTS = st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=20)
# Tokens, how far before a node its parent is, and which node is the last one accepted: most often
# one behind a branch.
TREES = st.tuples(
    st.one_of(
        st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=8),
        st.lists(st.integers(0, VOCABULARY), min_size=6, max_size=8),
    ),
    st.lists(st.sampled_from((2, 1, 3, 5)), min_size=8, max_size=8),
    st.sampled_from((7, 6, 5, 4, 3, 2, 1, 0)),
)
Drawn = tuple[list[int], list[int], int]


class Contract(RuleBasedStateMachine):
    """A backend, and a list for each of its sequences."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__()
        self.pair, self.file = pair, str(folder / "cache")
        self.backend = pair.backend
        self.sequences = sequences_of(pair.backend)
        self.texts: list[list[int]] = [[] for _ in self.sequences]
        for one in self.sequences:
            assert one.truncate(0) == 0

    # -- what is done --------------------------------------------------------------------------

    @rule(user=USERS, tokens=TEXTS)
    def read(self, user: int, tokens: list[int]) -> None:
        user = self._with_room(user)
        row = self.sequences[user].prefill(tokens).copy()
        self.texts[user] += tokens
        self._compare(row, self._rows([], self.texts[user])[-1])

    @rule(user=USERS, drawn=TREES)
    def verify(self, user: int, drawn: Drawn) -> None:
        user = self._with_room(user)
        tree = self._tree(drawn)
        rows = self.sequences[user].verify(tree).copy()
        self._accept(user, tree, rows, drawn[2])

    @rule(trees=st.dictionaries(USERS, TREES), pieces=st.dictionaries(USERS, TEXTS))
    def verify_together(self, trees: dict[int, Drawn], pieces: dict[int, list[int]]) -> None:
        """Trees of some users and prompts of others in one step, whoever takes part."""
        backend, count = self.backend, len(self.sequences)
        if not isinstance(backend, HoldsSequences) or count == 1:
            return
        steps = [(self._with_room(user), self._tree(one)) for user, one in trees.items()]
        read = [(self._with_room(user), one[:8]) for user, one in pieces.items()]
        read = [(user, one) for user, one in read if user not in trees]
        if not steps and not read:
            return
        found = [rows.copy() for rows in backend.verify_together(steps, read)]
        assert len(found) == len(steps) + len(read)
        for (user, tree), rows in zip(steps, found, strict=False):
            self._accept(user, tree, rows, trees[user][2])
        for (user, tokens), rows in zip(read, found[len(steps) :], strict=True):
            self.texts[user] += tokens
            assert len(rows) == 1
            self._compare(rows[0], self._rows([], self.texts[user])[-1])

    @rule(user=USERS, back=st.integers(-5, 40))
    def cut(self, user: int, back: int) -> None:
        user %= len(self.texts)
        length = max(0, len(self.texts[user]) - back)
        self._cut(user, length)

    @rule(user=USERS, drawn=TREES, tokens=TEXTS, is_cut=st.booleans())
    def abandon(self, user: int, drawn: Drawn, tokens: list[int], is_cut: bool) -> None:
        """A step whose result nobody wanted, as after an interrupt."""
        user, can = self._with_room(user), self.backend.capabilities
        if not can.rollback and not isinstance(self.backend, LlamaBackend):
            return  # nothing is drafted, so each step is wanted
        self.sequences[user].verify(self._tree(drawn))
        if is_cut or not can.truncate:
            self._cut(user, len(self.texts[user]))
        else:
            self.read(user, tokens)

    @rule(source=USERS, user=USERS, count=st.integers(0, 60))
    def share(self, source: int, user: int, count: int) -> None:
        """What is shared stays with whoever has it, whatever the others do."""
        backend = self.backend
        if source == user or len(self.texts) == 1 or not isinstance(backend, HoldsSequences):
            return
        count = min(count, len(self.texts[source]) - self.sequences[source].pending)
        backend.share(source, user, count)
        self.texts[user] = self.texts[source][:count]

    @rule()
    def go_to_a_file_and_back(self) -> None:
        backend = self.backend
        if not isinstance(backend, LlamaBackend) or len(self.texts) > 1:
            return
        tokens = list(backend.tokens[: backend.length - backend.pending])
        if tokens:
            assert backend.save_cache(self.file) > 0
            backend.truncate(0)
            backend.load_cache(self.file, tokens)
            self.texts = [tokens]

    @rule(user=USERS, drawn=TREES)
    def ask_too_much(self, user: int, drawn: Drawn) -> None:
        """Branches or nodes that cannot be: refused, and nothing has happened."""
        user, can, most = self._with_room(user), self.backend.capabilities, self.backend.max_nodes
        with pytest.raises(UnsupportedError):
            self.sequences[user].verify(DraftTree.chain(range(most + 1)))
        if not can.tree:
            assert can.reason
            with pytest.raises(UnsupportedError):
                self.sequences[user].verify(DraftTree((1, 2, 3), (-1, 0, 0)))
        assert self.sequences[user].truncate(len(self.texts[user])) == len(self.texts[user])

    @invariant()
    def texts_are_those_of_the_lists(self) -> None:
        assert [list(one.tokens) for one in self.sequences] == self.texts
        assert [one.length for one in self.sequences] == [len(one) for one in self.texts]
        assert all(0 <= one.pending <= one.length for one in self.sequences)

    @invariant()
    def logits_that_are_kept_are_those_behind_the_last_token(self) -> None:
        for one, text in zip(self.sequences, self.texts, strict=True):
            if isinstance(one, KeepsLogits) and (row := one.last_logits()) is not None:
                self._compare(row.copy(), self._rows([], text)[-1])

    # -- how it is compared --------------------------------------------------------------------

    def _with_room(self, user: int) -> int:
        """A user's number, whose text is not long."""
        user %= len(self.texts)
        if len(self.texts[user]) > LONGEST:
            self._cut(user, 20)
        return user

    def _tree(self, drawn: Drawn) -> DraftTree:
        tokens, back = drawn[0][: self.backend.max_nodes], drawn[1]
        if not self.backend.capabilities.tree:
            return DraftTree.chain(tokens)
        parents = [max(0, node - back[node]) for node in range(1, len(tokens))]
        return DraftTree(tokens, [-1, *parents])

    def _cut(self, user: int, length: int) -> None:
        """All that was asked for is kept where texts can be cut; elsewhere that or nothing."""
        text, can = self.texts[user], self.backend.capabilities
        length = min(length, len(text))
        kept = self.sequences[user].truncate(length)
        assert kept == length or (kept == 0 and not can.truncate)
        del text[kept:]

    def _accept(self, user: int, tree: DraftTree, rows: Logits, last: int) -> None:
        """Compare the rows of all nodes, and commit the path to one of them."""
        text = self.texts[user]
        assert len(rows) == len(tree)
        for leaf in tree.leaves():
            path = tree.path(leaf)
            expected = self._rows(text, [tree.tokens[node] for node in path])
            for node, row in zip(path, expected, strict=True):
                self._compare(rows[node], row)
        path = tree.path(last % len(tree))
        self.sequences[user].commit(path)
        in_order = sum(node == place for place, node in enumerate(path))
        is_fed_again = self.pair.feeds_again
        assert self.sequences[user].pending == (len(path) - in_order if is_fed_again else 0)
        text += [tree.tokens[node] for node in path]

    def _rows(self, text: list[int], more: list[int]) -> list[Logits]:
        """Logits behind each of the last tokens of `more` (8 at most) after `text`."""
        reference, few = self.pair.reference, more[-8:]
        whole = [*text, *more[:-8]]
        both = zip(reference.tokens, whole, strict=False)
        known = next((i for i, (one, other) in enumerate(both) if one != other), len(whole))
        kept = reference.truncate(min(known, reference.length))
        for start in range(kept, len(whole), 32):
            reference.prefill(whole[start : min(start + 32, len(whole))])
        rows = []
        for token in few:
            rows.append(reference.verify(DraftTree.chain((token,)))[0].copy())
            reference.commit((0,))
        return rows

    def _compare(self, ours: Logits, theirs: Logits) -> None:
        if self.pair.likeness < 1.0:
            assert np.corrcoef(ours, theirs)[0, 1] > self.pair.likeness
        else:
            assert float(np.abs(ours - theirs).max()) <= self.pair.noise


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    if request.param.startswith("ONNX"):
        pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
        pytest.importorskip("onnx", reason="the onnx extra is not installed")
    made = PAIRS[request.param](tmp_path_factory.mktemp("contract"))
    yield made
    made.backend.close()
    made.reference.close()


@pytest.mark.hypothesis
def test_a_backend_holds_what_lists_hold(pair: Pair, tmp_path: Path) -> None:
    machine: Any = partial(Contract, pair, tmp_path)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=pair.examples * FACTOR,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
