"""Packed weights on disk: whole or not there, checked before they are used, within a bound."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from edgespec.memory.store import cache, packed
from edgespec.memory.store.packed import PackedFile

DATA = random.Random(7).randbytes(100_000)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(packed, "_BLOCK_BYTES", 1000)
    return tmp_path / "packed"


def write(file: PackedFile, data: bytes = DATA) -> None:
    new = file.begin("a.gguf", len(data))
    os.pwrite(new.handle, data, 0)
    new.finish("order")
    new.join()
    if new.problem is not None:
        raise new.problem


def read(file: PackedFile) -> bytes | None:
    with file.opened() as found:
        if found is None:
            return None
        assert found[1] == "order"
        return os.pread(found[0], 1 << 30, 0)


def test_what_was_written_is_read_and_belongs_to_its_key(_folder: Path) -> None:
    assert read(PackedFile("key")) is None
    write(PackedFile("key"))
    assert read(PackedFile("key")) == DATA
    assert read(PackedFile("key of another version")) is None
    assert {path.stat().st_mode & 0o777 for path in _folder.glob("*.*")} == {0o600}


@pytest.mark.parametrize("place", [0, 54_321, len(DATA) - 1])
def test_a_file_that_was_changed_is_not_used(place: int) -> None:
    """Its size and time of change are as they were."""
    file = PackedFile("key")
    write(file)
    told = file.path.stat()
    with file.path.open("r+b") as handle:
        handle.seek(place)
        handle.write(bytes([DATA[place] ^ 1]))
    os.utime(file.path, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert read(file) is None
    write(file)
    assert read(file) == DATA


@pytest.mark.parametrize("size", [0, 1, len(DATA) - 1, len(DATA) + 1])
def test_a_file_of_another_size_is_not_used(size: int) -> None:
    file = PackedFile("key")
    write(file)
    os.truncate(file.path, size)
    assert read(file) is None


def test_a_copy_is_read_once_to_be_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    file = PackedFile("key")
    write(file)
    file.path.unlink()
    file.path.write_bytes(DATA)
    assert read(file) == DATA
    monkeypatch.setattr(zlib, "crc32", None)  # not again
    assert read(file) == DATA


@pytest.mark.parametrize("document", ["", "[]", "{", '{"key": "key", "size": "x"}'])
def test_a_damaged_document_is_as_none(document: str) -> None:
    file = PackedFile("key")
    write(file)
    cache.path_of("packed", "key").write_text(document)
    assert read(file) is None
    write(file)
    assert read(file) == DATA


_KILLED = """
import os, sys
from edgespec.memory.store import cache, packed
def end(*_):
    os._exit(9)
new = packed.PackedFile("key").begin("a.gguf", 100_000)
os.pwrite(new.handle, bytes(100_000), 0)
exec(sys.argv[1])
new.finish("order")
new.join()
"""


@pytest.mark.parametrize(
    "moment",
    ["end()", "os.fsync = end", "os.replace = end", "packed._checksum = end", "cache.store = end"],
)
def test_a_writer_that_was_killed_leaves_nothing_that_is_used(_folder: Path, moment: str) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, moment], timeout=60).returncode == 9
    assert read(PackedFile("key")) is None
    write(PackedFile("key"))
    assert read(PackedFile("key")) == DATA
    assert not list(_folder.glob(".*.partial"))


def test_what_is_kept_is_listed_and_removed(_folder: Path) -> None:
    write(PackedFile("first"))
    write(PackedFile("second"))
    os.utime(cache.path_of("packed", "first"), (1, 1))
    (_folder / "0000000000000000.weights").write_bytes(b"left")
    assert packed.kept() == [*2 * [("a.gguf", len(DATA))], ("(unfinished)", 4)]
    packed.remove_all()
    assert packed.kept() == [] and read(PackedFile("first")) is None


def test_what_was_abandoned_is_gone(_folder: Path) -> None:
    new = PackedFile("key").begin("a.gguf", 9)
    os.pwrite(new.handle, b"unfinished", 0)
    new.abandon()
    assert read(PackedFile("key")) is None
    assert [path.suffix for path in _folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_full_disk_leaves_what_there_was(
    _folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(PackedFile("other"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full, raising=False)
        with pytest.raises(OSError, match="No space"):
            write(PackedFile("key"))
    assert read(PackedFile("key")) is None and read(PackedFile("other")) == DATA
    assert len([one for one in _folder.iterdir() if one.suffix != ".lock"]) == 2  # and its document


def test_a_document_that_cannot_be_written_costs_the_next_start_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(cache, "store", lambda *_: OSError(28, "No space left on device"))
        write(PackedFile("key"))  # and nobody who computes with it is told to stop
    assert read(PackedFile("key")) is None


def test_a_folder_that_cannot_be_made_is_an_error_and_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file"))
    assert read(PackedFile("key")) is None
    with pytest.raises(OSError):
        write(PackedFile("key"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not packed.is_worth_keeping("a.gguf", packed.LEAST_BYTES)


def test_of_two_writers_of_a_file_one_writes() -> None:
    new = PackedFile("key").begin("a.gguf", len(DATA))
    with pytest.raises(BlockingIOError):
        PackedFile("key").begin("a.gguf", 9)
    write(PackedFile("of its draft model"))
    os.pwrite(new.handle, DATA, 0)
    new.finish("order")
    new.join()
    assert read(PackedFile("key")) == read(PackedFile("of its draft model")) == DATA


def test_what_was_used_last_stays_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_room", lambda _share: 250_000)
    for time, key in enumerate(("first", "second")):
        write(PackedFile(key))
        os.utime(cache.path_of("packed", key), (time, time))
    read(PackedFile("first"))
    write(PackedFile("third"))
    assert [read(PackedFile(key)) is not None for key in ("first", "second", "third")] == [
        *(True, False, True)
    ]
    with pytest.raises(OSError, match="No space"):
        write(PackedFile("large"), bytes(250_001))
    assert read(PackedFile("third")) == DATA


def test_one_that_was_needed_stays_beside_what_is_kept_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft model's file would take a mixture's, which takes a minute to write."""
    monkeypatch.setattr(packed, "_room", lambda share: int(share * 1_000_000))
    new = PackedFile("needed").begin("model.gguf", 300_000, needed=True)
    os.write(new.handle, bytes(300_000))
    new.finish("order")
    new.join()
    for key in ("first", "second", "third"):
        write(PackedFile(key))
    assert [read(PackedFile(key)) is not None for key in ("needed", "first", "third")] == [
        *(True, False, True)
    ]
    new = PackedFile("another").begin("model.gguf", 700_000, needed=True)
    assert read(PackedFile("needed")) is None
    new.abandon()


def test_little_is_kept_unasked_and_a_quarter_of_the_disk_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 8 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("", (), {"free": free}))
    sizes = [mib << 20 for mib in (255, 256, 2048, 2049)]
    kept = [packed.is_worth_keeping("a.gguf", size) for size in sizes]
    assert kept == [False, True, True, False]
    write(PackedFile("key"))  # needed once, and mapped from then on
    kept = [packed.is_worth_keeping("a.gguf", size) for size in sizes]
    assert kept == [False, True, True, True]
