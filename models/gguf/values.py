"""Long values that `edgespec.models.gguf.reader` leaves in a file: lists of strings and numbers."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.models.gguf.access import read_part
from edgespec.models.gguf.reader import Gguf, GgufSpan, GgufValue

_LENGTH = struct.Struct("<Q")
_NUMBERS = {"i32": "i", "u32": "I", "f32": "f"}


def read_strings(path: Path, value: GgufValue | None) -> Iterator[bytes]:
    """The strings of a list one by one; none where there is no such value."""
    if not isinstance(value, GgufSpan) or value.element_type != "string":
        return
    data, place = _bytes(path, value), 0
    for _ in range(value.count):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        yield data[place - length : place]


def read_numbers(path: Path, value: GgufValue | None) -> array[Any]:
    """The 32-bit numbers of a list, long or short; none where there is no such value."""
    if isinstance(value, tuple):
        return array("f" if any(isinstance(number, float) for number in value) else "q", value)
    if not isinstance(value, GgufSpan) or value.element_type not in _NUMBERS:
        return array("i")
    numbers = array(_NUMBERS[value.element_type], _bytes(path, value))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def read_ids(file: Gguf, tensor: str) -> array[int] | None:
    """The 64-bit numbers of a tensor; None where there is no such tensor."""
    found = next((one for one in file.tensors if one.name == tensor), None)
    if found is None:
        return None
    with file.path.open("rb") as opened:
        numbers = array("q", read_part(opened, found.offset, found.data_bytes))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(path: Path, span: GgufSpan) -> bytes:
    with path.open("rb") as file:
        return read_part(file, span.offset, span.data_bytes)
