"""Numbers of ggml's types, products of experts, and how far two products are apart."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.ggml_products import MatrixProduct, set_values, tensor
from edgespec.backends.llama.library import ggml_function

F32, Q4_0, Q4_K, IQ3_S, I32 = 0, 2, 12, 21, 26
FAR = 0.02  # root mean square of the difference, over that of the product


def distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


class ExpertProduct(MatrixProduct):
    """One of experts: weights [experts, rows, columns] by x [n, inputs, columns].

    Each token has `used` experts, and rows of x: one for all of them, or one each.
    """

    def __init__(self, *arguments: Any, used: int, inputs: int = 1, **options: Any) -> None:
        self._used, self._inputs = used, inputs
        super().__init__(*arguments, **options)

    def _operation(
        self, context: int, matrix: int, shape: tuple[int, ...], tokens: int
    ) -> tuple[int, int]:
        self._result_shape = (tokens, self._used, shape[1])
        x = tensor(context, F32, (shape[0], self._inputs, tokens))
        self._ids = tensor(context, I32, (self._used, tokens))
        multiply = ggml_function("ggml_mul_mat_id", ctypes.c_void_p, *4 * [ctypes.c_void_p])
        return x, int(multiply(context, matrix, x, self._ids))

    def of(self, x: NDArray[np.float32], ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The product with x; `ids` [n, used] are the experts of each token."""
        set_values(self._ids, np.ascontiguousarray(ids, np.int32))
        return self(x)
