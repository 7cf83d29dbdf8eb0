"""Models in several files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from packed_gguf import I32, U16, entry, file_error, pack, tensor, write

from edgespec.errors import ModelFileError
from edgespec.models.gguf.shards import read_gguf_shards

SPLIT = [entry("split.no", U16, b"\0\0"), entry("split.count", U16, b"\3\0")]


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
    paths[0].unlink()
    with pytest.raises(ModelFileError) as caught:
        read_gguf_shards(paths[2])
    assert str(caught.value) == (
        "my-model-00001-of-00003.gguf, my-model-00002-of-00003.gguf are missing: "
        "2 of the 3 parts of this model"
    )


@pytest.mark.parametrize("name", ["model.gguf", "my-model-00001-of-00003.gguf"])
@pytest.mark.parametrize("first", [shard(0), pack(SPLIT, [])])
def test_parts_joined_by_cat_are_told(tmp_path: Path, name: str, first: bytes) -> None:
    error = file_error(write(tmp_path, first + shard(1) + shard(2), name))
    assert "is part 1 of a model in 3 files, with " in str(error)
    assert "cannot be joined with cat" in str(error)
    assert "llama-gguf-split --merge" in error.hint


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
    error = file_error(path)
    assert "-NNNNN-of-00003.gguf" in str(error) and "original names" in error.hint


def test_fewer_tensors_than_announced(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[0].write_bytes(shard(0, total=9))
    with pytest.raises(ModelFileError, match="and 9 were announced"):
        read_gguf_shards(paths[2])
