"""Files that were damaged or made to do harm: each is refused with a sentence."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_gguf import (
    ARRAY,
    F64,
    I8,
    Q8_0,
    SMALL,
    STRING,
    U8,
    U32,
    entry,
    file_error,
    head,
    pack,
    quick,
    read_or_refuse,
    tensor,
    text,
    u32,
    u64,
    with_tensor,
    write,
)

from edgespec.models.gguf.reader import read_gguf


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    read_gguf(path)
    for length in reversed(range(len(SMALL))):
        os.truncate(path, length)
        error = file_error(path)
        assert "again" in error.hint, (length, str(error))


def test_missing_bytes_are_counted(tmp_path: Path) -> None:
    error = file_error(write(tmp_path, SMALL[:-40]))
    assert error.hint == "download it again; 40 bytes are missing"
    assert f"tensors end at byte {len(SMALL)}, and the file has {len(SMALL) - 40}" in str(error)


HOSTILE = {
    "version 1": (head(0, 0, version=1), "GGUF version 1"),
    "version 0": (head(0, 0, version=0), "GGUF version 0"),
    "version 4": (head(0, 0, version=4), "GGUF version 4"),
    "big endian": (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
    "many keys": (head(0, 2**60), "1152921504606846976 metadata keys"),
    "many tensors": (head(2**63, 0), "9223372036854775808 tensors"),
    "keys that are not there": (head(0, 3), "ends inside the name of metadata key 0"),
    "key length": (head(0, 1, u64(2**63)), "9223372036854775808 bytes"),
    "key beyond the end": (head(0, 1, u64(60000)), "ends inside the name of metadata key 0"),
    "empty key": (head(0, 1, entry("", U8, b"\0")), "empty name"),
    "key not UTF-8": (head(0, 1, entry(b"\xff\xfe", U8, b"\0")), "invalid UTF-8"),
    "key with control characters": (head(0, 1, entry("a\x1b[2J", U8, b"\0")), "control characters"),
    "long key": (pack([entry("k" * 60000, 13, b"")]), "k...' the unknown value type 13"),
    "same key twice": (pack([entry("a", U8, b"\0")] * 2), "the key 'a' twice"),
    "value type": (pack([entry("a", 13, b"")]), "unknown value type 13"),
    "string length": (pack([entry("a", STRING, u64(2**63))]), "ends 9223372036854775808 bytes"),
    "string length near 2^64": (pack([entry("a", STRING, u64(2**64 - 1))]), "the value of 'a'"),
    "array of arrays": (pack([entry("a", ARRAY, (u32(ARRAY) + u64(1)) * 2000)]), "arrays"),
    "array type": (pack([entry("a", ARRAY, u32(99) + u64(1))]), "unknown type 99"),
    "array count": (pack([entry("a", ARRAY, u32(F64) + u64(2**61))]), "the array 'a'"),
    "array count overflow": (pack([entry("a", ARRAY, u32(F64) + u64(2**64 - 1))]), "the array 'a'"),
    "string count": (pack([entry("a", ARRAY, u32(STRING) + u64(2**62))]), "4611686018427387904"),
    "strings cut off": (pack([entry("a", ARRAY, u32(STRING) + u64(9))]), "ends inside the array"),
    "string in array": (
        pack([entry("a", ARRAY, u32(STRING) + u64(2) + u64(2**63) + u64(0))]),
        "the array 'a'",
    ),
    "last string in array": (
        pack([entry("a", ARRAY, u32(STRING) + u64(1) + u64(1))]),
        "ends inside the array 'a'",
    ),
    "alignment 0": (pack([entry("general.alignment", U32, u32(0))]), "the alignment 0"),
    "alignment 48": (pack([entry("general.alignment", U32, u32(48))]), "the alignment 48"),
    "alignment negative": (pack([entry("general.alignment", I8, b"\xff")]), "the alignment -1"),
    "alignment text": (pack([entry("general.alignment", STRING, text("8"))]), "alignment '8'"),
    "alignment 2^31": (
        pack([entry("general.alignment", U32, u32(2**31))], [tensor("x", [1], 0, 0)], 64),
        "is cut off",
    ),
    "dimensions": (head(1, 0, text("x") + u32(2**31) + bytes(64)), "2147483648 dimensions"),
    "shape overflow": (with_tensor("x", [2**32, 2**32], 0, 0), "impossible shape"),
    "dimension overflow": (with_tensor("x", [2**63], 0, 0), "impossible shape"),
    "overflow hidden by 0": (with_tensor("x", [2**63, 0], 0, 0), "impossible shape"),
    "larger than the file": (with_tensor("x", [2**62], 0, 0), "is cut off"),
    "tensor type": (with_tensor("x", [32], 77, 0), "unknown type 77"),
    "dropped tensor type": (with_tensor("x", [32], 4, 0), "unknown type 4"),
    "part of a block": (with_tensor("x", [33], Q8_0, 0), "multiple of 32"),
    "offset past the end": (with_tensor("x", [1], 0, 1 << 40), "byte 1099511627776 of the data"),
    "offset misaligned": (with_tensor("x", [1], 0, 8), "byte 8 of the data, not 0"),
    "offset negative": (with_tensor("x", [1], 0, 2**64 - 32), "byte 18446744073709551584"),
    "tensor name": (with_tensor("x" * 64, [1], 0, 0), "64 bytes, more than the 63 allowed"),
    "same tensor twice": (
        pack([], [tensor("x", [8], 0, 0), tensor("x", [8], 0, 32)], 64),
        "two tensors of the same name",
    ),
    "overlapping tensors": (
        pack([], [tensor("x", [8], 0, 0), tensor("y", [8], 0, 0)], 64),
        "byte 0 of the data, not 32",
    ),
    "split count is text": (pack([entry("split.count", STRING, text("3"))]), "not an integer"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_values_are_refused(tmp_path: Path, case: str) -> None:
    data, expected = HOSTILE[case]
    assert expected in str(file_error(write(tmp_path, data)))


@quick
@given(rest=st.binary(max_size=300), version=st.sampled_from([2, 3]), keys=st.integers(0, 3))
def test_random_bytes_after_the_magic(
    tmp_path_factory: pytest.TempPathFactory, rest: bytes, version: int, keys: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    for data in (b"GGUF" + rest, head(1, keys, rest, version), rest):
        path.write_bytes(data)
        read_or_refuse(path)


@quick
@given(seed=st.integers(0, 2**32))
def test_random_damage(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Up to 4 damaged places of a valid file, each a byte or a whole length field."""
    rng = random.Random(seed)
    data = bytearray(SMALL)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[at] = rng.randrange(256)
        else:
            data[at : at + 8] = u64(rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    read_or_refuse(path)
