"""Single matrix products, computed by ggml's CPU backend: what kernels are compared by."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.library import ggml_function
from edgespec.errors import BackendError
from edgespec.memory.device.structures import InitParams

_F32 = 0  # a value of ggml_type
_P, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
_CONTEXT_BYTES = 1 << 20


class MatrixProduct(ExitStack):
    """One product in ggml: `weights` [rows, columns] by x [n, columns] to [n, rows].

    It frees everything when it is closed.

    Args:
        ggml_type: of the weights.
        weights: their bytes as in a file, for `shape` = (columns, rows).
        buffer_type: where they lie, and with it whose kernel is used; None is plain memory.
        tokens: n.

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
    ) -> None:
        super().__init__()
        try:
            plain = _call("ggml_backend_cpu_buffer_type", _P)
            stored, computed = self._context(), self._context()
            matrix = tensor(stored, ggml_type, shape)
            self._allocate(stored, buffer_type or plain)
            self._result_shape: tuple[int, ...] = (tokens, shape[1])
            self._x, self._y = self._operation(computed, matrix, shape, tokens)
            self._graph = _call("ggml_new_graph", _P, (computed,), [_P])
            _call("ggml_build_forward_expand", None, (self._graph, self._y), [_P, _P])
            self._allocate(computed, plain)
            self._backend = _call("ggml_backend_cpu_init", _P)
            self.callback(_call, "ggml_backend_free", None, (self._backend,), [_P])
            pair = (self._backend, threads)
            _call("ggml_backend_cpu_set_n_threads", None, pair, [_P, ctypes.c_int])
            pair = (self._backend, self._y)
            if not _call("ggml_backend_supports_op", ctypes.c_bool, pair, [_P, _P]):
                raise BackendError(f"ggml has no kernel for this product of type {ggml_type}")
            set_values(matrix, weights)  # a buffer type may not survive what it has no kernel for
        except BaseException:
            self.close()
            raise

    def _operation(
        self, context: int, matrix: int, shape: tuple[int, ...], tokens: int
    ) -> tuple[int, int]:
        """The tensors of x and of the result."""
        x = tensor(context, _F32, (shape[0], tokens))
        return x, int(ggml_function("ggml_mul_mat", _P, *3 * [_P])(context, matrix, x))

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The product with `x` [n, columns]."""
        set_values(self._x, np.ascontiguousarray(x, np.float32))
        self.compute()
        result = np.empty(self._result_shape, np.float32)
        arguments = (self._y, result.ctypes.data, 0, result.nbytes)
        _call("ggml_backend_tensor_get", None, arguments, [_P, _P, _SIZE, _SIZE])
        return result

    def compute(self) -> None:
        """Once more, with the x that there is."""
        arguments = (self._backend, self._graph)
        if _call("ggml_backend_graph_compute", ctypes.c_int, arguments, [_P, _P]) != 0:
            raise BackendError("ggml could not compute a product")

    def _context(self) -> int:
        params = InitParams(_CONTEXT_BYTES, None, True)
        context = int(_call("ggml_init", _P, (params,), [InitParams]))
        self.callback(_call, "ggml_free", None, (context,), [_P])
        return context

    def _allocate(self, context: int, buffer_type: int) -> None:
        arguments = (context, buffer_type)
        buffer = _call("ggml_backend_alloc_ctx_tensors_from_buft", _P, arguments, [_P, _P])
        if not buffer:
            raise BackendError("out of memory")
        self.callback(_call, "ggml_backend_buffer_free", None, (buffer,), [_P])


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


def tensor(context: int, kind: int, shape: tuple[int, ...]) -> int:
    """A tensor in a context of ggml's, which has no memory yet."""
    name = f"ggml_new_tensor_{len(shape)}d"
    types = [_P, ctypes.c_int, *len(shape) * [_I64]]
    return int(_call(name, _P, (context, kind, *shape), types))


def set_values(tensor: int, values: NDArray[Any]) -> None:
    """Fill a tensor."""
    arguments = (tensor, values.ctypes.data, 0, values.nbytes)
    _call("ggml_backend_tensor_set", None, arguments, [_P, _P, _SIZE, _SIZE])


def _call(name: str, result: Any, arguments: tuple[Any, ...] = (), types: Any = ()) -> Any:
    return ggml_function(name, result, *types)(*arguments)
