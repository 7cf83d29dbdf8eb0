"""llama.cpp behind the Backend protocol, on the embedded model and on random-weight files.

A second backend that only ever decodes single tokens in one sequence is the slow, obvious reference
of trees, roll-backs and pending tokens: every row must equal its row bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from random_gguf import Q8_0, byte_tokens, write_model

import edgespec
from edgespec.backends.base import Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.library import LOG, library
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.drafting.drafters.base import Drafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.errors import (
    BackendError,
    ContextFullError,
    ModelNotFoundError,
    UnsupportedError,
)
from edgespec.measure.divergence import find_divergence
from edgespec.measure.noise import measure_batch_noise
from edgespec.memory.bytes.footprint import RunShape, compute_bytes, kv_cache_bytes
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.memory.times.curve import CostCurve
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.quantize.context import EvalContext
from edgespec.sampling.params import SamplingParams
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

# One thread: a second one waits in a busy loop, which is slow wherever something else runs. The
# tests about rounding take two, because llama.cpp splits a row's attention among the threads.
THREADS = 1
MEBIBYTE = 2**20
# llama.cpp's log gives sizes with two decimals.
LOG_ROUNDING = 0.006 * MEBIBYTE


class RecordingBackend(LlamaBackend):
    """Remembers what it verified: how many nodes and leaves, and how many tokens were pending."""

    seen: list[tuple[int, int, int]]

    def verify(self, tree: DraftTree) -> Logits:
        self.seen.append((len(tree), len(tree.leaves()), self.pending))
        return super().verify(tree)


def settings(context_size: int = 512, **changes: Any) -> LlamaSettings:
    """Steps of at most 32 tokens: from 64 on llama.cpp's attention works in tiles of rows."""
    values: dict[str, Any] = {"batch_size": 32, "max_nodes": 32, "max_leaves": 8}
    return LlamaSettings(context_size, **{**values, "threads": THREADS, **changes})


def recording(path: Path, chosen: LlamaSettings) -> RecordingBackend:
    made = RecordingBackend(path, chosen)
    made.seen = []
    return made


@pytest.fixture(scope="module")
def model() -> Path:
    return embedded_model()


@pytest.fixture(scope="module")
def spec(model: Path) -> ModelSpec:
    return read_model_spec(model)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[RecordingBackend]:
    made = recording(model, settings())
    yield made
    made.close()


@pytest.fixture(scope="module")
def loaded_reference(model: Path) -> Iterator[LlamaBackend]:
    made = LlamaBackend(model, settings(max_leaves=1, max_nodes=8))
    yield made
    made.close()


@pytest.fixture
def backend(loaded: RecordingBackend) -> RecordingBackend:
    loaded.truncate(0)
    loaded.seen.clear()
    return loaded


@pytest.fixture
def reference(loaded_reference: LlamaBackend) -> LlamaBackend:
    loaded_reference.truncate(0)
    return loaded_reference


def several_seeds(count: int) -> list[Any]:
    """The first one is always tried, the others where slow tests are."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, count))]


def feed(backend: LlamaBackend, tokens: Sequence[int], chunk: int = 0) -> Logits:
    """Prefill everything; the last token's logits, copied."""
    size = chunk or backend.batch_size
    for start in range(0, len(tokens), size):
        row = backend.prefill(tokens[start : start + size])
    last: Logits = row.copy()
    return last


def step(backend: LlamaBackend, token: int) -> Logits:
    """One token of plain decoding; its logits, copied."""
    row: Logits = backend.verify(DraftTree.chain((token,)))[0].copy()
    backend.commit([0])
    return row


def plain_rows(reference: LlamaBackend, text: Sequence[int], start: int) -> list[Logits]:
    """The slow way: logits of `text[start:]`, one token a step."""
    reference.truncate(0)
    feed(reference, text[:start])
    return [step(reference, token) for token in text[start:]]


def assert_tree_rows(
    rows: Logits, tree: DraftTree, reference: LlamaBackend, text: Sequence[int]
) -> None:
    """Every node's row equals that of its path decoded after `text`, token by token."""
    reference.truncate(0)
    feed(reference, text)
    for leaf in tree.leaves():
        reference.truncate(len(text))
        for node in tree.path(leaf):
            row = step(reference, tree.tokens[node])
            assert np.array_equal(rows[node], row), f"node {node} on the way to leaf {leaf}"


def random_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40_000), k=count)


PROMPT = random_tokens(0, 40)

# ------------------------------------------------------------------------------------- trees

TREES = {
    "a fork": (-1, 0, 0),
    "three children, the first with a child": (-1, 0, 0, 0, 1),
    "two levels of forks": (-1, 0, 0, 1, 1, 2, 2),
    "three forks in depth-first order": (-1, 0, 1, 2, 1, 4, 0, 6),
    "the deep branch comes last": (-1, 0, 0, 2, 3, 4, 5),
    "two chains, interleaved": (-1, 0, 0, 1, 2, 3, 4, 5, 6),
    "three chains, interleaved, one forks": (-1, 0, 0, 0, 3, 2, 1, 4, 5, 6, 7, 7),
    "children far behind their parents": (-1, 0, 0, 2, 3, 1, 4, 1, 6, 5),
    "as many leaves as there are sequences": (-1, 0, 0, 0, 0, 0, 0, 0, 0),
}


