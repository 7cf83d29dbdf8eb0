"""Single matrix products, computed by ggml's CPU backend: what kernels are compared by."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.library import ggml_function
from edgespec.errors import BackendError
from edgespec.memory.device.structures import InitParams

_F32, _I32 = 0, 26  # values of ggml_type
_P, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
_CONTEXT_BYTES = 1 << 20


class MatrixProduct:
    """One product in ggml: `weights` [rows, columns] by x [n, columns] to [n, rows].

    With `ids` (see `experts`), weights are [experts, rows, columns]. To be closed.

    Args:
        ggml_type: of the weights.
        weights: their bytes as in a file, for `shape` = (columns, rows[, experts]).
        buffer_type: where they lie, and with it whose kernel is used; None is plain memory.
        tokens: n.
        used: experts for each token, or 0 for an ordinary product.
        inputs: rows of `x` for each token of experts: one for all of them, or one each.

    Raises:
        BackendError: memory is short, or nobody computes this product.
    """

    def __init__(
        self,
        ggml_type: int,
        weights: NDArray[np.uint8],
        shape: tuple[int, ...],
        *,
        tokens: int,
        threads: int = 1,
        buffer_type: int | None = None,
        used: int = 0,
        inputs: int = 1,
    ) -> None:
        self._held = ExitStack()
        x_shape = (shape[0], inputs, tokens) if used else (shape[0], tokens)
        try:
            self._build(ggml_type, weights, shape, x_shape, threads, buffer_type, used)
        except BaseException:
            self.close()
            raise

    def _build(
        self,
        ggml_type: int,
        weights: NDArray[np.uint8],
        shape: tuple[int, ...],
        x_shape: tuple[int, ...],
        threads: int,
        buffer_type: int | None,
        used: int,
    ) -> None:
        rows, tokens = shape[1], x_shape[-1]
        plain = _call("ggml_backend_cpu_buffer_type", _P)
        stored, computed = self._context(), self._context()
        matrix = _tensor(stored, ggml_type, shape)
        self._allocate(stored, buffer_type or plain)
        self._x = _tensor(computed, _F32, x_shape)
        self._ids = _tensor(computed, _I32, (used, tokens)) if used else None
        if self._ids is not None:
            self._y = _call("ggml_mul_mat_id", _P, (computed, matrix, self._x, self._ids), 4 * [_P])
        else:
            self._y = _call("ggml_mul_mat", _P, (computed, matrix, self._x), 3 * [_P])
        self._graph = _call("ggml_new_graph", _P, (computed,), [_P])
        _call("ggml_build_forward_expand", None, (self._graph, self._y), [_P, _P])
        self._allocate(computed, plain)
        self._backend = _call("ggml_backend_cpu_init", _P)
        self._held.callback(_call, "ggml_backend_free", None, (self._backend,), [_P])
        pair = (self._backend, threads)
        _call("ggml_backend_cpu_set_n_threads", None, pair, [_P, ctypes.c_int])
        supports = _call(
            "ggml_backend_supports_op", ctypes.c_bool, (self._backend, self._y), 2 * [_P]
        )
        if not supports:
            raise BackendError(f"ggml has no kernel for this product of type {ggml_type}")
        _set(matrix, weights)  # a buffer type may not survive what it has no kernel for
        self._result_shape = (tokens, used, rows) if used else (tokens, rows)

    def __call__(
        self, x: NDArray[np.float32], ids: NDArray[np.int32] | None = None
    ) -> NDArray[np.float32]:
        """The product with `x` [n(, inputs), columns]; `ids` [n, used]: experts of each token."""
        _set(self._x, np.ascontiguousarray(x, np.float32))
        if self._ids is not None and ids is not None:
            _set(self._ids, np.ascontiguousarray(ids, np.int32))
        self._compute()
        result = np.empty(self._result_shape, np.float32)
        arguments = (self._y, result.ctypes.data, 0, result.nbytes)
        _call("ggml_backend_tensor_get", None, arguments, [_P, _P, _SIZE, _SIZE])
        return result

    def seconds(self) -> float:
        """What computing it once more takes."""
        start = perf_counter()
        self._compute()
        return perf_counter() - start

    def close(self) -> None:
        """Free everything; calling it again does nothing."""
        self._held.close()

    def __enter__(self) -> MatrixProduct:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compute(self) -> None:
        arguments = (self._backend, self._graph)
        if _call("ggml_backend_graph_compute", ctypes.c_int, arguments, [_P, _P]) != 0:
            raise BackendError("ggml could not compute a product")

    def _context(self) -> int:
        params = InitParams(_CONTEXT_BYTES, None, True)
        context = int(_call("ggml_init", _P, (params,), [InitParams]))
        self._held.callback(_call, "ggml_free", None, (context,), [_P])
        return context

    def _allocate(self, context: int, buffer_type: int) -> None:
        arguments = (context, buffer_type)
        buffer = _call("ggml_backend_alloc_ctx_tensors_from_buft", _P, arguments, [_P, _P])
        if not buffer:
            raise BackendError("out of memory")
        self._held.callback(_call, "ggml_backend_buffer_free", None, (buffer,), [_P])


def quantized(ggml_type: int, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows [n, columns] in a type of ggml, as bytes, one row after the other."""
    rows, columns = values.shape
    row_bytes = _call("ggml_row_size", _SIZE, (ggml_type, columns), [ctypes.c_int, _I64])
    result = np.empty(rows * row_bytes, np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    arguments = (ggml_type, values.ctypes.data, result.ctypes.data, 0, rows, columns, None)
    types = [ctypes.c_int, _P, _P, _I64, _I64, _I64, _P]
    _call("ggml_quantize_chunk", _SIZE, arguments, types)
    return result


def _tensor(context: int, kind: int, shape: tuple[int, ...]) -> int:
    name = f"ggml_new_tensor_{len(shape)}d"
    types = [_P, ctypes.c_int, *len(shape) * [_I64]]
    return int(_call(name, _P, (context, kind, *shape), types))


def _set(tensor: int, values: NDArray[Any]) -> None:
    arguments = (tensor, values.ctypes.data, 0, values.nbytes)
    _call("ggml_backend_tensor_set", None, arguments, [_P, _P, _SIZE, _SIZE])


def _call(name: str, result: Any, arguments: tuple[Any, ...] = (), types: Any = ()) -> Any:
    return ggml_function(name, result, *types)(*arguments)
