"""How far a tensor's types are from its values, as its inputs see it.

    error = mean over rows i of sum_j m_j (q_ij - w_ij)^2

with m_j the mean square of input j (the importance matrix): the mean square by which the tensor's
outputs change, for inputs that are not correlated. To second order a divergence is proportional to
it, with a factor that is the tensor's own (as in GPTQ, arXiv 2210.17323, with a diagonal Hessian).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.ggml_values import FloatRows
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.onnx.weights import raw_rows
from edgespec.quantize.pieces import Choice, Pieces

_ROWS = 256  # of a tensor that are looked at, evenly spread


def rounding_errors(
    pieces: Pieces, choice: Choice, matrix: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Error of each of a tensor's types, the smallest first.

    Args:
        matrix: mean squares by tensor name; a tensor without any counts all inputs alike.
    """
    name, columns = choice.tensor.name, choice.tensor.dims[0]
    count = math.prod(choice.tensor.dims[1:])
    places = np.unique(np.linspace(0, count - 1, _ROWS).astype(np.int64))
    own = _rows(pieces.path(name, choice.tensor.type.name), columns, places)
    squares = matrix.get(name, np.ones(columns, np.float32)).reshape(-1, columns)
    squares = squares[places * len(squares) // count]  # stacked experts have inputs of their own
    errors = []
    for kind in choice.types:
        change = _rows(pieces.path(name, kind), columns, places) - own
        errors.append(float(np.einsum("ij,ij,ij->", change, change, squares)) / len(places))
    return np.array(errors)


def _rows(path: Path, columns: int, places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Some rows of the tensor in a piece, [n, columns]."""
    tensor = read_gguf(path).tensors[0]
    convert = FloatRows(tensor.type, columns)
    return convert(raw_rows(path, tensor)[places])
