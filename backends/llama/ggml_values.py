"""Values of GGUF tensors, converted by the library that computes with them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.library import ggml_function
from edgespec.errors import UnsupportedError
from edgespec.memory.device.structures import TypeTraits
from edgespec.models.gguf.ggml_types import GGML_NUMBERS, GgmlType

_F32 = "F32"  # ggml has no conversion of what is float32 already


class FloatRows:
    """Turns rows of `columns` values of a tensor type into float32, as llama.cpp does.

    Raises UnsupportedError for a type this llama.cpp cannot convert.
    """

    def __init__(self, kind: GgmlType, columns: int) -> None:
        self._columns = columns
        self.row_bytes = columns // kind.block_size * kind.block_bytes
        self._convert: Callable[[int, int, int], None] | None = None
        if kind.name != _F32:
            traits_of = ggml_function(
                "ggml_get_type_traits", ctypes.POINTER(TypeTraits), ctypes.c_int
            )
            traits = traits_of(GGML_NUMBERS[kind.name]).contents
            fits = (traits.blck_size, traits.type_size) == (kind.block_size, kind.block_bytes)
            if not fits or not traits.to_float:
                raise UnsupportedError(f"llama.cpp cannot read single rows of type {kind.name}")
            self._convert = traits.to_float

    def __call__(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[n, row_bytes] to [n, columns]."""
        rows = np.ascontiguousarray(rows)
        if self._convert is None:
            return rows.view(np.float32)
        values = np.empty((len(rows), self._columns), np.float32)
        self._convert(rows.ctypes.data, values.ctypes.data, values.size)
        return values
