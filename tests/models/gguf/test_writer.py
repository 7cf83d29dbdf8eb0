"""Small GGUF files, as other programs read them, and copied key by key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from edgespec.models.gguf.reader import read_gguf
from edgespec.models.gguf.writer import Value, keys_of, write_gguf, write_raw

KEYS: dict[str, Value] = {
    "general.architecture": "tést",
    "test.count": 7,
    "test.flag": True,
    "test.share": 0.25,
    "test.names": ["", "a", "lönger"],
}
ARRAYS: dict[str, Value] = {
    "test.bytes": [b"plain", "ö".encode()],
    "test.ids": np.array([3, -1], np.int32),
    "test.scores": np.array([0.5, -2.0], np.float32),
}
ONE = np.arange(6, dtype=np.float32).reshape(2, 3)  # 24 bytes: the next one is moved
TWO = np.arange(5, dtype=np.float32)


def test_another_program_reads_what_was_written(tmp_path: Path) -> None:
    write_gguf(path := tmp_path / "small.gguf", {**KEYS, **ARRAYS}, {"one": ONE, "two": TWO})
    reader = GGUFReader(path)
    contents = {name: reader.fields[name].contents() for name in (*KEYS, *ARRAYS)}
    assert {name: contents[name] for name in KEYS} == KEYS
    assert contents["test.bytes"] == ["plain", "ö"]
    assert (contents["test.ids"], contents["test.scores"]) == ([3, -1], [0.5, -2.0])
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    np.testing.assert_array_equal(found["one"], ONE)
    np.testing.assert_array_equal(found["two"], TWO)


def test_a_file_can_be_written_again_from_its_parts(tmp_path: Path) -> None:
    """As the first part of a model is, whose keys nobody reads one by one."""
    write_gguf(path := tmp_path / "small.gguf", KEYS, {"one": ONE, "two": TWO})
    data, document = path.read_bytes(), read_gguf(path)
    count, keys = keys_of(document, data[: document.data_offset])
    assert count == len(KEYS)
    raw = [
        (tensor.name, tensor.dims, 0, data[tensor.offset : tensor.offset + tensor.data_bytes])
        for tensor in document.tensors
    ]
    write_raw(again := tmp_path / "again.gguf", count, keys, raw)
    assert again.read_bytes() == data
