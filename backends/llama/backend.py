"""llama.cpp behind the Backend protocol.

One unified KV cache holds one conversation in sequence 0. A chain is verified in sequence 0 itself:
no copies, and the roll-back is one call. A tree gives each leaf a sequence id of its own and each
node the ids of the leaves below it, so that sibling branches do not see each other. The other ids
share the committed cells and catch up only when a tree needs them, so a tree costs bookkeeping for
the tokens since the last one and never for the whole context.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from edgespec.backends.base import Logits, require_room
from edgespec.backends.llama.batch import Batch, Embed
from edgespec.backends.llama.context import LlamaContext, LlamaSettings
from edgespec.backends.llama.library import LOG
from edgespec.backends.tree import DraftTree
from edgespec.errors import BackendError, ModelNotFoundError, UnsupportedError


class LlamaBackend:
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
        settings: LlamaSettings,
        *,
        progress: Callable[[float], None] | None = None,
        embed: Embed | None = None,
    ) -> None:
        if not os.path.exists(path):
            raise ModelNotFoundError(f"no such file: {os.fspath(path)}")
        self.settings = settings
        self._context = LlamaContext(settings)
        try:
            self._context.open(os.fspath(path), progress, self._adjust)
            self._begin(embed)
        except BaseException:
            self.close()
            raise

    def _begin(self, embed: Embed | None) -> None:
        settings, context = self.settings, self._context
        self.tokenizer, self.capabilities = context.tokenizer, context.capabilities
        self._length = 0  # cells in the cache
        self._tokens: list[int] = []  # committed ids, the pending ones included
        self._pending: list[int] = []  # accepted tokens that the next step feeds again
        self._tree: DraftTree | None = None  # verified and not committed yet
        self._synced = [0] * settings.max_leaves  # cells shared with sequence 0, by sequence
        batch = partial(Batch, context.lib, embed=embed, width=context.width)
        self._chain = batch(settings.max_nodes, 1)
        self._branches = batch(2 * settings.max_nodes, settings.max_leaves)
        self._prompt = batch(settings.batch_size + settings.max_nodes, 1)

    def _adjust(self, params: Any) -> None:
        """Other parameters of a context, for backends that derive from this one."""

    # -- Backend protocol ------------------------------------------------------------------

    @property
    def context_size(self) -> int:
        return self.settings.context_size

    @property
    def length(self) -> int:
        return self._length + len(self._pending)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def max_nodes(self) -> int:
        return self.settings.max_nodes if self.capabilities.rollback else 1

    @property
    def batch_size(self) -> int:
        return self.settings.batch_size

    @property
    def crowding(self) -> float:
        return self._context.crowding

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append at most `batch_size` tokens; the logits of the last one, [V]."""
        require_room(self, len(tokens))
        tokens = [*self._pending, *tokens]
        del self._tokens[self._length :]  # until they are in the cache
        self._pending = []
        self._drop_uncommitted()
        batch, count = self._prompt, len(tokens)
        batch.put(0, tokens)
        batch.positions[:count] = np.arange(self._length, self._length + count)
        batch.outputs[:count] = 0
        batch.outputs[count - 1] = 1
        self._decode(batch, count)
        self._length += count
        self._tokens += tokens
        logits: Logits = self._context.rows(1)[0]
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """Logits of all nodes in one step, [n, V]: a view the next step overwrites."""
        count = len(tree.tokens)
        if count > self.max_nodes:
            raise UnsupportedError(f"a step has room for {self.max_nodes} nodes, not {count}")
        require_room(self, count)
        self._tree = tree
        if tree.is_chain and not self._pending:
            batch = self._chain
            batch.put(0, tree.tokens)
            batch.positions[:count] = np.arange(self._length, self._length + count)
            self._decode(batch, count)
        else:
            self._decode(self._fill_branches(tree), count + len(self._pending))
        return self._context.rows(count)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of `path`, roll back the rest of the last step."""
        tree, self._tree = self._tree, None
        assert tree is not None and path[0] == 0, "commit follows verify and keeps the root"
        in_order = len(path)
        self._tokens += [tree.tokens[node] for node in path]
        if not tree.is_chain:
            in_order = next((i for i, node in enumerate(path) if node != i), in_order)
        self._length += len(self._pending) + in_order
        self._pending = [tree.tokens[node] for node in path[in_order:]]
        if in_order < len(tree.tokens):
            self._context.lib.llama_memory_seq_rm(self._context.memory, 0, self._length, -1)
            if not tree.is_chain:
                self._drop_uncommitted()

    def truncate(self, length: int) -> int:
        """Keep at most the first `length` tokens; return how many could be kept.

        Recurrent models and sliding windows cannot go back to an earlier token: nothing is
        kept then, and the caller prefills again.
        """
        if length < self.length:
            self._pending = self._pending[: max(0, length - self._length)]
            self._length = min(self._length, length if self.capabilities.truncate else 0)
            del self._tokens[self.length :]
            if self._length == 0:
                self._context.lib.llama_memory_clear(self._context.memory, False)
                self._synced = [0] * self.settings.max_leaves
        self._drop_uncommitted()
        return self.length

    def save_cache(self, path: str) -> int:
        """Write the cells to a new file; how many bytes it has. Tensors go out one by one."""
        self._drop_uncommitted()
        ids = (self._context.lib.llama_token * self._length)(*self._tokens[: self._length])
        size_bytes = int(
            self._context.lib.llama_state_seq_save_file(
                self._context.handle, os.fsencode(path), 0, ids, self._length
            )
        )
        if not size_bytes:
            raise BackendError(f"llama.cpp cannot write its cache: {LOG.problem() or 'no reason'}")
        return size_bytes

    def load_cache(self, path: str, tokens: Sequence[int]) -> None:
        """Replace the cells by those of `save_cache`; what follows them in the file is ignored."""
        self.truncate(0)
        ids = (self._context.lib.llama_token * len(tokens))()
        count = ctypes.c_size_t()
        read_bytes = self._context.lib.llama_state_seq_load_file(
            self._context.handle, os.fsencode(path), 0, ids, len(tokens), ctypes.byref(count)
        )
        if not read_bytes or list(ids[: count.value]) != list(tokens):
            self._context.lib.llama_memory_clear(self._context.memory, False)
            raise BackendError(f"llama.cpp cannot read its cache: {LOG.problem() or 'no reason'}")
        self._length, self._tokens = len(tokens), list(tokens)

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated, by component; logits as far as they were needed."""
        return {**self._context.buffer_bytes, "logits": self._context.logits.nbytes}

    def close(self) -> None:
        if "_context" in vars(self):  # loading may have failed before there was one
            self._context.close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():  # when modules may be gone, and the system frees everything
            self.close()

    # -- one step --------------------------------------------------------------------------

    def _decode(self, batch: Batch, count: int) -> None:
        self._context.decode(batch, count)

    def _drop_uncommitted(self) -> None:
        """Remove the cells that a step or an interrupted prefill left behind the committed ones."""
        self._tree = None
        if not self.capabilities.rollback:
            return
        self._context.lib.llama_memory_seq_rm(self._context.memory, 0, self._length, -1)
        for sequence, synced in enumerate(self._synced):
            if synced:
                self._synced[sequence] = shared = min(synced, self._length)
                self._context.lib.llama_memory_seq_rm(self._context.memory, sequence, shared, -1)

    # -- branches --------------------------------------------------------------------------

    def _fill_branches(self, tree: DraftTree) -> Batch:
        """Fill the batch with the pending tokens, then the nodes, each with its sequence ids."""
        node_ids = self._assign_sequences(tree)
        batch, offset, count = self._branches, len(self._pending), len(tree.tokens)
        total = offset + count
        batch.put(0, self._pending)
        batch.put(offset, tree.tokens)
        batch.positions[:offset] = np.arange(self._length, self._length + offset)
        batch.positions[offset:total] = tree.depths()
        batch.positions[offset:total] += self._length + offset
        batch.outputs[:offset] = 0
        batch.outputs[offset:total] = 1
        for row, ids in enumerate([node_ids[0]] * offset + node_ids):
            batch.num_ids[row] = len(ids)
            batch.ids[row, : len(ids)] = ids
        return batch

    def _assign_sequences(self, tree: DraftTree) -> list[list[int]]:
        """Sequence ids by node: those of the leaves below it. The first branch gets sequence 0."""
        leaves = tree.leaves()
        if len(leaves) > 1 and not self.capabilities.tree:
            raise UnsupportedError(f"no branches with this model: {self.capabilities.reason}")
        if len(leaves) > self.settings.max_leaves:
            raise UnsupportedError(
                f"a tree with {len(leaves)} leaves cannot be verified: "
                f"at most {self.settings.max_leaves} fit"
            )
        paths = sorted((tree.path(leaf) for leaf in leaves), key=_steps_out_of_order)
        node_ids: list[list[int]] = [[] for _ in tree.tokens]
        for sequence, path in enumerate(paths):
            self._share(sequence)
            for node in path:
                node_ids[node].append(sequence)
        return node_ids

    def _share(self, sequence: int) -> None:
        """Let `sequence` see all committed cells of sequence 0."""
        if sequence > 0 and self._synced[sequence] < self._length:
            context, known = self._context, self._synced[sequence]
            context.lib.llama_memory_seq_cp(context.memory, 0, sequence, known, self._length)
            self._synced[sequence] = self._length


def _steps_out_of_order(path: list[int]) -> int:
    """Sort key: paths that follow the node order longest come first."""
    return -next((i for i, node in enumerate(path) if node != i), len(path))
