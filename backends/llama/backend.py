"""llama.cpp behind the Backend protocol.

One unified KV cache holds the conversations of all users, each under a sequence id of its own: the
first ids are theirs. A chain is verified under its user's id: no copies, and the roll-back is one
call. A tree gives each leaf but the first a further id and each node the ids of the leaves below
it, so that sibling branches do not see each other; `branches` lends these ids.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from edgespec.backends.base import DraftTree, Embeddings, ImageRun, Logits, no_room, require_room
from edgespec.backends.llama.batch import Batch, Embed
from edgespec.backends.llama.branches import Branches
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.library import LIBRARY_LOG
from edgespec.backends.llama.states import States, say_lost
from edgespec.backends.llama.team import end_team
from edgespec.errors import BackendError, ModelNotFoundError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.structures import ExpertCounts
from edgespec.models.images import Image, Sound


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all sequences of a context use: it computes one step at a time."""

    context: LlamaContext
    branches: Branches
    prompt: Batch  # a prefill
    chain: Batch  # a step over one chain
    trees: Batch  # a step over trees, or over several sequences
    decode: Callable[[Batch, int], None]
    states: States


class LlamaSequence:
    """One conversation in a context's cache, under the sequence id `number`."""

    def __init__(self, number: int, shared: _Shared) -> None:
        self.number = number
        self._shared = shared
        self._context = context = shared.context
        self.settings = settings = context.settings
        self.context_size, self.batch_size = settings.context_size, settings.batch_size
        self.tokenizer, self.capabilities = context.tokenizer, context.capabilities
        self._length = 0  # cells in the cache
        self.tokens: list[int] = []  # committed ids, the pending ones included
        self.images: list[Sequence[int]] = []  # first cell, cells and positions of each
        self._pending: list[int] = []  # accepted tokens that the next step feeds again
        self._tree: DraftTree | None = None  # verified and not committed yet
        self._stops: Sequence[int] = ()  # where the state is to be kept
        # The step of the context that ended with a prefill of this sequence, and the length then.
        self._prefilled = (-1, 0)

    # -- Backend protocol ------------------------------------------------------------------

    @property
    def length(self) -> int:
        return self._length + len(self._pending)

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def _position(self) -> int:
        """Where the next cell stands: with M-RoPE an image takes fewer positions than cells."""
        return self._position_of(self._length)

    def _position_of(self, length: int) -> int:
        if not self.images:
            return length
        held = [(count, places) for first, count, places in self.images if first < length]
        return length - sum(count - places for count, places in held)

    @property
    def max_nodes(self) -> int:
        return self.settings.max_nodes if self.capabilities.rollback else 1

    @property
    def contention(self) -> float:
        return self._context.contention

    def prefill(self, tokens: Sequence[int]) -> Logits:
        require_room(self, len(tokens))
        piece = self.fill_piece(self._shared.prompt, tokens, 0)
        self._shared.decode(self._shared.prompt, len(piece))
        self.has_read(piece)
        self._prefilled = self._context.num_steps, self._length
        logits: Logits = self._context.rows(1)[0]
        return logits

    def last_logits(self) -> Logits | None:
        """As of `KeepsLogits`: those of a prefill."""
        if self._prefilled != (self._context.num_steps, self.length):
            return None
        logits: Logits = self._context.rows(1)[0]
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """Logits of all nodes in one step, [n, V]: a view the next step overwrites.

        Each step drives Python's objects out of the processor's caches, so this touches few.
        """
        count, shared = len(tree.tokens), self._shared
        if self._pending or (count > 1 and not tree.is_chain):
            return verify_all([(self, tree)])[0]
        if count > 1:
            self._require_step(count)
        if self._length + count > self.context_size:
            raise no_room(self, count)
        self._tree = tree
        shared.chain.put_chain(tree.tokens, self._position)
        if self.settings.users > 1:
            shared.chain.ids[:count] = self.number
        shared.decode(shared.chain, count)
        return shared.context.rows(count)

    def commit(self, path: Sequence[int]) -> None:
        tree, self._tree = self._tree, None
        assert tree is not None and path[0] == 0, "commit follows verify and keeps the root"
        tokens, in_order = tree.tokens, len(path)
        is_chain = len(tokens) == 1 or tree.is_chain
        if not is_chain:
            in_order = next((i for i, node in enumerate(path) if node != i), in_order)
        self.tokens += tokens[:in_order]
        self._length += len(self._pending) + in_order
        if self._pending or not is_chain:
            self._pending = [tokens[node] for node in path[in_order:]]
            self.tokens += self._pending
        if in_order < len(tokens):
            self._context.remove(self.number, self._position)
            if not is_chain:
                self._drop_uncommitted()

    def truncate(self, length: int) -> int:
        """Keep at most the first `length` tokens; return how many could be kept.

        Recurrent models and sliding windows go back no further than to a state that was kept, and
        without one nothing is kept: the caller prefills the rest.
        """
        length, is_ahead = self._whole_images(min(length, self.length)), self._is_ahead
        if length < self.length or is_ahead:
            self._pending = self._pending[: max(0, length - self._length)]
            if length < self._length or is_ahead:
                states = self._shared.states
                kept = states.reach(self.number, length) if is_ahead else self.reach(length)
                say_lost(length, kept)
                self._go_back(kept, self)
            del self.tokens[self.length :]
        self._drop_uncommitted()
        return self.length

    @property
    def _is_ahead(self) -> bool:
        """Whether a state that nobody can cut is behind tokens of a step that was interrupted."""
        if self.capabilities.rollback:
            return False
        context = self._context
        last = int(context.lib.llama_memory_seq_pos_max(context.memory, self.number))
        return last >= self._position

    def stops(self, text: Sequence[int], start: int) -> Sequence[int]:
        if not self.capabilities.truncate:
            self._stops = self._shared.states.stops(self.number, text, start)
        return self._stops

    def reach(self, length: int, *, shared: bool = False) -> int:
        """As of `KeepsStates`: cells that slide are not shared, as nobody could give them up."""
        length = self._whole_images(length)
        is_here = not shared and (length >= self._length or self._has_window(length))
        if self.capabilities.truncate or is_here:
            return min(length, self.length)
        return self._shared.states.reach(self.number, length)

    def _has_window(self, length: int) -> bool:
        """Whether the cells are still there that sliding layers see from so many tokens on."""
        context = self._context
        if not self.capabilities.rollback or not context.sliding_window:
            return False
        first = int(context.lib.llama_memory_seq_pos_min(context.memory, self.number))
        return 0 <= first <= max(0, self._position_of(length) - context.sliding_window)

    def _go_back(self, kept: int, source: LlamaSequence) -> None:
        """Hold the first `kept` tokens of a sequence, of which all cells of attention are here."""
        is_here = source is self and self._has_window(kept)
        if kept and not (self.capabilities.truncate or is_here):
            self._shared.states.put_back(source.number, kept, self.number)
        self.images = [one for one in self.images if one[0] < kept]
        self._length, self._prefilled = kept, (-1, 0)
        self._shared.states.drop(self.number, kept + 1)
        if kept:
            self._context.remove(self.number, self._position)
        else:
            self._empty()

    def _whole_images(self, length: int) -> int:
        """The length without an image that is cut by it."""
        cut = [first for first, count, _ in self.images if first < length < first + count]
        return min(cut, default=length)

    @property
    def splits_cache(self) -> bool:
        """As of `KeepsCache`: cells of a window are gone, and those of an image take others."""
        return (
            self._context.spare is not None and not self.images and not self._context.sliding_window
        )

    def save_cache(self, path: str, start: int = 0, end: int | None = None) -> int:
        """Write the cells to a new file, and states behind them; how many bytes it has.

        Tensors go out one by one. A part is written under a sequence id of its own.
        """
        self._drop_uncommitted()
        tokens, number = self.tokens[start : self._length if end is None else end], self.number
        if is_part := len(tokens) < self._length:
            assert self.splits_cache and self._context.spare is not None
            number = self._context.spare
            self._context.copy(self.number, number, start, start + len(tokens))
        ids = (self._context.lib.llama_token * len(tokens))(*tokens)
        size_bytes = int(
            self._context.lib.llama_state_seq_save_file(
                self._context.handle, os.fsencode(path), number, ids, len(tokens)
            )
        )
        if is_part:
            self._context.remove(number, 0)
        if not size_bytes:
            raise BackendError(
                f"llama.cpp cannot write its cache: {LIBRARY_LOG.problem() or 'no reason'}"
            )
        return self._shared.states.write(self.number, path) if self.settings.states else size_bytes

    def load_cache(
        self,
        path: str,
        tokens: Sequence[int],
        images: Sequence[Sequence[int]] = (),
        start: int = 0,
    ) -> None:
        """Replace the cells and states by those of `save_cache`, or those from `start` on."""
        self.truncate(start)
        self._prefilled = (-1, 0)
        number = self._context.spare if start else self.number
        assert self._length == start and number is not None, "a cache that can be split"
        ids = (self._context.lib.llama_token * len(tokens))()
        count = ctypes.c_size_t()
        read_bytes = self._context.lib.llama_state_seq_load_file(
            self._context.handle,
            os.fsencode(path),
            number,
            ids,
            len(tokens),
            ctypes.byref(count),
        )
        end, is_read = start + len(tokens), bool(read_bytes)
        if start:
            self._context.copy(number, self.number, start, end)
            self._context.remove(number, 0)
        if not is_read or list(ids[: count.value]) != list(tokens):
            self.truncate(0)
            self._empty()
            raise BackendError(
                f"llama.cpp cannot read its cache: {LIBRARY_LOG.problem() or 'no reason'}"
            )
        self._length, self.images = end, list(images)
        self.tokens = [*self.tokens[:start], *tokens]
        if self.settings.states:
            self._shared.states.read(self.number, path, read_bytes, self._length)
        self._has_loaded()

    def _has_loaded(self) -> None:
        """The cache is another one than before, all of it."""

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated, by component; logits as far as they were needed."""
        vision = self._context.vision
        of_images = {} if vision is None else vision.memory_bytes()
        states = self._shared.states.nbytes
        told = {"logits": self._context.logits.nbytes} | ({"states": states} if states else {})
        return {**self._context.buffer_bytes, **told, **of_images}

    def close(self) -> None:
        """Nothing: the backend, which is the first sequence, frees the cache of all."""

    # -- images ----------------------------------------------------------------------------

    @property
    def sees_images(self) -> bool:
        return self._context.vision is not None

    @property
    def modalities(self) -> Mapping[str, bool]:
        vision = self._context.vision
        return {"vision": bool(vision and vision.sees), "audio": bool(vision and vision.hears)}

    def image_pieces(self, image: Image) -> Sequence[Sequence[int] | ImageRun]:
        assert self._context.vision is not None, "it sees images"
        return self._context.vision.pieces(image)

    def encode_image(self, run: ImageRun) -> Future[Embeddings]:
        assert self._context.vision is not None, "it sees images"
        return self._context.vision.encode(run)

    def read_image(self, run: ImageRun) -> Logits:
        *_, row = self.read_image_parts(run, None)
        assert row is not None
        return row

    def read_image_parts(
        self, run: ImageRun, rows: Embeddings | None
    ) -> Generator[Logits | None, None, None]:
        """As many cells at a time as a prefill has tokens, or all where they see each other."""
        vision, count = self._context.vision, len(run.ids)
        assert vision is not None, "it sees images"
        require_room(self, count)
        is_causal = vision.is_causal or isinstance(run.image, Sound)
        if not is_causal and count > self.batch_size:
            raise UnsupportedError(
                f"an image of {count} tokens is read at once, and a step has {self.batch_size}",
                hint="lower --image-max-tokens, or give it more memory: its steps get larger",
            )
        if self._pending:
            self.prefill(())
        del self.tokens[self._length :]
        self._drop_uncommitted()
        if rows is None:
            rows = vision.embeddings(run)
        places = vision.positions(run, self._position)
        self.images.append((start := self._length, count, run.positions))
        try:
            for first in range(0, count, self.batch_size):
                if first:
                    yield None
                self._context.lib.llama_set_causal_attn(self._context.handle, is_causal)
                try:
                    self._read_rows(run.ids, rows, places, slice(first, first + self.batch_size))
                finally:  # others make steps in between
                    self._context.lib.llama_set_causal_attn(self._context.handle, True)
        except BaseException:
            if self._length >= start:  # it was not emptied meanwhile
                self._length = start + count  # else the image would not count as cut
                self.truncate(start)
            raise
        logits: Logits = self._context.rows(1)[0]
        yield logits

    def _read_rows(self, ids: Sequence[int], rows: Any, places: Any, part: slice) -> None:
        """Append cells of an image: embeddings [n, width] at positions [sections, n]."""
        rows, places = np.ascontiguousarray(rows[part]), places[:, part]
        count = len(rows)
        batch = Batch(
            *(self._context.lib, count, 1, None, rows.shape[1], rows),
            has_ids=False,
            sections=len(places),
        )
        batch.positions[:] = places.reshape(-1)
        batch.ids[:] = self.number
        batch.outputs[:-1] = 0
        self._shared.decode(batch, count)
        self.has_read(ids[part])

    # -- steps and cells -------------------------------------------------------------------

    def take(self, other: LlamaSequence, length: int) -> None:
        """Hold the first `length` committed tokens of another sequence.

        In the same cells, or in copies of all of its cells where each has its own.
        """
        self.truncate(0)
        length = other.reach(min(length, other._length), shared=True)
        end = other._position_of(length)
        if not self.settings.exact:
            self._context.copy(other.number, self.number, 0, end)
        else:
            self._context.copy(other.number, self.number, -1, -1)
            self._context.remove(self.number, end)
        self.images, self.tokens = list(other.images), other.tokens[:length]
        self._go_back(length, other)
        self._shared.states.share(other.number, self.number, length)

    def _require_step(self, count: int) -> None:
        if count > self.max_nodes:
            raise UnsupportedError(f"a step has room for {self.max_nodes} nodes, not {count}")

    def _empty(self) -> None:
        self._shared.branches.forget(self.number)
        self._shared.states.drop(self.number, 0)
        if self.settings.users == 1:
            self._context.lib.llama_memory_clear(self._context.memory, False)
        else:
            self._context.remove(self.number, 0)

    def _drop_uncommitted(self) -> None:
        """Remove the cells that a step or an interrupted prefill left behind the committed ones."""
        self._tree = None
        if not self.capabilities.rollback:
            return
        self._context.remove(self.number, self._position)
        self._shared.branches.cut(self.number, self._position)

    def fill(self, tree: DraftTree, start: int, lent: set[int]) -> int:
        """Fill the batch from `start` on with the pending tokens, then the nodes; where it ends.

        Each has its sequence ids: this one's, and those for branches, which are added to `lent`.
        """
        node_ids = self._assign_sequences(tree, lent)
        batch, offset = self._shared.trees, start + len(self._pending)
        end = offset + len(tree.tokens)
        batch.put(start, self._pending)
        batch.put(offset, tree.tokens)
        first = self._position
        batch.positions[start:offset] = np.arange(first, first + offset - start)
        batch.positions[offset:end] = tree.depths()
        batch.positions[offset:end] += first + offset - start
        batch.outputs[start:offset] = 0
        batch.outputs[offset:end] = 1
        for row, ids in enumerate([node_ids[0]] * len(self._pending) + node_ids, start):
            batch.num_ids[row] = len(ids)
            batch.ids[row, : len(ids)] = ids
        self._tree = tree
        return end

    def fill_piece(self, batch: Batch, tokens: Sequence[int], start: int) -> Sequence[int]:
        """Fill a batch from `start` on with the pending tokens and a piece of a text; all of them.

        The last one has a row of logits. They are nobody's until the sequence `has_read` them.
        """
        tokens = [*self._pending, *tokens]
        del self.tokens[self._length :]  # until they are in the cache
        self._pending = []
        self._drop_uncommitted()
        end = start + len(tokens)
        batch.put(start, tokens)
        batch.positions[start:end] = np.arange(self._position, self._position + len(tokens))
        batch.outputs[start:end] = 0
        batch.outputs[end - 1] = 1
        batch.num_ids[start:end] = 1
        batch.ids[start:end, 0] = self.number
        return tokens

    def has_read(self, piece: Sequence[int]) -> None:
        """A step has put a piece into the cache."""
        self._length += len(piece)
        self.tokens += piece
        if self._length in self._stops:
            self._shared.states.keep(self.number, self._length)

    def _assign_sequences(self, tree: DraftTree, lent: set[int]) -> list[list[int]]:
        """Sequence ids by node: those of the leaves below it. The first branch gets `number`."""
        if tree.is_chain:
            return [[self.number]] * len(tree.tokens)
        leaves = tree.leaves()
        if not self.capabilities.tree:
            raise UnsupportedError(f"no branches with this model: {self.capabilities.reason}")
        if len(leaves) + len(lent) > self.settings.max_leaves:
            raise UnsupportedError(
                f"a tree with {len(leaves)} leaves cannot be verified: "
                f"at most {self.settings.max_leaves - len(lent)} fit"
            )
        paths = [tree.path(leaf) for leaf in leaves]
        # Those that follow the node order longest come first.
        paths.sort(
            key=lambda path: next((-i for i, node in enumerate(path) if node != i), -len(path))
        )
        others = self._shared.branches.lend(self.number, self._position, len(leaves) - 1, lent)
        node_ids: list[list[int]] = [[] for _ in tree.tokens]
        for sequence, path in zip([self.number, *others], paths, strict=True):
            for node in path:
                node_ids[node].append(sequence)
        return node_ids


def verify_all(
    steps: Sequence[tuple[LlamaSequence, DraftTree]],
    texts: Sequence[tuple[LlamaSequence, Sequence[int]]] = (),
) -> list[Logits]:
    """Logits of the trees of some sequences of one context, [n, V], and after texts, [1, V].

    All in one step, in which the texts are read.
    """
    first, sizes = (*steps, *texts)[0][0], [len(tree) for _, tree in steps] + [1] * len(texts)
    first._require_step(sum(sizes))
    for sequence, tree in steps:
        require_room(sequence, len(tree))
    for sequence, tokens in texts:
        require_room(sequence, len(tokens))
    end, lent, pieces = 0, set[int](), list[Sequence[int]]()
    for sequence, tree in steps:
        end = sequence.fill(tree, end, lent)
    for sequence, tokens in texts:
        pieces.append(sequence.fill_piece(first._shared.trees, tokens, end))
        end += len(pieces[-1])
    first._shared.decode(first._shared.trees, end)
    for (sequence, _), piece in zip(texts, pieces, strict=True):
        sequence.has_read(piece)
    rows = first._context.rows(sum(sizes))
    ends = list(accumulate(sizes))
    return [rows[stop - size : stop] for stop, size in zip(ends, sizes, strict=True)]


class LlamaBackend(LlamaSequence):
    """A GGUF model in llama.cpp; with an `embed`, it is fed embeddings in place of ids.

    Raises:
        ModelNotFoundError: there is no such file.
        BackendError: llama.cpp cannot load it, with llama.cpp's own words.
        UnsupportedError: a setting the library does not know.

    One that nobody refers to any more is closed, too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: RunConfig,
        *,
        progress: Callable[[float], None] | None = None,
        embed: Embed | None = None,
    ) -> None:
        if not os.path.exists(path):
            raise ModelNotFoundError(f"no such file: {os.fspath(path)}")
        self._context = LlamaContext(settings)
        try:
            self._context.open(os.fspath(path), progress, self._adjust)
            self._begin(embed)
        except BaseException:
            self.close()
            raise

    def _begin(self, embed: Embed | None) -> None:
        context, settings = self._context, self._context.settings
        batch = partial(Batch, context.lib, embed=embed, width=context.width)
        leaves = settings.max_leaves if context.capabilities.tree else 1
        shared = _Shared(
            context,
            Branches(
                range(settings.users, settings.users + leaves - 1), context.copy, context.remove
            ),
            prompt=batch(settings.batch_size + settings.max_nodes, 1),
            chain=batch(settings.max_nodes, 1),
            trees=batch(
                (1 + settings.users) * settings.max_nodes + settings.batch_size,
                settings.max_leaves,
            ),
            decode=self._decoder(),
            states=States(context, settings.states),
        )
        super().__init__(0, shared)
        others = (LlamaSequence(number, shared) for number in range(1, settings.users))
        self._others = tuple(others)
        self.cells, self.shares_cells = settings.cache_cells, not settings.exact

    def _adjust(self, params: Any) -> None:
        """Other parameters of a context, for backends that derive from this one."""

    def _decoder(self) -> Callable[[Batch, int], None]:
        """What computes a batch; another one in backends that derive from this one."""
        return self._context.decode

    # -- all sequences ---------------------------------------------------------------------

    @property
    def sequences(self) -> Sequence[LlamaSequence]:
        return (self, *self._others)

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        sequences = self.sequences
        if len(steps) == 1 and not pieces:
            number, tree = steps[0]
            return [sequences[number].verify(tree)]
        return verify_all(
            [(sequences[number], tree) for number, tree in steps],
            [(sequences[number], tokens) for number, tokens in pieces],
        )

    def share(self, source: int, target: int, length: int) -> None:
        """Let a sequence hold the first tokens of another, in the same cells."""
        self.sequences[target].take(self.sequences[source], length)

    @property
    def scales(self) -> Sequence[float]:
        adapters = self._context.adapters
        return () if adapters is None else adapters.scales

    def adapt(self, scales: Sequence[float]) -> None:
        assert self._context.adapters is not None, "it has adapters"
        self._context.adapters.set(self._context.handle, scales)

    def keeps_packed(self) -> bool:
        """Whether a file keeps packed weights for later loads. Raises OSError where it cannot."""
        packed = self._context.packed
        return packed is not None and packed.is_kept()

    def write_packed(self) -> None:
        """Bring a new file of packed weights to the disk, by a thread that may compute now."""
        if self._context.packed is not None:
            self._context.packed.write()

    @property
    def expert_counts(self) -> ExpertCounts:
        """What was read of experts since the load; zeros where all are in memory."""
        packed = self._context.packed
        return ExpertCounts() if packed is None else packed.counts()

    def count_experts(self) -> None:
        """Uses of experts, of which some are read, are counted from here on."""
        assert self._context.packed is not None
        self._context.packed.count_experts()

    def release_threads(self) -> None:
        end_team()

    def close(self) -> None:
        if "_context" in vars(self):  # loading may have failed before there was one
            self._context.close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():  # when modules may be gone, and the system frees everything
            self.close()
