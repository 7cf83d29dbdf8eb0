"""Runs graphs: what every one is given besides tokens, and the two ways to keep keys and values.

Of a `split` graph the past goes in, the new rows of K and V come out, the host keeps some. Works
for every graph with these inputs and outputs (`models/onnx/graph.py` names them), whoever exported
it: `rows`, `position_ids`, `input_ids` and tables for the rotation are given where a graph asks for
them. Graphs with fixed shapes are buckets: a step takes the smallest it fits into, and is padded
with rows that nobody looks at.

Of a `gqa` graph the KV cache is two arrays a layer that it reads and writes in place. So rolling
back is forgetting a length, and keeping a branch that does not lie in order copies its rows to the
front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import DraftTree
from edgespec.errors import BackendError, UnsupportedError
from edgespec.models.onnx.facts import GraphFacts
from edgespec.models.onnx.weights import dequantize, raw_rows
from edgespec.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Step:
    """Nodes behind `length` committed tokens, of which those from `first_row` on want logits.

    A chain has no tree: every node sees all before it.
    """

    length: int
    # [n]
    positions: NDArray[np.int64]
    tree: DraftTree | None = None
    first_row: int = 0

    @property
    def count(self) -> int:
        return len(self.positions)


def attention_bias(
    step: Step, window: int, masked: float, *, past: int | None = None, nodes: int | None = None
) -> NDArray[np.float32]:
    """What is added to attention scores, [1, 1, nodes, past + nodes]: 0, or `masked`.

    Args:
        window: a token sees the `window` last positions, its own included; 0 means all.
        past: cells before the nodes, of which those from `step.length` on are empty.
        nodes: rows, of which those behind the step's are padding: each sees only itself.
    """
    length, count = step.length, step.count
    past, nodes = length if past is None else past, nodes or count
    bias = np.full((1, 1, nodes, past + nodes), masked, np.float32)
    rows = bias[0, 0]
    rows[:count, :length] = 0.0
    below = rows[:, past:]
    np.fill_diagonal(below, 0.0)
    if step.tree is None:
        below[:count, :count][np.tri(count, dtype=np.bool_)] = 0.0
    else:
        for node in range(len(step.tree)):
            below[node, step.tree.path(node)] = 0.0
    if window:
        lowest = step.positions[:, None] - window
        rows[:count, :length][np.arange(length)[None] <= lowest] = masked
        below[:count, :count][step.positions[None] <= lowest] = masked
    return bias


def rope_tables(
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


_MASKED = -1e4  # fits into half precision; e to its power is 0 there and in float32
_MORE_CELLS = 256  # a growing cache is masked, not shorter: the graph looks at all of it
_ENTRIES = ("embeddings", "input_ids")


def is_split(session: Any) -> bool:
    """Whether a session's graph leaves the cache to the host."""
    return any(info.name.startswith("new_key.") for info in session.get_outputs())


@dataclass(frozen=True, slots=True)
class _Graph:
    """A session and the shapes it is for; 0 stands for any."""

    session: Any
    inputs: frozenset[str]
    outputs: tuple[str, ...]  # the main one, then new rows in the order of the caches
    step: int
    past: int


