"""Runs a `gqa` graph: the KV cache is two arrays a layer that it reads and writes in place.

So rolling back is forgetting a length, and keeping a branch that does not lie in order copies its
rows to the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.ort.inputs import Step, attention_bias
from edgespec.errors import BackendError

_MASKED = -1e9  # far below every score, and still a number after being added to one


class GqaRunner:
    """One session, with a cache of `capacity` cells.

    Args:
        tables: cosines and sines of every position, by the name of the input.
        windows: by the name of each attention bias, how far its layers see; 0 means all.
        max_nodes: most rows of logits.
        widest: most tokens of a step.
    """

    entry = "embeddings"
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
        self._bind_caches(capacity)
        self._tables = tables
        for name, table in tables.items():
            self._binding.bind_cpu_input(name, table)
        self._zeros = np.zeros(widest * capacity, np.float32)  # read only: pages of one zero page
        self._logits = np.empty((max_nodes, session.get_outputs()[0].shape[-1]), np.float32)

    def run(self, step: Step, values: NDArray[Any]) -> NDArray[np.float32]:
        """Logits from the first row wanted on, [r, V]; the next run overwrites them."""
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
                inputs[name] = attention_bias(step, window, _MASKED)
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
        """Let the last step's nodes of `path` follow the first `length` tokens."""
        moved = [(place, node) for place, node in enumerate(path) if place != node]
        if moved:
            to = [length + place for place, _ in moved]
            start = [length + node for _, node in moved]
            for cache in self._caches:
                cache[0, :, to] = cache[0, :, start]

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the arrays held here."""
        return {
            "kv_cache": sum(cache.nbytes for cache in self._caches),
            "logits": self._logits.nbytes,
        }

    def close(self) -> None:
        self._session = self._binding = None
        self._caches.clear()

    def _bind_caches(self, capacity: int) -> None:
        for info in self._session.get_inputs():
            if not info.name.startswith("past_"):
                continue
            _, heads, _, length = info.shape
            shape = (1, heads, capacity, length)
            cache = np.empty(shape, np.float32)
            cache.fill(0.0)  # takes the memory now, and not in mid-answer
            self._caches.append(cache)
            place = ("cpu", 0, np.float32, shape, cache.ctypes.data)
            self._binding.bind_input(info.name, *place)
            self._binding.bind_output(info.name.replace("past_", "present_"), *place)
