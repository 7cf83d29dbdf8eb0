"""A deterministic backend for tests: logits from a function of the context.

It keeps no tensors, so a test sees exactly what the loop asked for. Trees, roll-back and context
limits behave as in the real backends; `steps` records how many nodes each step had, of all users,
and `reads` how many tokens of texts were read in it, or without one.

    >>> from fake_backend import FakeBackend, markov
    >>> backend = FakeBackend(markov([[0.0, 9.0], [9.0, 0.0]]), vocab_size=2)   # 0, 1, 0, 1, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from edgespec.backends.base import Capabilities, DraftTree, Logits, require_room
from edgespec.errors import BackendError, UnsupportedError
from edgespec.testing import ByteTokenizer

NextLogits = Callable[[tuple[int, ...]], Sequence[float]]


def markov(table: Sequence[Sequence[float]]) -> NextLogits:
    """Logits that depend on the last token only; `table` is [V, V]."""
    return lambda context: table[context[-1]]


@dataclass(slots=True)
class _Cache:
    """What the sequences of one backend share."""

    cells: int
    sequences: list[FakeBackend]
    places: list[list[int]]  # by sequence: a number for the cell of each committed token
    numbers: Iterator[int] = field(default_factory=itertools.count)
    steps: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


class FakeBackend:
    """A model that is a Python function.

    Args:
        next_logits: the logits after a context, [V].
        vocab_size: V.
        end: id of the end token, or -1.
        tree, rollback: capabilities to pretend.
        feeds_again: accepted nodes of a branch that is not the first one stay `pending`, as in
            llama.cpp, whose cache keeps cells in the order in which they were fed.
        users: sequences in the cache, each of which is such a backend.
        cells: tokens the cache has room for; None is a whole context for each user.
    """

    contention = 1.0
    shares_cells = True

    def __init__(
        self,
        next_logits: NextLogits,
        vocab_size: int,
        *,
        context_size: int = 4096,
        max_nodes: int = 64,
        batch_size: int = 64,
        end: int = -1,
        tree: bool = True,
        rollback: bool = True,
        feeds_again: bool = False,
        users: int = 1,
        cells: int | None = None,
    ) -> None:
        self.tokenizer = ByteTokenizer(vocab_size, end)
        reason = "" if tree and rollback else "pretended for a test"
        self.capabilities = Capabilities(rollback, tree and rollback, rollback, reason)
        self.context_size = context_size
        self.max_nodes = max_nodes if rollback else 1
        self.batch_size = batch_size
        self.pending = 0
        self.closed = False
        self._next_logits = next_logits
        self._feeds_again = feeds_again
        self._committed: list[int] = []
        self._tree: DraftTree | None = None
        self._cache = _Cache(cells or users * context_size, [self], [[]])
        for _ in range(users - 1):
            another = copy(self)
            another._committed = []
            self._cache.sequences.append(another)
            self._cache.places.append([])

    @property
    def sequences(self) -> Sequence[FakeBackend]:
        return self._cache.sequences

    @property
    def cells(self) -> int:
        return self._cache.cells

    @property
    def steps(self) -> list[int]:
        """How many nodes each step had."""
        return self._cache.steps

    @property
    def reads(self) -> list[int]:
        """How many tokens each step, and each `prefill`, has read."""
        return self._cache.reads

    @property
    def length(self) -> int:
        return len(self._committed)

    @property
    def tokens(self) -> Sequence[int]:
        return self._committed

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens`; logits of the last one."""
        self._require_room(len(tokens))
        if len(tokens) > self.batch_size:
            raise UnsupportedError(f"a prefill has room for {self.batch_size} tokens")
        self._cache.reads.append(len(tokens))
        return self._read(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        """Logits of each node after its own path, [n, V]."""
        return self.verify_together([(self._number, tree)])[0]

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        """Logits of the nodes of each tree, after the text of its sequence, and after pieces."""
        total, read = (sum(len(part) for _, part in parts) for parts in (steps, pieces))
        numbers = {number for number, _ in (*steps, *pieces)}
        assert len(numbers) == len(steps) + len(pieces), "one tree or piece a sequence"
        if total + len(pieces) > self.max_nodes:
            raise UnsupportedError(f"this model cannot verify {total} nodes in one step")
        if read > self.batch_size:
            raise UnsupportedError(f"a prefill has room for {self.batch_size} tokens")
        self._require_cells(total + read)
        self.steps.append(total)
        self.reads.append(read)
        trees = [self.sequences[number]._rows(tree) for number, tree in steps]
        return trees + [self.sequences[number]._read(tokens)[None] for number, tokens in pieces]

    def share(self, source: int, target: int, length: int) -> None:
        """Let a sequence hold the first tokens of another, in the same cells."""
        one, other = self.sequences[target], self.sequences[source]
        one._committed, one.pending = other._committed[:length], 0
        self._cache.places[target] = self._cache.places[source][:length]

    def _rows(self, tree: DraftTree) -> Logits:
        require_room(self, len(tree))
        if len(tree) > self.max_nodes or not (tree.is_chain or self.capabilities.tree):
            raise UnsupportedError(f"this model cannot verify {len(tree)} nodes in one step")
        self._tree = tree
        texts = [tuple(self._committed)]  # and behind it that of each node
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            texts.append((*texts[parent + 1], token))
        return np.asarray([self._next_logits(text) for text in texts[1:]], dtype=np.float32)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of `path`."""
        assert self._tree is not None
        self._append([self._tree.tokens[node] for node in path])
        in_order = sum(node == place for place, node in enumerate(path))
        self.pending = len(path) - in_order if self._feeds_again else 0
        self._tree = None

    def truncate(self, length: int) -> int:
        """Keep the first `length` tokens, or none where nothing can be rolled back."""
        if length < len(self._committed):
            cells = len(self._committed) - self.pending
            kept = length if self.capabilities.truncate else 0
            del self._committed[kept:], self._places[kept:]
            self.pending = max(0, len(self._committed) - cells)
        return len(self._committed)

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True

    def _read(self, tokens: Sequence[int]) -> Logits:
        self._append(tokens)
        self.pending = 0
        return self._row(tuple(self._committed))

    def _append(self, tokens: Sequence[int]) -> None:
        self._committed += tokens
        self._places.extend(next(self._cache.numbers) for _ in tokens)

    @property
    def _places(self) -> list[int]:
        """Of each committed token: the number of its cell."""
        return self._cache.places[self._number]

    @property
    def _number(self) -> int:
        return next(i for i, one in enumerate(self.sequences) if one is self)

    def _require_room(self, count: int) -> None:
        require_room(self, count)
        self._require_cells(count)

    def _require_cells(self, count: int) -> None:
        places = self._cache.places
        if sum(map(len, places)) + count <= self.cells:
            return  # even if no cell is of several
        used = set[int]().union(*places)
        if len(used) + count > self.cells:
            raise BackendError(f"no cells for {count} tokens: {len(used)} of {self.cells} are used")

    def _row(self, context: tuple[int, ...]) -> Logits:
        return np.asarray(self._next_logits(context), dtype=np.float32)
