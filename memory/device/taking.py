"""Which weights a device takes, asked as llama.cpp asks before it places one.

A weight that a device cannot multiply by stays with the processor, without a word: one that is too
large for its buffers, whose product with a batch is, or of a type that it has no kernel for
(`llama.cpp: src/llama-model-loader.cpp`, `weight_buft_supported`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from edgespec.memory.device.llama_binary import ggml_function

_P = ctypes.c_void_p
_TOKENS = 512  # of the batch that llama.cpp asks about
_F32, _I32 = 0, 26  # values of ggml_type
_TENSORS = 8  # that there is room for
_BUFFER_AT = 8  # bytes from the beginning of struct ggml_tensor


class Weight(NamedTuple):
    """A matrix: its type by ggml's number, `dims` fastest first, experts that a token uses."""

    kind: int
    dims: tuple[int, ...]
    experts: int = 0


Takes = Callable[[Weight], bool]


def takes_all(_weight: Weight) -> bool:
    """The answer of a device that is not asked."""
    return True


class _InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


@functools.cache
def takes(device: str, weight: Weight) -> bool:
    """Whether llama.cpp gives a weight to a device, by its name; nothing is allocated.

    A device that is not registered takes all.
    """
    handle = ggml_function("ggml_backend_dev_by_name", _P, ctypes.c_char_p)(device.encode())
    if not handle:
        return True
    supports = ggml_function("ggml_backend_dev_supports_op", ctypes.c_bool, _P, _P)
    with _context() as context:
        matrix = _tensor(context, weight.kind, *weight.dims)
        product = _product(context, matrix, weight)
        with _empty_buffer(handle) as buffer:
            _P.from_address(matrix + _BUFFER_AT).value = buffer
            return bool(supports(handle, product))


def _product(context: int, matrix: int, weight: Weight) -> int:
    """The operation that multiplies a batch by the weight."""
    columns, _rows, *others = weight.dims
    if not weight.experts:
        batch = _tensor(context, _F32, columns, _TOKENS, *others)
        return int(ggml_function("ggml_mul_mat", _P, _P, _P, _P)(context, matrix, batch))
    batch = _tensor(context, _F32, columns, weight.experts, _TOKENS)
    chosen = _tensor(context, _I32, weight.experts, _TOKENS)
    multiply = ggml_function("ggml_mul_mat_id", _P, _P, _P, _P, _P)
    return int(multiply(context, matrix, batch, chosen))


def _tensor(context: int, kind: int, *dims: int) -> int:
    sizes = (ctypes.c_int64 * len(dims))(*dims)
    make = ggml_function("ggml_new_tensor", _P, _P, ctypes.c_int, ctypes.c_int, _P)
    return int(make(context, kind, len(dims), sizes))


@contextmanager
def _context() -> Iterator[int]:
    """Room for descriptions of tensors."""
    room = _TENSORS * ggml_function("ggml_tensor_overhead", ctypes.c_size_t)()
    context = ggml_function("ggml_init", _P, _InitParams)(_InitParams(room, None, True))
    try:
        yield context
    finally:
        ggml_function("ggml_free", None, _P)(context)


@contextmanager
def _empty_buffer(device: int) -> Iterator[int]:
    """A buffer of no bytes, by which a device sees whose memory a weight would lie in."""
    kind = ggml_function("ggml_backend_dev_buffer_type", _P, _P)(device)
    allocate = ggml_function("ggml_backend_buft_alloc_buffer", _P, _P, ctypes.c_size_t)
    buffer = allocate(kind, 0)
    try:
        yield buffer
    finally:
        ggml_function("ggml_backend_buffer_free", None, _P)(buffer)
