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
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, Logits, require_room
from edgespec.backends.llama.huge_pages import HugePages
from edgespec.backends.llama.library import LOG, interrupts_kept, library, model_params
from edgespec.backends.llama.team import TEAMS
from edgespec.backends.llama.tokenizer import LlamaTokenizer
from edgespec.backends.tree import DraftTree
from edgespec.errors import BackendError, ModelNotFoundError, UnsupportedError

Embed: TypeAlias = Callable[[Sequence[int]], NDArray[np.float32]]  # n tokens to [n, width]

_KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # values of ggml_type
_FLASH_ATTENTION_ON = 1
_LOAD_COPIED, _LOAD_MAPPED = 0, 1  # values of llama_load_mode


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """How a model is loaded; sizes are in tokens.

    `max_nodes` bounds one verification step (root included), `max_leaves` its branches.
    `batch_size` is the prefill chunk and sizes the compute buffer. `gpu_layers` < 0 means all.
    `mapped` weights are pages of the file; others are read into memory, which saves the file's
    own pages where the CPU backend makes repacked copies.
    """

    context_size: int
    batch_size: int = 256
    max_nodes: int = 32
    max_leaves: int = 8
    threads: int = 1
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    gpu_layers: int = -1
    mapped: bool = True


class _Batch:
    """A llama_batch over numpy arrays, so that filling it is a slice assignment.

    With an `embed`, tokens are fed as its embeddings [n, width] instead of their ids.
    """

    def __init__(
        self, lib: ModuleType, capacity: int, max_sequences: int, embed: Embed | None, width: int
    ) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._embed = embed
        self._embeddings = np.zeros((capacity if embed else 0, width), np.float32)
        self.positions = np.zeros(capacity, np.int32)
        self.num_ids = np.ones(capacity, np.int32)
        self.ids = np.zeros((capacity, max_sequences), np.int32)
        self.outputs = np.ones(capacity, np.int8)
        self._rows = (self.ids.ctypes.data + np.arange(capacity) * self.ids.strides[0]).astype(
            np.uintp
        )
        self.struct = lib.llama_batch(
            0,
            None if embed else self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if embed else None,
            self.positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self.num_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """Let the places from `start` on hold `tokens`."""
        if self._embed is None:
            self._tokens[start : start + len(tokens)] = tokens
        elif tokens:
            self._embeddings[start : start + len(tokens)] = self._embed(tokens)


class LlamaBackend:
    """A GGUF model in llama.cpp; with an `embed`, it is fed embeddings in place of ids.

    Raises:
        ModelNotFoundError: there is no such file.
        BackendError: llama.cpp cannot load it, with llama.cpp's own words.
        UnsupportedError: a setting the library does not know.

    One that nobody refers to any more is closed, too.
    """

    _model: Any = None
    _context: Any = None
    _tokenizer: LlamaTokenizer | None = None

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
        self._lib = library()
        self.settings = settings
        try:
            self._open(os.fspath(path), progress, embed)
        except BaseException:
            self.close()
            raise

    # -- loading ---------------------------------------------------------------------------

    def _open(
        self, path: str, progress: Callable[[float], None] | None, embed: Embed | None
    ) -> None:
        settings = self.settings
        LOG.clear()
        self._load(path, progress)
        self._make_context()
        self._buffer_bytes = LOG.buffer_bytes()
        self._length = 0  # cells in the cache
        self._tokens: list[int] = []  # committed ids, the pending ones included
        self._pending: list[int] = []  # accepted tokens that the next step feeds again
        self._tree: DraftTree | None = None  # verified and not committed yet
        self._synced = [0] * settings.max_leaves  # cells shared with sequence 0, by sequence
        width = int(self._lib.llama_model_n_embd(self._model))

        def batch(capacity: int, max_sequences: int) -> _Batch:
            return _Batch(self._lib, capacity, max_sequences, embed, width)

        self._chain = batch(settings.max_nodes, 1)
        self._branches = batch(2 * settings.max_nodes, settings.max_leaves)
        self._prompt = batch(settings.batch_size + settings.max_nodes, 1)
        self._positions = np.arange(settings.context_size + settings.max_nodes, dtype=np.int32)
        # A second handle on the function: an address is cheaper than a pointer object per step.
        self._get_logits = self._lib._lib["llama_get_logits"]
        self._get_logits.argtypes = [ctypes.c_void_p]
        self._get_logits.restype = ctypes.c_void_p
        self._logits_address = 0
        self._logits: Logits = np.empty((0, 0), np.float32)
        self._threads = settings.threads  # of the last step
        self._most_rows = 1  # of logits so far: llama.cpp's buffer for them grows with demand

    def _load(self, path: str, progress: Callable[[float], None] | None) -> None:
        params = model_params()
        params.n_gpu_layers = self.settings.gpu_layers
        params.load_mode = _LOAD_MAPPED if self.settings.mapped else _LOAD_COPIED
        pages, problems = HugePages(), list[BaseException]()

        def report(fraction: float, _data: Any) -> bool:
            try:
                if fraction == 0.0:  # the weights have their place and are not read yet
                    pages.ask()
                if progress is not None:
                    progress(fraction)
            except BaseException as problem:  # C cannot pass it on
                problems.append(problem)
            return not (interrupted or problems)

        callback = self._lib.llama_progress_callback(report)
        params.progress_callback = callback
        with interrupts_kept() as interrupted:
            self._model = self._lib.llama_model_load_from_file(os.fsencode(path), params)
        if problems:
            raise problems[0]
        if interrupted:  # and whoever was told of it raised nothing
            raise KeyboardInterrupt
        if not self._model:
            raise BackendError(
                f"llama.cpp cannot load {os.path.basename(path)}: {LOG.problem() or 'no reason'}",
                hint="the file may be of a newer architecture than llama-cpp-python 0.3.36 knows",
            )
        self.tokenizer = self._tokenizer = LlamaTokenizer(self._lib, self._model)
        self.capabilities = self._find_capabilities()

    def _find_capabilities(self) -> Capabilities:
        if self._lib.llama_model_is_recurrent(self._model):
            return Capabilities(False, False, False, "a recurrent state cannot be rolled back")
        if self._lib.llama_model_is_hybrid(self._model):
            return Capabilities(False, False, False, "the recurrent layers cannot be rolled back")
        if self._lib.llama_model_n_swa(self._model) > 0:
            return Capabilities(
                True, False, False, "sliding-window layers recycle cells: chains only"
            )
        if self.settings.max_leaves == 1:
            return Capabilities(True, False, True, "it was loaded for chains only")
        return Capabilities(True, True, True)

    def _make_context(self) -> None:
        settings = self.settings
        params = self._lib.llama_context_default_params()
        params.n_ctx = settings.context_size
        params.swa_full = False  # only as many cells as a sliding window can see
        params.n_batch = settings.batch_size + settings.max_nodes  # pending tokens come first
        params.n_ubatch = settings.batch_size
        params.n_seq_max = settings.max_leaves if self.capabilities.tree else 1
        params.n_outputs_max = max(settings.max_nodes, settings.max_leaves)
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.kv_unified = True
        params.type_k = self._kv_type(settings.kv_type_k)
        params.type_v = self._kv_type(settings.kv_type_v)
        params.no_perf = True
        self._adjust(params)
        pages = HugePages()
        with interrupts_kept():
            self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise BackendError(
                f"llama.cpp cannot make a context of {settings.context_size} tokens: "
                f"{LOG.problem() or 'no reason given'}",
                hint="try a smaller --ctx",
            )
        self._memory = self._lib.llama_get_memory(self._context)
        pages.ask(written=True)  # the cache has been cleared

    def _adjust(self, params: Any) -> None:
        """Other parameters of a context, for backends that derive from this one."""

    @staticmethod
    def _kv_type(name: str) -> int:
        if name not in _KV_TYPES:
            raise UnsupportedError(
                f"llama.cpp has no KV cache type {name!r}",
                hint=f"use one of {', '.join(_KV_TYPES)}",
            )
        return _KV_TYPES[name]

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
        return self.settings.threads / self._threads

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append at most `batch_size` tokens; the logits of the last one, [V]."""
        require_room(self, len(tokens))
        tokens = [*self._pending, *tokens]
        del self._tokens[self._length :]  # until they are in the cache
        self._pending = []
        self._drop_uncommitted()
        batch, count = self._prompt, len(tokens)
        batch.put(0, tokens)
        batch.positions[:count] = self._positions[self._length : self._length + count]
        batch.outputs[:count] = 0
        batch.outputs[count - 1] = 1
        self._decode(batch, count)
        self._length += count
        self._tokens += tokens
        logits: Logits = self._rows(1)[0]
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
            batch.positions[:count] = self._positions[self._length : self._length + count]
            self._decode(batch, count)
        else:
            self._decode(self._fill_branches(tree), count + len(self._pending))
        return self._rows(count)

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
            self._lib.llama_memory_seq_rm(self._memory, 0, self._length, -1)
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
                self._lib.llama_memory_clear(self._memory, False)
                self._synced = [0] * self.settings.max_leaves
        self._drop_uncommitted()
        return self.length

    def save_cache(self, path: str) -> int:
        """Write the cells to a new file; how many bytes it has. Tensors go out one by one."""
        self._drop_uncommitted()
        ids = (self._lib.llama_token * self._length)(*self._tokens[: self._length])
        size_bytes = int(
            self._lib.llama_state_seq_save_file(
                self._context, os.fsencode(path), 0, ids, self._length
            )
        )
        if not size_bytes:
            raise BackendError(f"llama.cpp cannot write its cache: {LOG.problem() or 'no reason'}")
        return size_bytes

    def load_cache(self, path: str, tokens: Sequence[int]) -> None:
        """Replace the cells by those of `save_cache`; what follows them in the file is ignored."""
        self.truncate(0)
        ids = (self._lib.llama_token * len(tokens))()
        count = ctypes.c_size_t()
        read_bytes = self._lib.llama_state_seq_load_file(
            self._context, os.fsencode(path), 0, ids, len(tokens), ctypes.byref(count)
        )
        if not read_bytes or list(ids[: count.value]) != list(tokens):
            self._lib.llama_memory_clear(self._memory, False)
            raise BackendError(f"llama.cpp cannot read its cache: {LOG.problem() or 'no reason'}")
        self._length, self._tokens = len(tokens), list(tokens)

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated, by component; logits as far as they were needed."""
        logits_bytes = 4 * self._most_rows * self.tokenizer.vocab_size
        return {**self._buffer_bytes, "logits": logits_bytes}

    def close(self) -> None:
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():  # when modules may be gone, and the system frees everything
            self.close()

    # -- one step --------------------------------------------------------------------------

    def _decode(self, batch: _Batch, count: int) -> None:
        batch.struct.n_tokens = count
        try:
            threads = TEAMS.enter(self.settings.threads)
            if threads != self._threads:
                self._lib.llama_set_n_threads(self._context, threads, threads)
                self._threads = threads
            status = self._lib.llama_decode(self._context, batch.struct)
        finally:
            TEAMS.leave()
        if status != 0:
            raise BackendError(f"llama_decode failed with {status}: {LOG.problem() or 'no reason'}")

    def _rows(self, count: int) -> Logits:
        self._most_rows = max(self._most_rows, count)
        address = self._get_logits(self._context)
        if address != self._logits_address:  # the buffer is allocated once, so nearly never
            shape = (self.settings.max_nodes, self.tokenizer.vocab_size)
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            self._logits = np.ctypeslib.as_array(pointer, shape)
            self._logits_address = address
        return self._logits[:count]

    def _drop_uncommitted(self) -> None:
        """Remove the cells that a step or an interrupted prefill left behind the committed ones."""
        self._tree = None
        if not self.capabilities.rollback:
            return
        self._lib.llama_memory_seq_rm(self._memory, 0, self._length, -1)
        for sequence, synced in enumerate(self._synced):
            if synced:
                self._synced[sequence] = shared = min(synced, self._length)
                self._lib.llama_memory_seq_rm(self._memory, sequence, shared, -1)

    # -- branches --------------------------------------------------------------------------

    def _fill_branches(self, tree: DraftTree) -> _Batch:
        """Fill the batch with the pending tokens, then the nodes, each with its sequence ids."""
        node_ids = self._assign_sequences(tree)
        batch, offset, count = self._branches, len(self._pending), len(tree.tokens)
        total = offset + count
        batch.put(0, self._pending)
        batch.put(offset, tree.tokens)
        batch.positions[:offset] = range(self._length, self._length + offset)
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
            self._lib.llama_memory_seq_cp(
                self._memory, 0, sequence, self._synced[sequence], self._length
            )
            self._synced[sequence] = self._length


def _steps_out_of_order(path: list[int]) -> int:
    """Sort key: paths that follow the node order longest come first."""
    return -next((i for i, node in enumerate(path) if node != i), len(path))
