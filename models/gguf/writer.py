"""Writes GGUF files: importance matrices, drafters, parts of a split model, skeletons."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import Gguf, GgufTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIGNMENT = 32
_VERSION = 3
_NO_TOKENIZER = "none"  # llama.cpp's word for a model without one
_ALIGNMENT_KEY = b"general.alignment"
_U16, _U32, _I32, _FLOAT, _BOOL, _STRING, _ARRAY = 2, 4, 5, 6, 7, 8, 9
_F32 = 0

Value: TypeAlias = (
    "str | bool | int | float | Sequence[str | bytes] | NDArray[np.int32 | np.float32]"
)
# Name, dims fastest first, type, and bytes of its data.
Raw: TypeAlias = tuple[str, Sequence[int], int, bytes | memoryview]


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write f32 tensors."""
    raw = [(n, t.shape[::-1], _F32, t.tobytes()) for n, t in tensors.items()]
    write_raw(path, *key_bytes(metadata), raw)


def key_bytes(metadata: Mapping[str, Value]) -> tuple[int, bytes]:
    """How many keys, and their bytes: integers are u32, floats f32, arrays of their type."""
    entries = [_string(key) + _value(value) for key, value in metadata.items()]
    return len(entries), b"".join(entries)


def write_raw(path: Path, num_keys: int, keys: bytes, tensors: Sequence[Raw]) -> None:
    """Write a file from the bytes of its keys and tensors."""
    entries, offset = b"", 0
    for name, dims, kind, data in tensors:
        entries += tensor_entry(name, dims, kind, offset)
        offset += aligned(len(data))
    head = _counts(len(tensors), num_keys) + keys + entries
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for _, _, _, data in tensors:
            file.write(data)
            file.write(bytes(-len(data) % ALIGNMENT))


def skeleton_header(
    arch: str, settings: Sequence[bytes], vocab_size: int, tensors: Iterable[GgufTensor]
) -> tuple[bytes, int]:
    """The header of a model without its tokenizer, and bytes of the whole file that it announces.

    llama.cpp loads a file of this header and a hole in milliseconds, without allocating, and says
    what the whole file would take.

    Args:
        settings: as of `Gguf.settings`; tensors of all parts of a split file are laid out in one.
        vocab_size: of the tokenizer that is left out.
    """
    kept = [one for one in settings if _key_of(one) != _ALIGNMENT_KEY]
    kept.append(text("tokenizer.ggml.model", _NO_TOKENIZER))
    if not any(_key_of(one).endswith(b".vocab_size") for one in kept):
        kept.append(_string(f"{arch}.vocab_size") + _value(vocab_size))
    entries, offset = [], 0
    for one in tensors:
        entries.append(tensor_entry(one.name, one.dims, GGML_NUMBERS[one.type.name], offset))
        offset += aligned(one.data_bytes)
    header = b"".join((_counts(len(entries), len(kept)), *kept, *entries))
    return header, aligned(len(header)) + offset


def keys_of(document: Gguf, start: bytes) -> tuple[int, bytes]:
    """How many keys a file has, and their bytes; `start` are its first `data_offset` bytes."""
    first = document.tensors[0]
    end = start.rindex(tensor_entry(first.name, first.dims, GGML_NUMBERS[first.type.name], 0))
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


def aligned(size: int) -> int:
    """Bytes that so many take in a file."""
    return size + -size % ALIGNMENT


def _counts(num_tensors: int, num_keys: int) -> bytes:
    """What a file begins with."""
    return b"GGUF" + struct.pack("<IQQ", _VERSION, num_tensors, num_keys)


def _key_of(entry: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", entry)
    return entry[8 : 8 + length]


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT, value)
    if isinstance(value, Sequence):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    kind = _FLOAT if value.dtype.kind == "f" else _I32
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
