"""A model in llama.cpp that can leave out some of its blocks, to see what that does to its words.

Left out means that a block's result is replaced by what went into it, as soon as it was computed:
one loaded file serves every choice of blocks, at the price of the whole model. Nothing is faster so
(`edgespec.models.exits.writer.write_pruned` makes the file that is).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.library import ggml_function, interrupts_kept

_RESULT = b"l_out-"  # what llama.cpp calls the result of a block, and its number


class SkippingBackend(LlamaBackend):
    """Raises as LlamaBackend. The last block cannot be left out."""

    def __init__(self, path: str | os.PathLike[str], settings: LlamaSettings) -> None:
        self.skipped: Set[int] = frozenset()
        self._similar: dict[int, list[float]] = {}
        self._state: NDArray[np.float32] | None = None  # what goes into the next block, flat
        self._problem: Exception | None = None
        move = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._name_of = ggml_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._size_of = ggml_function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._get = ggml_function("ggml_backend_tensor_get", None, *move)
        self._set = ggml_function("ggml_backend_tensor_set", None, *move)
        super().__init__(path, settings)
        self._width = self._context.width

    def take_similarities(self) -> dict[int, float]:
        """Mean cosine of what goes into a block and what comes out, by block, since last asked."""
        found = {block: float(np.mean(values)) for block, values in self._similar.items()}
        self._similar.clear()
        return found

    def _adjust(self, params: Any) -> None:
        # C keeps the pointer: the function must outlive this call.
        self._callback = self._context.lib.ggml_backend_sched_eval_callback(self._look)
        params.cb_eval = self._callback

    def _decoder(self) -> Callable[[Batch, int], None]:
        return self._decode

    def _decode(self, batch: Batch, count: int) -> None:
        self._state = self._problem = None
        with interrupts_kept():
            self._context.decode(batch, count)
        if self._problem is not None:  # no exception can pass through C
            problem, self._problem = self._problem, None
            raise problem

    def _look(self, tensor: int, is_question: bool, _data: Any) -> bool:
        """llama.cpp asks which results it shall show, and then shows them."""
        try:
            name: bytes = self._name_of(tensor)
            if not name.startswith(_RESULT):
                return not is_question
            if not is_question:
                self._see(tensor, int(name[len(_RESULT) :]))
            return True
        except Exception as problem:
            self._problem = problem
            return False

    def _see(self, tensor: int, block: int) -> None:
        if block in self.skipped and self._state is not None:
            self._set(tensor, self._state.ctypes.data, 0, self._state.nbytes)
            return
        state = np.empty(self._size_of(tensor) // 4, np.float32)
        self._get(tensor, state.ctypes.data, 0, state.nbytes)
        before, self._state = self._state, state
        if before is not None and len(before) == len(state):  # the last block drops rows
            self._similar.setdefault(block, []).append(_cosine(before, state, self._width))


def _cosine(first: NDArray[np.float32], second: NDArray[np.float32], width: int) -> float:
    """Mean over rows of `width` values."""
    a, b = first.reshape(-1, width), second.reshape(-1, width)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean((a * b).sum(1) / np.maximum(norms, 1e-30)))
