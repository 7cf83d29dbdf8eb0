"""Logits of a head's few tokens are spread over a vocabulary as ggml says."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.llama.kernels import refusal_of_kernels, spread_logits
from edgespec.backends.llama.library import ggml_function

F32, I64 = 0, 27  # values of ggml_type
P, SIZE, LENGTH = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
OUTSIDE = -7.0


class Params(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


@pytest.fixture(scope="module", autouse=True)
def attached() -> None:
    if reason := refusal_of_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
    spread_logits()


@settings(max_examples=40)
@given(
    size=st.integers(1, 700),
    part=st.floats(0.0, 1.0),
    tokens=st.integers(1, 5),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_values_lie_in_their_places(
    size: int, part: float, tokens: int, threads: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    ids = random.permutation(size)[: max(1, int(part * size))]
    values = random.standard_normal((tokens, len(ids)), np.float32)
    expected = np.full((tokens, size), OUTSIDE, np.float32)
    expected[:, ids] = values
    assert (spread(values, ids, size, threads) == expected).all()


def spread(
    values: NDArray[np.float32], ids: NDArray[np.int64], size: int, threads: int
) -> NDArray[np.float32]:
    """Rows [n, size] with values [n, k] at `ids` [k], as llama.cpp's graph of a head makes them."""
    bytes_needed = (1 << 20) + 8 * values.size + 16 * size * len(values)
    init = ggml_function("ggml_init", P, Params)
    context = init(Params(bytes_needed, None, False))
    tensor = ggml_function("ggml_new_tensor_3d", P, P, ctypes.c_int, LENGTH, LENGTH, LENGTH)
    fill = ggml_function("ggml_fill", P, P, P, ctypes.c_float)
    set_rows = ggml_function("ggml_set_rows", P, P, P, P, P)
    data = ggml_function("ggml_get_data", P, P)
    compute = ggml_function("ggml_graph_compute_with_ctx", ctypes.c_int, P, P, ctypes.c_int)
    try:
        few = tensor(context, F32, 1, values.shape[1], len(values))
        places = tensor(context, I64, len(ids), 1, 1)
        ctypes.memmove(data(few), values.ctypes.data, values.nbytes)
        ctypes.memmove(data(places), ids.ctypes.data, ids.nbytes)
        filled = fill(context, tensor(context, F32, 1, size, len(values)), OUTSIDE)
        result = set_rows(context, filled, few, places)
        graph = ggml_function("ggml_new_graph", P, P)(context)
        ggml_function("ggml_build_forward_expand", None, P, P)(graph, result)
        assert compute(context, graph, threads) == 0
        rows = np.empty((len(values), size), np.float32)
        ctypes.memmove(rows.ctypes.data, data(result), rows.nbytes)
        return rows
    finally:
        ggml_function("ggml_free", None, P)(context)
