"""A GGUF model in ONNX Runtime behind the Backend protocol.

The KV cache is two arrays a layer that the graph reads and writes in place, so rolling back is
forgetting a length, and committing a branch that does not lie in order copies its rows to the
front. Trees are an additive attention bias. Embeddings come from the GGUF itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, Logits
from edgespec.backends.llama_library import LOG, library
from edgespec.backends.llama_tokenizer import LlamaTokenizer
from edgespec.errors import (
    BackendError,
    ContextFullError,
    MissingDependencyError,
    UnsupportedError,
)
from edgespec.models.onnx_graph import GRAPH_FILE, GraphFacts
from edgespec.models.onnx_weights import dequantize, raw_rows
from edgespec.models.spec import ModelSpec
from edgespec.tree import DraftTree

_MASKED = -1e9  # far below every score, and still a number after being added to one


@dataclass(frozen=True, slots=True)
class OrtSettings:
    """How a graph is run; sizes are in tokens. `max_nodes` bounds a verification step.

    `pads_single` is the strict mode: a one-token step is evaluated as two rows, where ONNX Runtime
    would take another kernel for a single one and round differently, and steps are chains.
    """

    context_size: int
    batch_size: int = 64
    max_nodes: int = 32
    threads: int = 1
    pads_single: bool = False


class OrtBackend:
    """A converted GGUF model on ONNX Runtime's CPU kernels.

    Args:
        spec: the GGUF the graph was made from; embeddings and vocabulary are read from it.
        folder: where `model.onnx` and its weights lie.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        BackendError: ONNX Runtime cannot load the graph, with its own words.
    """

    def __init__(
        self, spec: ModelSpec, facts: GraphFacts, folder: Path, settings: OrtSettings
    ) -> None:
        self.spec = spec
        self.settings = settings
        # Attention sums a path in another order when its cells lie between those of siblings.
        reason = "a branch rounds differently from a chain" if settings.pads_single else ""
        self.capabilities = Capabilities(True, not settings.pads_single, True, reason)
        self._table = spec.tensors["token_embd.weight"]
        self._raw_table = raw_rows(spec.path, self._table)
        self._scale = np.float32(facts.embedding_scale)
        with ThreadPoolExecutor(1) as beside:  # both leave Python alone while they read
            vocabulary = beside.submit(_tokenizer, spec)
            self._session: Any = _session(folder / GRAPH_FILE, settings.threads)
            self.tokenizer = vocabulary.result()
        self._binding: Any = self._session.io_binding()
        self._tokens: list[int] = []
        self._tree: DraftTree | None = None
        self._allocate(facts)

    # -- Backend protocol ------------------------------------------------------------------

    @property
    def context_size(self) -> int:
        return self.settings.context_size

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def pending(self) -> int:
        return 0

    @property
    def max_nodes(self) -> int:
        return self.settings.max_nodes

    @property
    def batch_size(self) -> int:
        return self.settings.batch_size

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append at most `batch_size` tokens; the logits of the last one, [V]."""
        self._check_room(len(tokens))
        self._tree = None
        rows = self._step(tokens, range(len(tokens)), None, first_row=len(tokens) - 1)
        self._tokens += tokens
        logits: Logits = rows[0]
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """Logits of all nodes in one step, [n, V]: a view the next step overwrites."""
        count = len(tree)
        if count > self.max_nodes:
            raise UnsupportedError(f"a step has room for {self.max_nodes} nodes, not {count}")
        if not self.capabilities.tree and not tree.is_chain:
            raise UnsupportedError(f"no branches in this mode: {self.capabilities.reason}")
        self._check_room(count)
        self._tree = tree
        return self._step(tree.tokens, tree.depths(), tree)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes of `path`, forget the rest of the last step."""
        tree, self._tree = self._tree, None
        assert tree is not None and path[0] == 0, "commit follows verify and keeps the root"
        moved = [(place, node) for place, node in enumerate(path) if place != node]
        if moved:
            to = [self.length + place for place, _ in moved]
            start = [self.length + node for _, node in moved]
            for cache in self._caches:
                cache[0, :, to] = cache[0, :, start]
        self._tokens += [tree.tokens[node] for node in path]

    def truncate(self, length: int) -> int:
        """Keep at most the first `length` tokens; return how many there are."""
        self._tree = None
        del self._tokens[length:]
        return self.length

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the arrays this backend holds; ONNX Runtime's own are not told."""
        return {
            "kv_cache": sum(cache.nbytes for cache in self._caches),
            "logits": self._logits.nbytes,
        }

    def close(self) -> None:
        self._session = self._binding = None
        self._caches.clear()
        self.tokenizer.close()

    # -- one step --------------------------------------------------------------------------

    def _check_room(self, count: int) -> None:
        if self.length + count > self.settings.context_size:
            raise ContextFullError(
                f"{count} more tokens do not fit: the context has {self.settings.context_size} "
                f"and {self.length} are used",
                hint="raise --ctx, or shorten the prompt",
            )

    def _step(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        tree: DraftTree | None,
        first_row: int = 0,
    ) -> Logits:
        """Evaluate nodes behind the committed tokens; logits from `first_row` on."""
        count = len(tokens)
        wanted = count - first_row
        if count == 1 and self.settings.pads_single:
            tokens, depths, count = (*tokens, tokens[0]), (*depths, 1), 2
        total = self.length + count
        positions = np.asarray(depths, np.int64)[None] + self.length
        inputs = {
            "embeddings": self._embed(tokens),
            "positions": positions,
            "rows": np.arange(first_row, first_row + wanted),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        branches = tree is not None and not tree.is_chain
        for name, window in self._windows.items():
            inputs[name] = self._bias(positions[0], total, window, tree if branches else None)
        for name, value in inputs.items():
            self._binding.bind_cpu_input(name, value)
        out = self._logits[:wanted]
        self._binding.bind_output("logits", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed: {error}") from error
        return out

    def _embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Rows of the embedding table, [1, n, E]."""
        rows = dequantize(self._table, self._raw_table[list(tokens)])
        if self._scale != 1.0:
            rows = rows * self._scale
        return rows[None]

    def _bias(
        self,
        positions: NDArray[np.int64],
        total: int,
        window: int,
        tree: DraftTree | None,
    ) -> NDArray[np.float32]:
        """What is added to attention scores, [1, 1, n, total]: 0, or nearly minus infinity."""
        count = len(positions)
        if tree is None and not window:  # what is causal needs no bias: these stay zeros
            return self._zeros[: count * total].reshape(1, 1, count, total)
        bias = np.zeros((1, 1, count, total), np.float32)
        rows = bias[0, 0]
        if tree is not None:
            below = rows[:, self.length :]
            below[:] = _MASKED
            for node in range(len(tree)):
                below[node, tree.path(node)] = 0.0
        if window:  # a token sees the `window` last positions, its own included
            cells = np.concatenate((np.arange(self.length), positions))
            rows[cells[None] <= positions[:, None] - window] = _MASKED
        return bias

    # -- set-up ----------------------------------------------------------------------------

    def _allocate(self, facts: GraphFacts) -> None:
        spec, settings = self.spec, self.settings
        capacity = settings.context_size + settings.max_nodes + 1  # room for a padded step, too
        self._caches: list[NDArray[np.float32]] = []
        for layer in range(spec.num_layers):
            for what, length in (("key", spec.key_length), ("value", spec.value_length)):
                shape = (1, spec.num_kv_heads[layer], capacity, length[layer])
                cache = np.empty(shape, np.float32)
                cache.fill(0.0)  # takes the memory now, and not in mid-answer
                self._caches.append(cache)
                place = ("cpu", 0, np.float32, shape, cache.ctypes.data)
                self._binding.bind_input(f"past_{what}.{layer}", *place)
                self._binding.bind_output(f"present_{what}.{layer}", *place)
        self._constants = _rope_tables(spec, facts, capacity)
        for name, table in self._constants.items():
            self._binding.bind_cpu_input(name, table)
        widest = max(settings.max_nodes, settings.batch_size, 2)
        self._windows = {"attention_bias": 0}
        if any(spec.is_sliding):
            self._windows["attention_bias_window"] = spec.sliding_window
        self._zeros = np.zeros(widest * capacity, np.float32)  # read only: pages of one zero page
        self._logits = np.empty((settings.max_nodes, self.tokenizer.vocab_size), np.float32)


class _VocabularyTokenizer(LlamaTokenizer):
    """A tokenizer that owns the vocabulary it came from."""

    def __init__(self, lib: Any, model: Any) -> None:
        super().__init__(lib, model)
        self._model = model

    def close(self) -> None:
        """Free the vocabulary; safe to call twice."""
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = None


def _tokenizer(spec: ModelSpec) -> _VocabularyTokenizer:
    """llama.cpp's tokenizer of the GGUF, without its weights."""
    lib = library()
    LOG.clear()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(os.fsencode(spec.path), params)
    if not model:
        raise BackendError(f"llama.cpp cannot read the vocabulary: {LOG.problem() or 'no reason'}")
    return _VocabularyTokenizer(lib, model)


def onnxruntime_module() -> Any:
    """The library. Raises MissingDependencyError where it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "--backend onnx needs onnxruntime", hint="pip install 'edgespec[onnx]'"
        ) from error
    return onnxruntime


def _session(path: Path, threads: int) -> Any:
    onnxruntime = onnxruntime_module()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; they are raised as well
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BackendError(f"ONNX Runtime cannot load {path.name}: {error}") from error


def _rope_tables(
    spec: ModelSpec, facts: GraphFacts, capacity: int
) -> dict[str, NDArray[np.float32]]:
    """Cosines and sines of every position, [capacity, D / 2], for full and sliding layers."""
    half = np.arange(0, spec.key_length[0], 2) / spec.key_length[0]
    factors = np.float64(1.0)
    if long := spec.tensors.get("rope_freqs.weight"):
        factors = dequantize(long, raw_rows(spec.path, long)).reshape(-1).astype(np.float64)
    tables: dict[str, NDArray[np.float32]] = {}
    bases = {"": (facts.rope_base, facts.rope_factor * factors)}
    if any(spec.is_sliding):
        bases["_window"] = (facts.window_rope_base, np.float64(1.0))
    for name, (base, divisor) in bases.items():
        angles = np.arange(capacity)[:, None] * (base**-half / divisor)[None]
        tables[f"cos{name}"] = np.cos(angles).astype(np.float32)
        tables[f"sin{name}"] = np.sin(angles).astype(np.float32)
    return tables