def random_parents(seed: int, count: int, max_leaves: int = 8) -> list[int]:
    """A random tree of at most `max_leaves` leaves."""
    source = random.Random(seed)
    while True:
        parents = [-1, *(source.randrange(max(0, i - 5), i) for i in range(1, count))]
        if len(DraftTree([0] * count, parents).leaves()) <= max_leaves:
            return parents


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
def test_batches_round_like_single_tokens_up_to_256_cells(
    model: Path, type_k: str, type_v: str
) -> None:
    """llama.cpp looks at cells in blocks of 256, and splits single rows of f16 from 512 on."""
    backend = LlamaBackend(model, settings(512, threads=2, kv_type_k=type_k, kv_type_v=type_v))
    text = random_tokens(3, 256)
    for depth, size in ((64, 2), (64, 3), (100, 32), (200, 8), (248, 8)):
        singles = plain_rows(backend, text[: depth + size], depth)
        backend.truncate(depth)
        rows = backend.verify(DraftTree.chain(text[depth : depth + size]))
        assert np.array_equal(rows, np.stack(singles)), f"{size} tokens after {depth}"
    backend.close()


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


def test_large_chunks_of_a_prefill_choose_alike(model: Path, reference: LlamaBackend) -> None:
    """Chunks of 64 and more round differently, so only the choice of a clear case is the same."""
    backend = LlamaBackend(model, settings(batch_size=256))
    text = backend.tokenizer.encode("one two three four five six seven eight nine ten\n" * 15)
    del text[-2:]  # " ten" is next
    assert 150 < len(text) < 256
    expected = feed(reference, text)
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


# ------------------------------------------------------------------------------------- limits


def test_ctrl_c_ends_loading(model: Path) -> None:
    """It comes within a callback of C, which drops what is raised there."""
    heard: list[float] = []

    def report(fraction: float) -> None:
        if not heard:
            signal.raise_signal(signal.SIGINT)
        heard.append(fraction)

    with pytest.raises(KeyboardInterrupt):
        LlamaBackend(str(model), LlamaSettings(context_size=64), progress=report)
    assert heard[-1] < 1.0


