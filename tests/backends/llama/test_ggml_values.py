"""Rows of tensors as float32: ggml's own conversion against the gguf package's."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.backends.llama.ggml_values import FloatRows
from edgespec.errors import UnsupportedError
from edgespec.models.gguf.ggml_types import GGML_TYPES, GgmlType
from edgespec.quantize.convert import TENSOR_TYPES

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
ROWS, COLUMNS = 5, 512
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
READABLE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def kind_of(name: str) -> Any:
    return getattr(gguf.GGMLQuantizationType, name)


@pytest.mark.parametrize("name", WRITABLE)
def test_written_values_are_read_as_the_gguf_package_reads_them(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    rows = gguf.quants.quantize(values, kind_of(name)).view(np.uint8)
    converted = FloatRows(TYPES[name], COLUMNS)(rows)
    assert converted.shape == (ROWS, COLUMNS)
    assert np.array_equal(converted, gguf.quants.dequantize(rows, kind_of(name)))


@pytest.mark.parametrize("name", READABLE)
def test_any_bytes_are_read_as_the_gguf_package_reads_them(name: str) -> None:
    """Bits of scales are cleared that would make them infinite."""
    to_float = FloatRows(TYPES[name], COLUMNS)
    rows = np.random.default_rng(2).integers(0, 0xBF, (ROWS, to_float.row_bytes), np.uint8)
    rows &= 0xBB  # no half with all bits of its exponent set
    expected = gguf.quants.dequantize(rows, kind_of(name))
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 50
    assert np.allclose(to_float(rows), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", sorted(TENSOR_TYPES))
def test_every_type_a_mixture_may_have_can_be_read(name: str) -> None:
    assert FloatRows(TYPES[name], COLUMNS).row_bytes > 0


def test_rows_need_not_lie_together() -> None:
    rows = np.random.default_rng(3).integers(0, 100, (6, 36), np.uint8)
    to_float = FloatRows(TYPES["Q4_0"], 64)
    assert to_float.row_bytes == 36
    assert np.array_equal(to_float(rows[::2]), to_float(rows)[::2])


def test_another_layout_than_the_librarys_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot read single rows of type Q4_0"):
        FloatRows(GgmlType("Q4_0", 32, 20), 64)
