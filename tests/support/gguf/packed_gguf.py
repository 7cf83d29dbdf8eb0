"""GGUF files byte by byte, for tests of what reads them."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from edgespec.errors import ModelFileError
from edgespec.models.gguf.shards import read_gguf_shards

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
Q8_0 = 8
Entry = tuple[str, int, bytes]
Tensor = tuple[str, Sequence[int], int, int]

quick = settings(max_examples=100)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def strings(values: Sequence[str]) -> bytes:
    return u32(STRING) + u64(len(values)) + b"".join(text(value) for value in values)


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def pack(entries: Sequence[bytes], tensors: Sequence[bytes] = (), data_bytes: int = 0) -> bytes:
    """A version-3 file; the data is as many zeros, after padding to 32 bytes."""
    head = b"GGUF" + u32(3) + u64(len(tensors)) + u64(len(entries))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data_bytes) if tensors else head


SMALL = pack(
    [
        entry("general.architecture", STRING, text("llama")),
        entry("a.u8", U8, b"\xff"),
        entry("a.i8", I8, b"\xff"),
        entry("a.u16", U16, b"\xff\xff"),
        entry("a.i16", I16, b"\xfe\xff"),
        entry("a.u32", U32, u32(7)),
        entry("a.i32", I32, struct.pack("<i", -7)),
        entry("a.f32", F32, struct.pack("<f", 0.5)),
        entry("a.bool", BOOL, b"\x01"),
        entry("a.u64", U64, u64(2**64 - 1)),
        entry("a.i64", I64, struct.pack("<q", -(2**63))),
        entry("a.f64", F64, struct.pack("<d", 0.1)),
        entry("a.heads", ARRAY, u32(I32) + u64(3) + struct.pack("<3i", 4, 0, -1)),
        entry("a.empty", ARRAY, u32(U8) + u64(0)),
        entry("tokenizer.ggml.tokens", ARRAY, strings(["<s>", "a", "é", ""])),
    ],
    [tensor("one", [4], 0, 0), tensor("two.weight", [32, 3], Q8_0, 32)],
    32 + 3 * 34,
)


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def file_error(path: Path) -> ModelFileError:
    """Reads a file that must be refused; the message is one line that names the file."""
    with pytest.raises(ModelFileError) as caught:
        read_gguf_shards(path)
    message = str(caught.value)
    assert path.name in message and "\n" not in message and len(message) < 600, message
    assert caught.value.hint, message
    return caught.value


def head(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(num_tensors) + u64(num_keys) + rest


def with_tensor(*args: object) -> bytes:
    return pack([], [tensor(*args)], 64)  # type: ignore[arg-type]


def read_or_refuse(path: Path) -> None:
    """Reads or refuses, within 1 MiB and 1 s for a file of under 2 KiB."""
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        read_gguf_shards(path)
    except ModelFileError as error:
        assert error.hint, str(error)
    finally:
        taken, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20, f"peak {peak} bytes"
    assert taken < 1, f"{taken:.3f} s"