def open_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is open of models and contexts that are made from now on."""
    lib, opened = library(), list[str]()
    for made, freed in (
        ("llama_model_load_from_file", "llama_model_free"),
        ("llama_init_from_model", "llama_free"),
    ):
        make, free = getattr(lib, made), getattr(lib, freed)

        def count(*arguments: Any, made: str = made, make: Any = make) -> Any:
            pointer = make(*arguments)
            if pointer:
                opened.append(made)
            return pointer

        def forget(pointer: Any, made: str = made, free: Any = free) -> None:
            opened.remove(made)
            free(pointer)

        monkeypatch.setattr(lib, made, count)
        monkeypatch.setattr(lib, freed, forget)
    return opened


def test_what_a_progress_callback_raises_ends_loading(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, heard = open_models(monkeypatch), list[float]()

    def report(fraction: float) -> None:
        heard.append(fraction)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LlamaBackend(model, settings(256), progress=report)
    assert len(heard) == 1 and not opened


@pytest.mark.parametrize("line", ["llama_context: constructing", "load_tensors: loading"])
def test_ctrl_c_while_llama_cpp_logs_is_not_lost(
    model: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    opened, heard = open_models(monkeypatch), list[int]()

    def write(_level: int, text: bytes | None) -> None:
        if (text or b"").decode().startswith(line):
            heard.append(1)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LOG, "write", write)
    with pytest.raises(KeyboardInterrupt):
        LlamaBackend(model, settings(256))
    with pytest.raises(KeyboardInterrupt):
        EvalContext(model, context_size=64, batch_size=64, threads=1)
    assert len(heard) == 2 and not opened


def test_a_full_context_is_refused_before_the_step(model: Path, reference: LlamaBackend) -> None:
    text = random_tokens(9, 64)
    backend = LlamaBackend(model, settings(64, max_nodes=8))
    feed(backend, text[:58])
    with pytest.raises(ContextFullError, match=r"^7 more tokens .* has 64 and 58 are used$"):
        backend.verify(DraftTree.chain(text[:7]))
    with pytest.raises(ContextFullError, match=r"^8 more") as caught:
        backend.prefill(text[:8])
    assert "--ctx" in caught.value.hint
    assert (backend.length, backend.pending) == (58, 0)
    rows = backend.verify(DraftTree.chain(text[58:])).copy()
    backend.commit(range(6))
    assert np.array_equal(rows, np.stack(plain_rows(reference, text, 58)))
    assert backend.length == 64 == backend.context_size
    with pytest.raises(ContextFullError):
        backend.verify(DraftTree.chain((1,)))
    assert backend.truncate(30) == 30
    assert np.array_equal(step(backend, 5), plain_rows(reference, [*text[:30], 5], 30)[0])
    backend.close()


def test_pending_tokens_count_as_used(model: Path, reference: LlamaBackend) -> None:
    backend = LlamaBackend(model, settings(64, max_nodes=8, max_leaves=2))
    text = random_tokens(9, 58)
    feed(backend, text)
    backend.verify(DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 2, 3, 4)))
    backend.commit([0, 2, 3, 4, 5])
    assert (backend.length, backend.pending) == (63, 4)
    with pytest.raises(ContextFullError, match=r"^2 more tokens .* 63 are used$"):
        backend.verify(DraftTree.chain((7, 8)))
    expected = plain_rows(reference, [*text, 1, 3, 4, 5, 6, 7], 63)
    assert np.array_equal(step(backend, 7), expected[0])
    backend.close()


def test_too_many_nodes_or_leaves(backend: RecordingBackend, reference: LlamaBackend) -> None:
    feed(backend, PROMPT)
    with pytest.raises(UnsupportedError, match="32 nodes, not 33"):
        backend.verify(DraftTree.chain(range(33)))
    with pytest.raises(UnsupportedError, match=r"9 leaves .* at most 8"):
        backend.verify(DraftTree(range(10), (-1, *[0] * 9)))
    assert backend.length == len(PROMPT)
    assert np.array_equal(step(backend, 5), plain_rows(reference, [*PROMPT, 5], len(PROMPT))[0])
    rows = backend.verify(DraftTree.chain(random_tokens(1, 32)))
    assert rows.shape == (32, backend.tokenizer.vocab_size), "as many as promised do fit"


@pytest.mark.parametrize("changes", [{"kv_type_k": "q9_9"}, {"kv_type_v": "iq4_nl"}])
def test_an_unknown_cache_type_names_the_known_ones(model: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"no KV cache type 'i?q") as caught:
        LlamaBackend(model, settings(256, **changes))
    assert "q8_0" in caught.value.hint


# ------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("context_size", "type_k", "type_v"),
    [
        (256, "f16", "f16"),
        (300, "f16", "f16"),  # rounded up to 512 cells
        (512, "q8_0", "q8_0"),
        (512, "q4_0", "q4_0"),
        (512, "f16", "bf16"),
        (256, "f32", "f32"),
    ],
)
def test_cache_bytes_are_those_of_the_footprint(
    model: Path, spec: ModelSpec, context_size: int, type_k: str, type_v: str
) -> None:
    backend = LlamaBackend(model, settings(context_size, kv_type_k=type_k, kv_type_v=type_v))
    measured = backend.memory_bytes()["kv_cache"]
    backend.close()
    expected = kv_cache_bytes(spec, RunShape(context_size, 32, 32, type_k, type_v))
    assert measured == pytest.approx(expected, abs=LOG_ROUNDING)


def test_memory_is_named(backend: RecordingBackend, model: Path, spec: ModelSpec) -> None:
    """Q4_1 is not rewritten by any processor."""
    found = backend.memory_bytes()
    assert set(found) == {"weights", "kv_cache", "compute", "logits"}
    assert found["weights"] == pytest.approx(spec.weight_bytes, rel=0.02)
    assert found["kv_cache"] == pytest.approx(512 * spec.kv_values_per_token * 2, abs=LOG_ROUNDING)
    assert 1 * MEBIBYTE < found["compute"] < 16 * MEBIBYTE
    found.clear()
    assert backend.memory_bytes() != {}, "the caller's copy is its own"


def test_logits_take_as_many_rows_as_were_ever_needed(model: Path) -> None:
    """llama.cpp's buffer for them grows with demand: 49,152 numbers of 4 bytes a row."""
    backend = LlamaBackend(model, settings(256))
    row = 4 * 49_152
    assert backend.memory_bytes()["logits"] == row
    feed(backend, PROMPT)
    assert backend.memory_bytes()["logits"] == row, "only the last token's of a prompt"
    for count, most in ((5, 5), (2, 5), (32, 32)):
        backend.verify(DraftTree.chain(range(100, 100 + count)))
        backend.truncate(backend.length)
        assert backend.memory_bytes()["logits"] == most * row
    backend.close()


@pytest.mark.parametrize("batch_size", [32, 64, 200])
def test_the_compute_buffer_is_that_of_the_footprint(
    model: Path, spec: ModelSpec, batch_size: int
) -> None:
    """It is made for batches of `batch_size`, whatever the steps are."""
    backend = LlamaBackend(model, settings(1024, batch_size=batch_size, max_nodes=16))
    measured = backend.memory_bytes()["compute"]
    backend.close()
    expected = compute_bytes(spec, RunShape(1024, batch_size, 16))
    assert measured == pytest.approx(expected, rel=0.02)