class SplitRunner:
    """Sessions of one model, all over the same cache.

    Args:
        sessions: one with any shape, or buckets of fixed ones.
        tables: cosines and sines of every position, [positions, D / 2], by the name of the input.
        windows: by the name of each attention bias, how far its layers see; 0 means all.
        context_size: tokens the cache must be able to hold.

    Raises:
        UnsupportedError: no bucket holds so many tokens, or an input is not known.
    """

    def __init__(
        self,
        sessions: Sequence[Any],
        tables: dict[str, NDArray[np.float32]],
        windows: dict[str, int],
        context_size: int,
    ) -> None:
        first = {info.name: info.shape for info in sessions[0].get_inputs()}
        self.entry = next(name for name in _ENTRIES if name in first)
        self._names = [name for name in first if name.startswith("past_")]
        self._tables, self._windows = tables, windows
        known = {self.entry, *self._names, *tables, *windows, "position_ids", "rows"}
        if unknown := sorted(first.keys() - known):
            raise UnsupportedError(f"this graph asks for {', '.join(unknown)}, which is not known")
        self._graphs = sorted((self._graph(one) for one in sessions), key=lambda g: g.step)
        fixed = sorted({graph.past for graph in self._graphs if graph.past})
        self._sizes = fixed or [*range(_MORE_CELLS, context_size, _MORE_CELLS), context_size]
        if self._sizes[-1] < context_size:
            raise UnsupportedError(
                f"these graphs hold {self._sizes[-1]} tokens, not {context_size}",
                hint=f"use --ctx {self._sizes[-1]} or less",
            )
        shapes = [(first[name][1], first[name][3]) for name in self._names]
        self._memory = [np.empty(h * self._sizes[-1] * d, np.float32) for h, d in shapes]
        for memory in self._memory:
            memory.fill(0.0)  # takes the memory now, and not in mid-answer
        self._shapes = shapes
        self._past = 0
        self._caches: list[NDArray[np.float32]] = []
        self._new: list[NDArray[np.float32]] = []
        self._resize(0, self._sizes[0])

    def _graph(self, session: Any) -> _Graph:
        shapes = {info.name: info.shape for info in session.get_inputs()}
        new = (name.replace("past_", "new_") for name in self._names)
        step, past = shapes[self.entry][1], shapes[self._names[0]][2]
        return _Graph(
            session,
            frozenset(shapes),
            ("logits", *new),
            step if isinstance(step, int) else 0,
            past if isinstance(past, int) else 0,
        )

    @property
    def max_step(self) -> int | None:
        """Most nodes of a step, where shapes are fixed."""
        return max(graph.step for graph in self._graphs) or None

    def run(self, step: Step, values: NDArray[Any]) -> NDArray[np.float32]:
        """Evaluate nodes; rows [n, V] from the first wanted on.

        Args:
            values: embeddings [.., n, E], or ids [.., n].
        """
        fits = (one for one in self._graphs if one.step == 0 or one.step >= step.count)
        graph = next((one for one in fits if one.past in (0, self._past)), None)
        if graph is None:
            raise UnsupportedError(f"a step has room for {self.max_step} nodes, not {step.count}")
        padding = (graph.step or step.count) - step.count
        feeds: dict[str, Any] = dict(zip(self._names, self._caches, strict=True))
        nodes = step.count + padding
        for name, window in self._windows.items():
            feeds[name] = attention_bias(step, window, _MASKED, past=self._past, nodes=nodes)
        positions = np.pad(step.positions, (0, padding), "edge")
        feeds |= {name: table[positions] for name, table in self._tables.items()}
        feeds["position_ids"] = positions[None]
        feeds["rows"] = np.arange(step.first_row, step.count)
        tokens = values.reshape(step.count, -1)
        padded = np.pad(tokens, ((0, padding), (0, 0)), "edge")[None]
        feeds[self.entry] = padded[..., 0] if self.entry == "input_ids" else padded
        try:
            out, *self._new = graph.session.run(
                graph.outputs, {name: feeds[name] for name in graph.inputs}
            )
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed: {error}") from error
        rows: NDArray[np.float32] = out.reshape(-1, out.shape[-1])
        return rows if "rows" in graph.inputs else rows[step.first_row : step.count]

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Let the last step's nodes of `path` follow the first `length` tokens."""
        end, nodes = length + len(path), list(path)
        cells = next(size for size in self._sizes if size >= end)
        if cells != self._past:
            self._resize(length, cells)
        for cache, new in zip(self._caches, self._new, strict=True):
            cache[0, :, length:end] = new[0][:, nodes]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the arrays held here."""
        return {"kv_cache": sum(memory.nbytes for memory in self._memory)}

    def close(self) -> None:
        self._graphs.clear()
        self._caches.clear()
        self._memory.clear()
        self._new = []

    def _resize(self, length: int, cells: int) -> None:
        """Let the caches have so many cells; each lies dense in memory taken at the start."""
        old, self._caches = self._caches, []
        for number, (memory, (heads, width)) in enumerate(
            zip(self._memory, self._shapes, strict=True)
        ):
            cache = memory[: heads * cells * width].reshape(1, heads, cells, width)
            # Nothing is written over before it was moved: a head that goes up goes last to first.
            order = range(heads if old else 0)
            for head in reversed(order) if cells > self._past else order:
                cache[0, head, :length] = old[number][0, head, :length]
            self._caches.append(cache)
        self._past = cells


_FAR_BELOW = -1e9  # far below every score, and still a number after being added to one


class GqaRunner:
    """One session, with a cache of `capacity` cells.

    Args:
        tables: cosines and sines of every position, by the name of the input.
        windows: by the name of each attention bias, how far its layers see; 0 means all.
        max_nodes: most rows of logits.
        widest: most tokens of a step.
    """

    max_step: int | None = None

    def __init__(
        self,
        session: Any,
        tables: dict[str, NDArray[np.float32]],
        windows: dict[str, int],
        *,
        capacity: int,
        max_nodes: int,
        widest: int,
    ) -> None:
        self._session = session
        self._binding: Any = session.io_binding()
        self._windows = windows
        self._caches: list[NDArray[np.float32]] = []
        for info in session.get_inputs():
            if info.name.startswith("past_"):
                shape = (1, info.shape[1], capacity, info.shape[3])
                cache = np.empty(shape, np.float32)
                cache.fill(0.0)  # takes the memory now, and not in mid-answer
                self._caches.append(cache)
                place = ("cpu", 0, np.float32, shape, cache.ctypes.data)
                self._binding.bind_input(info.name, *place)
                self._binding.bind_output(info.name.replace("past_", "present_"), *place)
        self._tables = tables
        for name, table in tables.items():
            self._binding.bind_cpu_input(name, table)
        self._zeros = np.zeros(widest * capacity, np.float32)  # read only: pages of one zero page
        self._logits = np.empty((max_nodes, session.get_outputs()[0].shape[-1]), np.float32)

    def run(self, step: Step, values: NDArray[Any]) -> NDArray[np.float32]:
        """Logits from the first row wanted on, [r, V]; the next run overwrites them."""
        if step.tree is None or step.length:
            return self._run(step, values)
        # GroupQueryAttention reads the first position alone where the cache is empty, and counts on
        # from there. So the root is on its own; its children are roots behind it.
        root = self._run(Step(0, step.positions[:1]), values[:, :1]).copy()
        below = DraftTree(step.tree.tokens[1:], [parent - 1 for parent in step.tree.parents[1:]])
        others = self._run(Step(1, step.positions[1:], below), values[:, 1:])
        return np.concatenate((root, others))

    def _run(self, step: Step, values: NDArray[Any]) -> NDArray[np.float32]:
        count, total = step.count, step.length + step.count
        inputs = {
            "embeddings": values,
            "positions": step.positions[None],
            "rows": np.arange(step.first_row, count),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        for name, window in self._windows.items():
            if step.tree is None and not window:  # what is causal needs no bias: these stay zeros
                inputs[name] = self._zeros[: count * total].reshape(1, 1, count, total)
            else:
                inputs[name] = attention_bias(step, window, _FAR_BELOW)
        for name, value in inputs.items():
            self._binding.bind_cpu_input(name, value)
        out = self._logits[: count - step.first_row]
        self._binding.bind_output("logits", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed: {error}") from error
        return out

    def keep(self, length: int, path: Sequence[int]) -> None:
        moved = [(place, node) for place, node in enumerate(path) if place != node]
        if moved:
            to = [length + place for place, _ in moved]
            start = [length + node for _, node in moved]
            for cache in self._caches:
                cache[0, :, to] = cache[0, :, start]

    def memory_bytes(self) -> dict[str, int]:
        return {
            "kv_cache": sum(cache.nbytes for cache in self._caches),
            "logits": self._logits.nbytes,
        }

    def close(self) -> None:
        self._session = self._binding = None
        self._caches.clear()
