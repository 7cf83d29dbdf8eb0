"""Weights of a GGUF tensor in the layout of ONNX Runtime's MatMulNBits, without torch.

Q4_0 and Q8_0 blocks are symmetric blocks of 32 with one scale, exactly what MatMulNBits computes
with: nothing is lost. Every other type is dequantized and quantized again to 8 bits a weight, in
blocks of 32 with the largest value at 127, which is finer than any 4- to 6-bit source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import imported
from edgespec.models.gguf.access import whole
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.onnx.facts import BLOCK

_CHUNK_VALUES = 1 << 24  # converted at once, so that a large head does not need its size in memory


@dataclass(frozen=True, slots=True)
class Packed:
    """Some rows of a matrix as MatMulNBits wants them: `bits` each, zero point in the middle."""

    blocks: NDArray[np.uint8]  # [rows, columns / 32, 16 or 32]
    scales: NDArray[np.float32]  # [rows, columns / 32]


def packed_rows(
    path: Path, tensor: GgufTensor, order: NDArray[np.int64] | None = None
) -> Iterator[Packed]:
    """The whole matrix, some thousand rows at a time, in the order given."""
    for rows in _chunks(path, tensor, order):
        yield _pack(tensor, rows)


def float_rows(
    path: Path, tensor: GgufTensor, order: NDArray[np.int64] | None = None
) -> Iterator[NDArray[np.float32]]:
    """The whole matrix in float32, some thousand rows at a time, in the order given."""
    for rows in _chunks(path, tensor, order):
        yield dequantize(tensor, rows)


def _chunks(
    path: Path, tensor: GgufTensor, order: NDArray[np.int64] | None
) -> Iterator[NDArray[np.uint8]]:
    raw = raw_rows(path, tensor)
    step = max(1, _CHUNK_VALUES // tensor.dims[0])
    for start in range(0, len(raw), step):
        part = slice(start, start + step)
        yield raw[part] if order is None else raw[order[part]]


def raw_rows(path: Path, tensor: GgufTensor) -> NDArray[np.uint8]:
    """The tensor's bytes by row, [rows, bytes]: mapped, so only what is used is read.

    Raises ModelFileError where the file has become shorter since its header was read. One that does
    so while it is mapped ends the process, as it does in llama.cpp.
    """
    rows = int(np.prod(tensor.dims[1:], dtype=np.int64))
    with whole(path):
        data = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.data_bytes,))
    return data.reshape(rows, tensor.data_bytes // rows)


def dequantize(tensor: GgufTensor, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Float32 values of some rows of `raw_rows`, [rows, columns]."""
    quants = imported("gguf.quants", "reading weights needs the gguf package", "pip install gguf")
    kind = getattr(quants.GGMLQuantizationType, tensor.type.name)
    values: NDArray[np.float32] = quants.dequantize(np.ascontiguousarray(rows), kind)
    return values.astype(np.float32, copy=False)


def _pack(tensor: GgufTensor, rows: NDArray[np.uint8]) -> Packed:
    count, blocks = len(rows), tensor.dims[0] // BLOCK
    if tensor.type.name == "Q4_0":
        # Byte j holds weights j and j + 16 in a GGUF, and 2j and 2j + 1 in MatMulNBits.
        data = rows.reshape(count, blocks, 18)
        low, high = data[..., 2:] & 0x0F, data[..., 2:] >> 4
        halves = [part[..., 0::2] | (part[..., 1::2] << 4) for part in (low, high)]
        return Packed(np.concatenate(halves, axis=-1), _scales(data))
    if tensor.type.name == "Q8_0":
        data = rows.reshape(count, blocks, 34)
        flipped = np.bitwise_xor(data[..., 2:], np.uint8(0x80))  # int8 + 128: the sign bit
        return Packed(flipped.astype(np.uint8, copy=False), _scales(data))
    values = dequantize(tensor, rows).reshape(count, blocks, BLOCK)
    scales = np.abs(values).max(axis=-1) / 127.0
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    numbers = np.rint(values * inverse[..., None]) + 128.0
    return Packed(numbers.astype(np.uint8), scales.astype(np.float32))


def _scales(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    halves = np.ascontiguousarray(data[..., :2]).view(np.float16)
    return halves[..., 0].astype(np.float32)