def test_copied_weights_compute_what_mapped_ones_do(model: Path, spec: ModelSpec) -> None:
    rows = []
    for mapped in (True, False):
        backend = LlamaBackend(model, settings(256, mapped=mapped))
        rows.append(feed(backend, PROMPT))
        assert backend.memory_bytes()["weights"] == pytest.approx(spec.weight_bytes, rel=0.02)
        backend.close()
    assert np.array_equal(rows[0], rows[1])


COPIES = """
import sys, psutil
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
mapped = sys.argv[2] == "mapped"
backend = LlamaBackend(sys.argv[1], LlamaSettings(256, 32, 1, 1, mapped=mapped))
backend.prefill(range(100, 120))
print(any(".gguf" in one.path for one in psutil.Process().memory_maps()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mode", ["mapped", "copied"])
def test_copied_weights_leave_no_pages_of_the_file(model: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COPIES, str(model), mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"{mode == 'mapped'}\n"


def assert_ceiling(found: dict[str, int], plan: Plan) -> None:
    """What llama.cpp says it allocated, against what the plan said before."""
    planned = plan.component_bytes
    for name, size in found.items():
        assert size <= planned.get(name, 0) + LOG_ROUNDING, name


def test_a_plan_is_a_ceiling(spec: ModelSpec) -> None:
    plan = make_run_plan(spec, Request(context_size=1024, draft_max=31, threads=THREADS))
    with load_plan(spec, plan) as engine:
        engine.generate(PROMPT, max_tokens=8)
        engine.backend.verify(DraftTree.chain(PROMPT[:32]))
        found = engine.backend.memory_bytes()
    assert_ceiling(found, plan)
    assert found["logits"] == plan.component_bytes["logits"]
    assert found["compute"] == pytest.approx(plan.component_bytes["compute"], rel=0.02)


def test_closing_twice_frees_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, freed = library(), []
    backend = LlamaBackend(model, settings(256))
    for name in ("llama_free", "llama_model_free"):
        original = getattr(lib, name)

        def count(pointer: Any, name: str = name, original: Any = original) -> None:
            freed.append(name)
            original(pointer)

        monkeypatch.setattr(lib, name, count)
    backend.close()
    backend.close()
    assert freed == ["llama_free", "llama_model_free"]


def test_a_failed_context_frees_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, freed = library(), []
    original = lib.llama_model_free

    def free(pointer: Any) -> None:
        freed.append(pointer)
        original(pointer)

    monkeypatch.setattr(lib, "llama_model_free", free)
    monkeypatch.setattr(lib, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(BackendError, match="cannot make a context of 256 tokens") as caught:
        LlamaBackend(model, settings(256))
    assert "--ctx" in caught.value.hint
    assert len(freed) == 1


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
    assert caches[0] == pytest.approx(2 * caches[1], rel=0.01)
    other.close()
    for i in range(5, 10):
        assert np.array_equal(step(backend, one[20 + i]), expected_one[i])


# ---------------------------------------------------------------------------------- tokenizer

TEXTS = {
    "code": "def f(x):\n\treturn [i**2 for i in range(10) if i % 2]  # ok\r\n\n\n    pass\n",
    "emoji": "👍🏽 👩\u200d👩\u200d👧 🇩🇪 ☕️",
    "CJK": "日本語と한국어、中文。「引用」",
    "digits": "0 12 345 6789 1234567890 3.14159e-10 1,000,000 ²³½",
    "spaces": "  two leading,   three inside, trailing  ",
    "accents": "naïve Ångström e\u0301 ﬁ Straße ПРИВЕТ שלום",
    "control characters": "a\x00b\x01c\x7f\x1b[0m",
    "long": "antidisestablishmentarianism" * 40,
    "no text": "",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_bytes_of_the_tokens_are_the_text(backend: RecordingBackend, text: str) -> None:
    tokenizer = backend.tokenizer
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert bool(ids) == bool(text)


def test_control_tokens_are_recognised_and_have_no_bytes(backend: RecordingBackend) -> None:
    tokenizer = backend.tokenizer
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special=False)
    assert [tokenizer.token_text(ids[0]), tokenizer.token_text(ids[-1])] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert tokenizer.token_bytes(ids[0]) == tokenizer.token_bytes(ids[-1]) == b""
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"user\nHi"


def test_ends(backend: RecordingBackend) -> None:
    tokenizer = backend.tokenizer
    (end,) = tokenizer.encode("<|im_end|>", add_special=False)
    (start,) = tokenizer.encode("<|im_start|>", add_special=False)
    (word,) = tokenizer.encode("the", add_special=False)
    assert [tokenizer.is_end(token) for token in (end, start, word, end)] == [
        True,
        False,
        False,
        True,
    ]
    assert tokenizer.eos_text == "<|im_end|>"
    assert tokenizer.token_text(-1) == ""


def test_vocabulary_is_the_file_s(backend: RecordingBackend, spec: ModelSpec) -> None:
    assert backend.tokenizer.vocab_size == spec.vocab_size == 49152
    pieces = {backend.tokenizer.token_bytes(token) for token in range(300, 3000)}
    assert len(pieces) == 2700, "no two tokens of the ordinary ones stand for the same bytes"


def test_text_that_is_no_unicode_is_encoded(backend: RecordingBackend) -> None:
    """A lone surrogate, as a file name or a broken JSON escape brings it."""
    ids = backend.tokenizer.encode("a\ud800b", add_special=False)
    joined = b"".join(map(backend.tokenizer.token_bytes, ids))
    assert joined.startswith(b"a") and joined.endswith(b"b")


# ------------------------------------------------------------------------------ damaged files

OPEN_ALL = """
import json, sys
import edgespec
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
def outcome(open_file):
    try:
        open_file().close()
    except edgespec.EdgespecError as error:
        return [type(error).__name__, str(error), error.hint]
    return ["loaded", "", ""]
