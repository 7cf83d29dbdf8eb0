"""Writes small GGUF files: importance matrices, and single tensors as parts of a split model."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.gguf.reader import Gguf

ALIGNMENT = 32
_U16, _U32, _I32, _STRING, _ARRAY = 2, 4, 5, 8, 9
_F32 = 0

Value: TypeAlias = str | int | Sequence[str]
Raw: TypeAlias = tuple[str, Sequence[int], int, bytes]  # name, dims fastest first, type, data


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write strings, lists of strings, u32 and f32 tensors."""
    keys = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    raw = [(n, t.shape[::-1], _F32, t.tobytes()) for n, t in tensors.items()]
    write_raw(path, len(metadata), keys, raw)


def write_raw(path: Path, num_keys: int, keys: bytes, tensors: Sequence[Raw]) -> None:
    """Write a file from the bytes of its keys and tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), num_keys) + keys
    offset = 0
    for name, dims, kind, data in tensors:
        head += tensor_entry(name, dims, kind, offset)
        offset += len(data) + -len(data) % ALIGNMENT
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for _, _, _, data in tensors:
            file.write(data)
            file.write(bytes(-len(data) % ALIGNMENT))


def keys_of(document: Gguf, start: bytes) -> tuple[int, bytes]:
    """How many keys a file has, and their bytes; `start` are its first `data_offset` bytes."""
    first = document.tensors[0]
    kind = next(number for number, kind in GGML_TYPES.items() if kind == first.type)
    end = start.rindex(tensor_entry(first.name, first.dims, kind, 0))
    return struct.unpack_from("<Q", start, 16)[0], start[24:end]


def u16(key: str, value: int) -> bytes:
    """A key with a u16, as split models have."""
    return _string(key) + struct.pack("<IH", _U16, value)


def i32(key: str, value: int) -> bytes:
    """A key with an i32, as split models have."""
    return _string(key) + struct.pack("<Ii", _I32, value)


def text(key: str, value: str) -> bytes:
    """A key with a text."""
    return _string(key) + _value(value)


def tensor_entry(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """What the header says about a tensor; `offset` counts from the first one's data."""
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
    return head + b"".join(map(_string, value))
