"""Reads what a GGUF file says about itself: metadata and tensor positions, never weights.

Knows the container (versions 2 and 3, little endian, whole or split), as in
`llama.cpp: ggml/src/gguf.cpp`. Deliberately does not know what the keys mean, except
`general.alignment`, `split.*` and the arrays that make up a tokenizer; `edgespec.models.spec` does.

Model files come from strangers. Every count and length is compared with the bytes that are left
before it is believed, so that whatever the file holds, the outcome is a `Gguf` or one
`ModelFileError`, in time and memory bounded by the file's own size. Vocabularies are stepped over:
the 303,000 strings of a 1.5B Qwen file are walked and hashed, and none becomes a Python object.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from time import time
from typing import Any, TypeAlias

from edgespec.errors import ModelFileError
from edgespec.models.gguf.access import mapped, read_part
from edgespec.models.gguf.ggml_types import GGML_TYPES, GgmlType

# Times of files are as coarse as this (FAT's): one that was written since may be another by now.
_RECENT_S = 2.0
_CONVERT = "convert the original model with llama.cpp's convert_hf_to_gguf.py"
_ANOTHER = "name a GGUF file, or download this one again"
# How the file begins -> what it is, what to do.
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive (perhaps a PyTorch checkpoint)", _CONVERT),
    b"\x80\x02": ("a PyTorch checkpoint", _CONVERT),
    b"\x1f\x8b": ("a gzip archive", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "unpack it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"\xfd7zXZ": ("an xz archive", "unpack it"),
    b"\x89HDF": ("an HDF5 file", _CONVERT),
    b"lmgg": ("a model in the old ggml format", _CONVERT),
    b"fmgg": ("a model in the old ggml format", _CONVERT),
    b"tjgg": ("a model in the old ggml format", _CONVERT),
}


def _described(head: bytes) -> tuple[str, str]:
    """Says what a file is by its first 512 bytes, and what to do about it."""
    lowered = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d{1,20})$", head, re.MULTILINE)
        of = f" of {int(size[1])} bytes" if size else ""
        return (
            f"a git-LFS pointer to a model{of}",
            "run `git lfs pull`, or download the file itself",
        )
    if lowered.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page", "the link led to a login or an error; download the file itself"
    if len(head) < 4 and b"GGUF".startswith(head):
        return f"cut off after {len(head)} bytes", "download it again"
    for magic, answer in _FOREIGN.items():
        if head.startswith(magic):
            return answer
    if head[8:10] == b'{"':
        return "a safetensors file", _CONVERT
    if head[:1] == b"\x08" and head[2:3] in (b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x3a"):
        return "an ONNX model", "use `--backend onnx`"
    if head.isascii() and head.decode("ascii").replace("\n", "").replace("\t", "").isprintable():
        return f"a text file that begins {head[:24].decode('ascii')!r}", _ANOTHER
    return f"a file that begins with the bytes {head[:4].hex(' ')}", _ANOTHER


# Ceilings no real model comes near; they bound what a hostile file can make us allocate.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 24
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 63
MAX_TENSOR_VALUES = (1 << 63) - 1
MAX_DIMS = 4
# What would go beyond these stays in the file; a chat template has some 20 KiB.
MAX_TEXT_BYTES = 1 << 22
MAX_ARRAY_VALUES = 1024
MAX_ARRAY_VALUES_TOGETHER = 1 << 16
MAX_SETTING_BYTES = 1 << 16
# A missing length beyond this is a damaged length, not a short download.
_BELIEVABLE_BYTES = 1 << 40

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
# Value type -> (struct code, name).
_SCALARS = {
    0: ("B", "u8"),
    1: ("b", "i8"),
    2: ("H", "u16"),
    3: ("h", "i16"),
    4: ("I", "u32"),
    5: ("i", "i32"),
    6: ("f", "f32"),
    7: ("?", "bool"),
    10: ("Q", "u64"),
    11: ("q", "i64"),
    12: ("d", "f64"),
}
_TOKENIZER_ARRAYS = (
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
)
_AGAIN = "the file is damaged; download it again"
_OTHER_SOURCE = "the file was converted wrongly; get it from another source"


@dataclass(frozen=True, slots=True)
class GgufSpan:
    """A long value that was left in the file: `count` values in `data_bytes` bytes at `offset`.

    `element_type` is `string`, `u8`, `f32`, ...; a string of several MiB is a span of `u8`.
    Strings are stored as a little-endian u64 length and that many bytes of UTF-8.
    """

    element_type: str
    count: int
    offset: int
    data_bytes: int

    @property
    def text_bytes(self) -> int:
        """Of strings, without their lengths."""
        return self.data_bytes - 8 * self.count


GgufValue: TypeAlias = str | int | float | bool | tuple[int | float | bool, ...] | GgufSpan


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: `offset` counts from the start of its file, `dims` fastest first."""

    name: str
    type: GgmlType
    dims: tuple[int, ...]
    offset: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """The metadata of one file.

    `header_hash` covers every byte before the tensor data. `tokenizer_hash` covers the tokenizer's
    arrays (tokens, types, scores, merges) whatever their order in the file; it is ``""`` without
    tokens. `settings` are the entries that decide what a model computes, as they lie in the file:
    all but texts and the tokenizer.
    """

    path: Path
    file_bytes: int
    alignment: int
    data_offset: int
    metadata: dict[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    header_hash: str
    tokenizer_hash: str
    settings: tuple[bytes, ...] = ()

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns the integer at `key`; raises ModelFileError if it is another type, or absent."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path} has no '{key}'", hint=_OTHER_SOURCE)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(
                f"{self.path} gives '{key}' a value that is not an integer", hint=_OTHER_SOURCE
            )
        return value

    def text(self, key: str, default: str = "") -> str:
        """Returns the string at `key`, or `default` if there is none."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else default


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """Reads one file, without the other parts of a split model.

    Raises ModelNotFoundError if there is no file, and ModelFileError if it is not a whole GGUF file
    that llama.cpp would read. 40 to 80 ms for 152,000 tokens and as many merges (Zen 4, 3), once
    for a file that stays as it is: a plan with a draft model asks 35 times.
    """
    path = Path(path)
    try:
        found = path.stat()
    except (OSError, ValueError):
        return _read(path)
    if time() - max(found.st_mtime, found.st_ctime) < _RECENT_S:
        return _read(path)
    identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return _read_before(path, identity)


@lru_cache(maxsize=16)
def _read_before(path: Path, _identity: tuple[int, ...]) -> Gguf:
    return _read(path)


def _read(path: Path) -> Gguf:
    with mapped(path) as data:
        if bytes(data[:4]) != b"GGUF":
            what, hint = _described(bytes(data[:512]))
            raise ModelFileError(f"{path} is {what}, not a GGUF model", hint=hint)
        return _Reader(path, data).file()


class _Reader:
    """A position in one mapped file; nothing is read without asking `take` for the bytes."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 4
        self.num_strings = 0
        self.text_bytes = 0
        self.num_array_values = 0
        # Key -> where its array lies, element type and count included.
        self.arrays: dict[str, tuple[int, int]] = {}

    def file(self) -> Gguf:
        """Reads everything before the tensor data, and checks that all of the data is there."""
        self._check_version()
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_keys = self._count("metadata keys", MAX_KEYS)
        metadata: dict[str, GgufValue] = {}
        settings: list[bytes] = []
        for number in range(num_keys):
            start = self.pos
            key = self._key(number)
            if key in metadata:
                raise self._bad(f"has the key '{_shown(key)}' twice")
            metadata[key] = value = self._value(key)
            # What may decide what a model computes; of a tokenizer only its numbers do.
            decides = not key.startswith("tokenizer.") or isinstance(value, int | float)
            is_long = self.pos - start > MAX_SETTING_BYTES
            if decides and not key.startswith("split.") and not is_long:
                settings.append(bytes(self.data[start : self.pos]))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            shown = _shown(repr(alignment))
            raise self._bad(f"has the alignment {shown}, which is not a power of two")
        infos = [self._info(number) for number in range(num_tensors)]
        if len({info.name for info in infos}) != num_tensors:
            raise self._bad("has two tensors of the same name")
        header_end, tokenizer_hash = self.pos, ""
        if _TOKENIZER_ARRAYS[0] in self.arrays:
            spans = [self.arrays.get(key, (0, 0)) for key in _TOKENIZER_ARRAYS]
            tokenizer_hash = self._hash(spans)
        data_offset = -(-header_end // alignment) * alignment if infos else header_end
        return Gguf(
            path=self.path,
            file_bytes=self.size,
            alignment=alignment,
            data_offset=data_offset,
            metadata=metadata,
            tensors=self._placed(infos, data_offset, alignment),
            header_hash=self._hash([(0, header_end)]),
            tokenizer_hash=tokenizer_hash,
            settings=tuple(settings),
        )

    def _bad(self, problem: str, hint: str = _AGAIN) -> ModelFileError:
        return ModelFileError(f"{self.path} {problem}", hint=hint)

    def _cut_off(self, what: str, missing: int) -> ModelFileError:
        if missing > _BELIEVABLE_BYTES:
            return self._bad(f"gives {what} a length that ends {missing} bytes after the file")
        return self._bad(
            f"ends inside {what}, after {self.size} bytes",
            f"download it again; at least {missing} bytes are missing",
        )

    def _take(self, num_bytes: int, what: str) -> int:
        """Returns where the next `num_bytes` start, and moves past them."""
        start = self.pos
        self.pos = start + num_bytes
        if self.pos > self.size:
            raise self._cut_off(what, self.pos - self.size)
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self._take(8, what))[0]
        return value

    def _check_version(self) -> None:
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:
            raise self._bad(
                f"is a big-endian GGUF file (version bytes {version:#010x})",
                "get the little-endian file, or convert it with gguf-convert-endian",
            )
        if version not in (2, 3):
            raise self._bad(
                f"is GGUF version {version}, and versions 2 and 3 are read",
                "convert the model again with today's llama.cpp"
                if version < 2
                else "a newer edgespec may read it",
            )

    def _count(self, what: str, limit: int) -> int:
        count = self._u64(f"the number of {what}")
        if count > limit:
            raise self._bad(f"claims to have {count} {what}, more than the {limit} that are read")
        return count

    def _name(self, what: str, limit: int) -> str:
        length = self._u64(what)
        if length > limit:
            raise self._bad(f"gives {what} {length} bytes, more than the {limit} allowed")
        start = self._take(length, what)
        raw = bytes(self.data[start : self.pos])
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise self._bad(f"has invalid UTF-8 in {what}: {raw[:32]!r}") from None
        # Names end up in messages, where control characters could rewrite the terminal.
        if not name.isprintable():
            raise self._bad(f"has control characters in {what}: {raw[:32]!r}")
        return name

    def _key(self, number: int) -> str:
        key = self._name(f"the name of metadata key {number}", MAX_KEY_BYTES)
        if not key:
            raise self._bad(f"has an empty name for metadata key {number}")
        return key

    def _value(self, key: str) -> GgufValue:
        what = f"the value of '{_shown(key)}'"
        kind = self._u32(what)
        if kind == _STRING:
            return self._text(what)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._bad(f"gives '{_shown(key)}' the unknown value type {kind}")
        layout = "<" + _SCALARS[kind][0]
        start = self._take(struct.calcsize(layout), what)
        value: int | float | bool = struct.unpack_from(layout, self.data, start)[0]
        return value

    def _text(self, what: str) -> str | GgufSpan:
        length = self._u64(what)
        start = self._take(length, what)
        if self.text_bytes + length > MAX_TEXT_BYTES:
            return GgufSpan("u8", length, start, length)
        self.text_bytes += length
        return bytes(self.data[start : self.pos]).decode(errors="replace")

    def _array(self, key: str) -> GgufValue:
        what = f"the array '{_shown(key)}'"
        head = self.pos
        kind, count = self._u32(what), self._u64(what)
        start = self.pos
        if kind == _STRING:
            self._skip_strings(count, what)
        elif kind in _SCALARS:
            self._take(count * struct.calcsize("<" + _SCALARS[kind][0]), what)
        else:
            problem = "arrays, which are not allowed" if kind == _ARRAY else f"unknown type {kind}"
            raise self._bad(f"has in {what} values of {problem}")
        self.arrays[key] = (head, self.pos)
        if kind == _STRING:
            return GgufSpan("string", count, start, self.pos - start)
        code, name = _SCALARS[kind]
        if count > min(MAX_ARRAY_VALUES, MAX_ARRAY_VALUES_TOGETHER - self.num_array_values):
            return GgufSpan(name, count, start, self.pos - start)
        self.num_array_values += count
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def _skip_strings(self, count: int, what: str) -> None:
        self.num_strings += count
        if self.num_strings > MAX_STRINGS:
            raise self._bad(f"claims {count} strings in {what}, and {MAX_STRINGS} are read")
        if count * 8 > self.size - self.pos:
            raise self._cut_off(what, count * 8 - (self.size - self.pos))
        # The one hot loop: 300,000 rounds of 60 ns on a Qwen file, so nothing else happens in it.
        data, pos, length_at = self.data, self.pos, _U64.unpack_from
        try:
            for _ in repeat(None, count):
                (length,) = length_at(data, pos)
                pos += length + 8
        except (struct.error, OverflowError):
            pos = max(pos, self.size) + 8
        self.pos = pos
        self._take(0, what)

    def _info(self, number: int) -> GgufTensor:
        """Reads a tensor's entry, whose `offset` counts from the start of the data."""
        name = self._name(f"the name of tensor {number}", MAX_TENSOR_NAME_BYTES)
        what = f"the entry of tensor '{name}'"
        num_dims = self._u32(what)
        if num_dims > MAX_DIMS:
            raise self._bad(f"gives tensor '{name}' {num_dims} dimensions, and {MAX_DIMS} are read")
        dims = tuple(self._u64(what) for _ in range(num_dims))
        type_id = self._u32(what)
        offset = self._u64(what)
        if type_id not in GGML_TYPES:
            raise self._bad(
                f"has tensor '{name}' in the unknown type {type_id}",
                "the type was dropped from llama.cpp or is newer than this edgespec; "
                "get the model in another file type",
            )
        kind = GGML_TYPES[type_id]
        return GgufTensor(name, kind, dims, offset, self._sized(name, kind, dims))

    def _sized(self, name: str, kind: GgmlType, dims: tuple[int, ...]) -> int:
        """Returns the bytes of a tensor; its rows are whole blocks."""
        num_values, row = 1, dims[0] if dims else 1
        for dim in dims:
            num_values *= dim
        if max(num_values, *dims, 0) > MAX_TENSOR_VALUES:
            raise self._bad(f"gives tensor '{name}' the impossible shape {list(dims)}")
        if row % kind.block_size:
            raise self._bad(
                f"has tensor '{name}' of type {kind.name} with rows of {row} values, not a "
                f"multiple of {kind.block_size}"
            )
        return num_values // kind.block_size * kind.block_bytes

    def _placed(self, infos: list[GgufTensor], base: int, align: int) -> tuple[GgufTensor, ...]:
        """Checks that tensors follow each other without gap, as llama.cpp demands, to the end."""
        tensors = []
        expected = end = 0
        for info in infos:
            if info.offset != expected:
                raise self._bad(
                    f"has tensor '{info.name}' at byte {info.offset} of the data, not {expected}"
                )
            end = info.offset + info.data_bytes
            expected = -(-end // align) * align
            tensors.append(replace(info, offset=base + info.offset))
        missing = base + end - self.size
        if infos and missing > 0:
            raise ModelFileError(
                f"{self.path} is cut off: its tensors end at byte {base + end}, and the file has "
                f"{self.size}",
                hint=f"download it again; {missing} bytes are missing",
            )
        return tuple(tensors)

    def _hash(self, spans: list[tuple[int, int]]) -> str:
        """Hashes pieces of the file with their lengths, so that no two lists of pieces collide."""
        digest = blake2b(digest_size=16)
        for start, end in spans:
            digest.update(_U64.pack(end - start))
            with self.data[start:end] as piece:
                digest.update(piece)
        return digest.hexdigest()


def _shown(key: str) -> str:
    return key if len(key) <= 80 else f"{key[:80]}..."


_NUMBERS = {"i32": "i", "u32": "I", "f32": "f"}


def read_strings(path: Path, value: GgufValue | None) -> Iterator[bytes]:
    """The strings of a list one by one; none where there is no such value."""
    if not isinstance(value, GgufSpan) or value.element_type != "string":
        return
    data, place = _bytes(path, value), 0
    for _ in range(value.count):
        (length,) = _U64.unpack_from(data, place)
        place += _U64.size + length
        yield data[place - length : place]


def read_numbers(path: Path, value: GgufValue | None) -> array[Any]:
    """The 32-bit numbers of a list, long or short; none where there is no such value."""
    if isinstance(value, tuple):
        return array("f" if any(isinstance(number, float) for number in value) else "q", value)
    if not isinstance(value, GgufSpan) or value.element_type not in _NUMBERS:
        return array("i")
    return _numbers(_NUMBERS[value.element_type], _bytes(path, value))


def read_ids(file: Gguf, tensor: str) -> array[int] | None:
    """The 64-bit numbers of a tensor; None where there is no such tensor."""
    found = next((one for one in file.tensors if one.name == tensor), None)
    if found is None:
        return None
    with file.path.open("rb") as opened:
        return _numbers("q", read_part(opened, found.offset, found.data_bytes))


def _numbers(code: str, data: bytes) -> array[Any]:
    numbers: array[Any] = array(code, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(path: Path, span: GgufSpan) -> bytes:
    with path.open("rb") as file:
        return read_part(file, span.offset, span.data_bytes)