print(json.dumps([[
    outcome(lambda: edgespec.load(path, context_size=256, drafter="none")),
    outcome(lambda: LlamaBackend(path, LlamaSettings(256))),
] for path in sys.argv[1:]]))
"""


def test_damaged_files_are_errors_with_a_sentence(model: Path, tmp_path: Path) -> None:
    """In a process of its own, since a crash of the library would take the tests along."""
    with model.open("rb") as file:
        head = file.read(4 * MEBIBYTE)
    noise = random.Random(0).randbytes(MEBIBYTE)
    contents = {
        "empty": b"",
        "four bytes": b"GGUF",
        "cut in the metadata": head[:5000],
        "cut in the vocabulary": head[:300_000],
        "cut in the weights": head,
        "noise": noise,
        "noise after the magic": b"GGUF\x03\x00\x00\x00" + noise,
        "noise in the metadata": head[:200] + noise + head[200 + MEBIBYTE :],
        "text": b"<!doctype html><title>404</title>" * 100,
    }
    paths = []
    for name, data in contents.items():
        paths.append(tmp_path / f"{name}.gguf")
        paths[-1].write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name, (loaded, direct) in zip(contents, json.loads(done.stdout), strict=True):
        assert loaded[0] == "ModelFileError", (name, loaded)
        assert direct[0] == "BackendError", (name, direct)
        for _, message, hint in (loaded, direct):
            assert len(message) > 20 and "\n" not in message, name
            assert hint, name


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nothing\.gguf"):
        edgespec.load(tmp_path / "nothing.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no such file: .*nothing\.gguf"):
        LlamaBackend(tmp_path / "nothing.gguf", settings(256))


def test_weights_that_are_no_numbers_are_noticed(model: Path, tmp_path: Path) -> None:
    """The metadata is whole, so the file loads; what it computes is not finite."""
    broken = tmp_path / "broken.gguf"
    data = bytearray(model.read_bytes())
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    broken.write_bytes(data)
    with (
        edgespec.load(broken, context_size=256, drafter="none", threads=THREADS) as engine,
        pytest.raises(BackendError),
    ):
        engine.generate("Hello", max_tokens=4)


# ------------------------------------------------------------------------------- lossless runs

PROMPTS = [
    "Count from 1 to 20, then again.",
    "Repeat after me: the cat sat on the mat. The cat sat on the mat.",
    "Write a Python class with four getters.",
    'List three people as JSON: [{"name": "Ann", "age": 1},',
    "Why is the sky blue?",
]


class FlatCurve(CostCurve):
    """Made up: every step costs the same, so that all drafts are sent, whatever they promise."""

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        pass


def flat(max_nodes: int = 6) -> FlatCurve:
    """Small, so that the leaves of a step stay below the number of sequences.

    And slower than any step is here: no answer's drafts ever seem to have lost time.
    """
    return FlatCurve([0.0, *[1000.0] * max_nodes])


def engine_on(backend: LlamaBackend, spec: ModelSpec, drafter: Drafter | None = None) -> Engine:
    return Engine(backend, curve=flat(), drafter=drafter, chat_template=spec.chat_template)


@pytest.fixture(scope="module")
def plain(loaded_reference: LlamaBackend, spec: ModelSpec) -> list[Result]:
    """Plain greedy answers to PROMPTS, from a backend that sees no drafts."""
    engine = engine_on(loaded_reference, spec)
    return [engine.generate(prompt, max_tokens=32) for prompt in PROMPTS]


def assert_lossless(plain: Sequence[Result], results: Sequence[Result]) -> None:
    """Speculative output equals plain output, and drafts were really used."""
    for expected, result in zip(plain, results, strict=True):
        assert expected.counters.drafted_tokens == 0
        assert result.token_ids == expected.token_ids
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
    drafted = sum(result.counters.drafted_tokens for result in results)
    accepted = sum(result.counters.accepted_tokens for result in results)
    assert 0 < accepted < drafted, "some drafts are right and some are wrong"


def test_chains_are_lossless(
    backend: RecordingBackend, spec: ModelSpec, plain: list[Result]
) -> None:
    engine = engine_on(backend, spec, SuffixDrafter())
    results = [engine.generate(prompt, max_tokens=32) for prompt in PROMPTS]
    assert_lossless(plain, results)
    assert {leaves for _, leaves, _ in backend.seen} == {1}
    assert len({result.token_ids for result in results}) == len(PROMPTS)


def test_trees_are_lossless(
    backend: RecordingBackend, spec: ModelSpec, plain: list[Result]
) -> None:
    engine = engine_on(backend, spec, SuffixDrafter(max_children=2))
    assert_lossless(plain, [engine.generate(prompt, max_tokens=32) for prompt in PROMPTS])
    assert any(leaves > 1 for _, leaves, _ in backend.seen)
    assert any(pending > 0 for _, _, pending in backend.seen)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=7),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.95, min_p=0.05, seed=8),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.2),
    ],
    ids=["temperature", "filters", "penalties"],
)
def test_the_same_seed_gives_the_same_tokens(
    backend: RecordingBackend, reference: LlamaBackend, spec: ModelSpec, params: SamplingParams
) -> None:
    engine = engine_on(backend, spec, SuffixDrafter(max_children=2))
    slow = engine_on(reference, spec)
    arguments: dict[str, Any] = {"max_tokens": 24, "sampling": params}
    results = [engine.generate(prompt, **arguments) for prompt in PROMPTS[:2]]
    assert_lossless([slow.generate(prompt, **arguments) for prompt in PROMPTS[:2]], results)


def test_another_seed_gives_other_tokens(reference: LlamaBackend, spec: ModelSpec) -> None:
    engine = engine_on(reference, spec)
    outputs = {
        engine.generate(
            PROMPTS[4], max_tokens=12, sampling=SamplingParams(temperature=1.0, seed=seed)
        ).token_ids
        for seed in (1, 2, 1)
    }
    assert len(outputs) == 2


def test_a_quantized_cache_is_lossless(model: Path, spec: ModelSpec) -> None:
    """At q8_0 no step takes the split path, so this holds with two threads at any depth."""
    backend = LlamaBackend(model, settings(threads=2, kv_type_k="q8_0", kv_type_v="q8_0"))
    engine = engine_on(backend, spec, SuffixDrafter())
    prompts = [PROMPTS[1], "the cat sat on the mat and the dog on the log; " * 22]
    assert len(engine.encode(prompts[1])) > 256
    assert_lossless(
        [engine.generate(prompt, max_tokens=40, speculate=False) for prompt in prompts],
        [engine.generate(prompt, max_tokens=40) for prompt in prompts],
    )
    backend.close()


def test_exact_settings_are_lossless_beyond_512_cells(model: Path, spec: ModelSpec) -> None:
    """530 tokens of prompt, two threads.

    Without `exact` the outputs part within 60 tokens where this was written.
    """
    days = ("Monday", "a rainy Tuesday", "the last Wednesday", "Thursday", "market day")
    ways = ("north", "far south", "east", "west")
    lines = (
        f"On {days[i % 5]} the harbour master counted {i * 7 % 12 + 2} ships from the "
        f"{ways[i % 4]}.\n"
        for i in range(32)
    )
    prompt = "".join(lines) + "Write a poem about this."
    plan = make_run_plan(spec, Request(context_size=1024, exact=True))
    used = {name: getattr(plan, name) for name in ("kv_type_k", "kv_type_v", "kernels")}
    used |= {"tied": spec.tied_embeddings, "threads": 2, "batch_size": 128}
    backend = LlamaBackend(model, settings(1024, **used))
    engine = engine_on(backend, spec, SuffixDrafter())
    assert 512 < len(engine.encode(prompt)) < 600
    plain = engine.generate(prompt, max_tokens=60, speculate=False)
    assert_lossless([plain], [engine.generate(prompt, max_tokens=60)])
    backend.close()


def test_exact_is_measured_before_it_is_promised(cache_folder: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    load = partial(edgespec.load, path, backend="llamacpp")
    options: dict[str, Any] = {"context_size": 512, "draft_max": 3, "threads": THREADS}
    load(**options).close()
    assert not list(cache_folder.glob("invariance/*.json"))
    load(**{**options, "draft_max": 0}, exact=True).close()
    (measured,) = cache_folder.glob("invariance/*.json")
    assert "steps" not in json.loads(measured.read_text()), "single tokens say nothing about others"
    load(**options, exact=True).close()
    document = json.loads(measured.read_text())
    assert document["steps"] == [{"largest_step": 4, "tried": 4, "depth": 512}]
    assert document["prefills"][-1][0][1:] == [4, 512]
    for change in ({"draft_max": 5}, {"context_size": 1024}):  # larger steps, a deeper cache
        load(**{**options, **change}, exact=True).close()
        again = json.loads(measured.read_text())
        assert again["steps"] != document["steps"]
        document = again
    limit = {"largest_step": 1, "tried": 6, "depth": 1024}
    measured.write_text(json.dumps({**document, "steps": [limit]}))
    with pytest.raises(UnsupportedError, match=r"--exact is not possible") as caught:
        load(**options, exact=True)
    assert "--exact" in caught.value.hint


# ---------------------------------------------------------------------- other architectures


END = 257  # id of the end token; 256 is the only merge


def write_random(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A model with a byte vocabulary of 258 tokens. Tensor shapes are (rows, columns)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_tokens(), "Ġt", "<|end|>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def output_rows(rows: Any) -> Any:
    """Logits with a standard deviation of 8, and an end that never comes."""
    rows[END] = 0.0
    return 8.0 * rows


def write_gemma3(path: Path, window: int, num_layers: int = 4) -> Path:
    """Random weights; layers alternate between sliding and global."""
    source = np.random.default_rng(5)

    def normal(*shape: int) -> Any:
        return source.normal(0.0, shape[-1] ** -0.5, shape)

    keys = {
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": num_layers,
        "feed_forward_length": 128,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    ones = np.ones(64)
    tensors: dict[str, Any] = {
        "token_embd.weight": normal(258, 64),
        "output.weight": output_rows(normal(258, 64)),
        "output_norm.weight": ones,
    }
    for layer in range(num_layers):
        parts = {
            "attn_norm": ones,
            "attn_q": normal(64, 64),
            "attn_k": normal(32, 64),
            "attn_v": normal(32, 64),
            "attn_q_norm": np.ones(32),
            "attn_k_norm": np.ones(32),
            "attn_output": normal(64, 64),
            "post_attention_norm": 2 * ones,
            "ffn_norm": ones,
            "ffn_gate": normal(128, 64),
            "ffn_up": normal(128, 64),
            "ffn_down": normal(64, 128),
            "post_ffw_norm": ones,
        }
        tensors |= {f"blk.{layer}.{name}.weight": values for name, values in parts.items()}
    return write_random(path, "gemma3", keys, tensors)


def write_mamba(path: Path, num_layers: int = 2) -> Path:
    source = np.random.default_rng(6)

    def normal(*shape: int) -> Any:
        return source.normal(0.0, shape[-1] ** -0.5, shape)

    inner, state, rank, kernel = 128, 8, 4, 4
    keys = {
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": num_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    tensors: dict[str, Any] = {
        "token_embd.weight": normal(258, 64),
        "output.weight": output_rows(normal(258, 64)),
        "output_norm.weight": np.ones(64),
    }
    for layer in range(num_layers):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": np.ones(64),
            f"{block}.ssm_in.weight": normal(2 * inner, 64),
            f"{block}.ssm_conv1d.weight": normal(inner, kernel),
            f"{block}.ssm_conv1d.bias": np.zeros(inner),
            f"{block}.ssm_x.weight": normal(rank + 2 * state, inner),
            f"{block}.ssm_dt.weight": normal(inner, rank),
            f"{block}.ssm_dt.bias": np.zeros(inner),
            f"{block}.ssm_a": -np.tile(np.arange(1.0, state + 1), (inner, 1)) / 4,
            f"{block}.ssm_d": np.ones(inner),
            f"{block}.ssm_out.weight": normal(64, inner),
        }
    return write_random(path, "mamba", keys, tensors)


WORDS = "to be or not to be that is the question to be or not to be that is the answer "
BYTES = list(WORDS.encode())


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3") / "model.gguf", window=64)


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mamba(tmp_path_factory.mktemp("mamba") / "model.gguf")


def test_a_sliding_window_allows_chains_only(gemma3: Path) -> None:
    backend = LlamaBackend(gemma3, settings())
    capabilities = backend.capabilities
    assert (capabilities.rollback, capabilities.tree, capabilities.truncate) == (True, False, False)
    assert "sliding" in capabilities.reason
    feed(backend, BYTES)
    with pytest.raises(UnsupportedError, match="sliding"):
        backend.verify(DraftTree((1, 2, 3), (-1, 0, 0)))
    assert backend.verify(DraftTree.chain((1, 2, 3))).shape == (3, 258)
    backend.close()


def test_a_sliding_window_is_emptied_rather_than_cut(gemma3: Path) -> None:
    backend = LlamaBackend(gemma3, settings())
    first = feed(backend, BYTES)
    assert backend.truncate(len(BYTES)) == len(BYTES)
    assert backend.truncate(len(BYTES) - 1) == 0 == backend.length
    assert np.array_equal(feed(backend, BYTES), first)
    backend.close()


def test_roll_backs_in_a_sliding_window_lose_no_cells(gemma3: Path) -> None:
    """300 tokens, every step with 15 wrong drafts, against a cache that never rolled back.

    Rounding to F16 in the cache moves the logits (standard deviation 8) by less than 0.1; one
    wrong token among those the window shows moves them by more than 1.
    """
    source = random.Random(1)
    text = source.choices(range(256), k=300)
    one, other = LlamaBackend(gemma3, settings()), LlamaBackend(gemma3, settings())
    feed(one, text[:100])
    feed(other, text[:100])
    worst, at = 0.0, 100
    while at < len(text):
        right = text[at : at + source.randint(1, 3)]
        rows = one.verify(DraftTree.chain([*right, *source.choices(range(256), k=15)])).copy()
        one.commit(range(len(right)))
        for row, token in zip(rows, right, strict=False):
            worst = max(worst, float(np.abs(row - step(other, token)).max()))
        at += len(right)
    assert one.length == other.length == 300
    right_row, wrong = step(other, 7), list(text)
    wrong[-30] ^= 1
    one.truncate(0)
    feed(one, wrong)
    mistake = float(np.abs(step(one, 7) - right_row).max())
    one.close()
    other.close()
    assert worst < 0.3 < 0.6 < mistake


def test_a_sliding_window_is_lossless(gemma3: Path) -> None:
    """Prompt and output are longer than the window of 64 tokens.

    F32 weights are not batch-invariant: outputs may part where the target itself is undecided.
    """
    backend = recording(gemma3, settings())
    noise = measure_batch_noise(backend, depths=(40, 200))
    assert noise < 1.0
    engine = Engine(backend, curve=flat(), drafter=SuffixDrafter())
    accepted = compared = 0
    for prompt in (BYTES * 2, list(b"abcdefg " * 20), BYTES[20:60] * 3):
        assert len(prompt) > 64
        plain = engine.generate(prompt, max_tokens=160, speculate=False).token_ids
        result = engine.generate(prompt, max_tokens=160)
        assert len(plain) == len(result.token_ids) == 160
        found = find_divergence(backend, prompt, plain, result.token_ids)
        assert found is None or found.gap <= noise, f"{found}, noise {noise}"
        compared += 160 if found is None else found.position
        accepted += result.counters.accepted_tokens
    assert accepted > 50 and compared > 240
    assert {leaves for _, leaves, _ in backend.seen} == {1}
    backend.close()


@pytest.mark.parametrize("window", [64, 512])
def test_a_plan_is_a_ceiling_for_sliding_caches(tmp_path: Path, window: int) -> None:
    spec = read_model_spec(write_gemma3(tmp_path / "model.gguf", window, num_layers=6))
    plan = make_run_plan(spec, Request(context_size=2048, draft_max=31))
    with load_plan(spec, plan) as engine:
        found = engine.backend.memory_bytes()
    assert_ceiling(found, plan)
    assert found["kv_cache"] == pytest.approx(
        plan.component_bytes["kv_cache"], abs=2 * LOG_ROUNDING
    ), "two caches, two lines of the log"
    assert found["kv_cache"] < 2048 * spec.kv_values_per_token * 2, "layers that slide keep less"


def test_a_recurrent_model_says_what_it_cannot(mamba: Path) -> None:
    backend = LlamaBackend(mamba, settings())
    capabilities = backend.capabilities
    assert (capabilities.rollback, capabilities.tree, capabilities.truncate) == (False,) * 3
    assert "recurrent" in capabilities.reason
    assert backend.max_nodes == 1
    feed(backend, BYTES)
    with pytest.raises(UnsupportedError, match="1 nodes, not 2"):
        backend.verify(DraftTree.chain((1, 2)))
    assert backend.truncate(10) == 0 == backend.length
    backend.close()


def test_a_recurrent_model_decodes_plainly(mamba: Path) -> None:
    """Also right after a longer text, whose state must not be seen."""
    with edgespec.load(mamba, context_size=512, threads=THREADS) as engine:
        assert engine.drafter is None
        first = engine.generate(BYTES, max_tokens=40)
        engine.generate(list(b"something else entirely" * 5), max_tokens=20)
        again = engine.generate(BYTES, max_tokens=40)
        text = list(BYTES)
        for _ in range(40):  # the slow way: everything again for every token
            engine.backend.truncate(0)
            rows = [
                engine.backend.prefill(text[i : i + engine.backend.batch_size])
                for i in range(0, len(text), engine.backend.batch_size)
            ]
            text.append(int(rows[-1].argmax()))
        assert first.token_ids == again.token_ids == tuple(text[len(BYTES) :])
    counters = first.counters
    assert (counters.drafted_tokens, counters.rounds, counters.generated_tokens) == (0, 39, 40)
    assert first.finish_reason == "length"
    assert len(set(first.token_ids)) > 1


def test_a_recurrent_model_refuses_a_drafter(mamba: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot take back") as caught:
        edgespec.load(mamba, context_size=512, drafter="suffix")
    assert "--drafter" in caught.value.hint


def test_a_recurrent_state_is_planned(mamba: Path) -> None:
    spec = read_model_spec(mamba)
    plan = make_run_plan(spec, Request(context_size=512))
    with load_plan(spec, plan) as engine:
        found = engine.backend.memory_bytes()
    planned = plan.component_bytes["recurrent_state"]
    assert found["recurrent_state"] == pytest.approx(planned, abs=LOG_ROUNDING)
    assert "kv_cache" not in found
    assert os.fspath(spec.path) == os.fspath(mamba)
