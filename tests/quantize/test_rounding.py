"""Errors of rounding against those of the values themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from edgespec.quantize.fit import rounding_errors
from edgespec.quantize.pieces import Pieces


def test_rounding_errors_are_those_of_the_values(
    pieces: Pieces,
) -> None:
    """Weighed by the inputs' squares; a coarser type of the same kind is further away."""
    for choice in pieces.choices:
        name, columns = choice.tensor.name, choice.tensor.dims[0]
        alike = rounding_errors(pieces, choice, {})
        assert (alike >= 0).all() and alike[0] == max(alike) > min(alike) >= 0
        squares = np.zeros(columns, np.float32)
        assert rounding_errors(pieces, choice, {name: squares}) == pytest.approx(0.0)
        squares[:] = 4.0
        assert rounding_errors(pieces, choice, {name: squares}) == pytest.approx(4.0 * alike)
        kind = choice.types[-1]
        whole = [values_of(pieces.path(name, one)) for one in (choice.tensor.type.name, kind)]
        if len(whole[0]) <= 256:  # all rows are looked at
            expected = np.square(whole[0] - whole[1]).sum(axis=1).mean()
            assert alike[-1] == pytest.approx(expected, rel=1e-4)


def values_of(piece: Path) -> NDArray[np.float32]:
    """By another program than the one under test."""
    tensor = GGUFReader(piece).tensors[0]
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    return values
