"""Drives an EAGLE-3 head beside its target through llama.cpp's C functions alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.kernels import model_params

Rows = NDArray[np.float32]
_CELLS = 256
_SET = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_GET = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"


class EagleDriver:
    """A target and a head of it; texts of up to 256 tokens."""

    def __init__(self, target: Path, head: Path, layers: Sequence[int], width: int) -> None:
        from llama_cpp import llama_cpp, llama_cpp_ext

        self._lib, self._ext = llama_cpp, llama_cpp_ext
        llama_cpp.llama_backend_init()
        self._layers, self._width = layers, width
        self._models = [self._loaded(path) for path in (target, head)]
        self._target = self._context(self._models[0], None)
        self._head = self._context(self._models[1], self._target)
        vocabulary = llama_cpp.llama_model_get_vocab(self._models[1])
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._keep, self._kept = self._lib._lib[_SET], self._lib._lib[_GET]
        self._keep.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
        self._kept.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        self._kept.restype = ctypes.POINTER(ctypes.c_float)
        for layer in layers:
            self._keep(self._target, layer, True)
        llama_cpp_ext.llama_set_embeddings_nextn(self._head, True, False)

    def _loaded(self, path: Path) -> Any:
        params = model_params()
        params.n_gpu_layers = 0
        model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        assert model, f"llama.cpp does not load {path}"
        return model

    def _context(self, model: Any, other: Any) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _CELLS
        params.n_threads = params.n_threads_batch = 2
        params.ctx_other = other
        context = self._lib.llama_init_from_model(model, params)
        assert context, "llama.cpp makes no context"
        return context

    def states(self, tokens: Sequence[int]) -> Rows:
        """What the target's layers take in for each token of a new text, [n, layers x width]."""
        self._forget(self._target, 0)
        self._run(self._lib.llama_decode, self._target, np.array(tokens, np.int32), None, 0)
        rows = [
            np.ctypeslib.as_array(self._kept(self._target, layer), (len(tokens), self._width))
            for layer in self._layers
        ]
        return np.concatenate(rows, 1)

    def fused(self, states: Rows) -> Rows:
        """What the head's encoder makes of a new text's, [n, width]."""
        self._forget(self._head, 0)
        self._run(self._lib.llama_encode, self._head, None, states, 0)
        return self._next_rows(len(states))

    def drafted(self, tokens: Sequence[int], rows: Rows, start: int) -> tuple[Rows, Rows]:
        """Logits [n, V] and rows to go on with [n, width] of places from `start` on."""
        self._forget(self._head, start)
        ids = np.array(tokens, np.int32)
        self._run(self._lib.llama_decode, self._head, ids, rows, start)
        logits = self._lib.llama_get_logits(self._head)
        found = np.ctypeslib.as_array(logits, (len(tokens), self._vocab_size)).copy()
        return found, self._next_rows(len(tokens))

    def _next_rows(self, count: int) -> Rows:
        pointer = self._ext.llama_get_embeddings_nextn(self._head)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        rows: Rows = np.ctypeslib.as_array(address, (count, self._width)).copy()
        return rows

    def _forget(self, context: Any, start: int) -> None:
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(context), 0, start, -1)

    def _run(
        self,
        function: Any,
        context: Any,
        ids: NDArray[np.int32] | None,
        rows: Rows | None,
        start: int,
    ) -> None:
        count = len(ids if ids is not None else rows)  # type: ignore[arg-type]
        rows = None if rows is None else np.ascontiguousarray(rows, np.float32)
        positions = np.arange(start, start + count, dtype=np.int32)
        sequences, wanted = np.zeros(count, np.int32), np.ones(count, np.int8)
        numbers = np.ones(count, np.int32)
        pointers = (ctypes.POINTER(ctypes.c_int32) * count)(
            *(sequences[i:].ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) for i in range(count))
        )

        def at(values: Any, kind: Any) -> Any:
            return None if values is None else values.ctypes.data_as(ctypes.POINTER(kind))

        batch = self._lib.llama_batch(
            count,
            at(ids, ctypes.c_int32),
            at(rows, ctypes.c_float),
            at(positions, ctypes.c_int32),
            at(numbers, ctypes.c_int32),
            pointers,
            at(wanted, ctypes.c_int8),
        )
        status = function(context, batch)
        assert status == 0, f"{function.__name__}: {status}"

    def close(self) -> None:
        """Free what llama.cpp holds."""
        for context in (self._head, self._target):
            self._lib.llama_free(context)
        for model in self._models:
            self._lib.llama_model_free(model)

    def __enter__(self) -> EagleDriver:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(AttributeError):
            self.close()
