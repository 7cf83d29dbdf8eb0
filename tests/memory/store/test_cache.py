"""What is kept between runs: never needed, never trusted, never half written."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from edgespec.memory.store import cache


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_documents_are_kept_by_kind_and_key(cache_folder: Path) -> None:
    cache.store("curves", "this device", {"base_ms": [None, 4.5]})
    cache.store("curves", "that device", {"base_ms": [None, 9.0]})
    cache.store("noise", "this device", {"noise": 0.25})
    assert cache.load("curves", "this device") == {"base_ms": [None, 4.5], "key": "this device"}
    assert cache.load("curves", "that device") == {"base_ms": [None, 9.0], "key": "that device"}
    assert cache.load("noise", "this device") == {"noise": 0.25, "key": "this device"}
    assert cache.load("noise", "that device") is None
    assert len(files_in(cache_folder)) == 3


def test_storing_again_replaces(cache_folder: Path) -> None:
    cache.store("curves", "key", {"a": 1, "b": 2})
    cache.store("curves", "key", {"a": 3})
    assert cache.load("curves", "key") == {"a": 3, "key": "key"}
    assert len(files_in(cache_folder)) == 1


def test_a_document_cannot_claim_another_key() -> None:
    cache.store("curves", "key", {"key": "another"})
    assert cache.load("curves", "key") == {"key": "key"}


def test_removed_documents_are_gone_and_may_be_removed_again() -> None:
    cache.store("curves", "key", {"a": 1})
    cache.store("curves", "other", {"a": 2})
    cache.remove("curves", "key")
    cache.remove("curves", "key")
    assert cache.load("curves", "key") is None
    assert cache.load("curves", "other") is not None


@pytest.mark.parametrize("key", ["../../escape", "a/b\\c:d*?", "", "ü€\n" * 200, "x" * 5000])
def test_any_text_is_a_key_and_stays_in_its_folder(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    cache.store("curves", key, {"a": 1})
    assert cache.load("curves", key) == {"a": 1, "key": key}
    assert [path.parent for path in files_in(tmp_path)] == [folder / "curves"]


def test_the_directory_is_the_one_of_the_environment_or_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "mine"))
    assert cache.cache_directory() == tmp_path / "mine"
    users_own = Path(platformdirs.user_cache_dir("edgespec", appauthor=False))
    monkeypatch.setenv("EDGESPEC_CACHE", "")
    assert cache.cache_directory() == users_own
    monkeypatch.delenv("EDGESPEC_CACHE")
    assert cache.cache_directory() == users_own


# ------------------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"a": 1, "key": "key"',
        b"null",
        b"[]",
        b'"key"',
        b"12",
        b'{"a": 1}',
        b'{"a": 1, "key": "another"}',
        b'{"a": 1, "key": ["key"]}',
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b'{"a": ' + b"9" * 5000 + b', "key": "key"}',
        b'{"key": "key", "a": ' + b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:24]),
)
def test_a_damaged_file_is_no_document_and_can_be_replaced(
    content: bytes, cache_folder: Path
) -> None:
    cache.store("curves", "key", {"a": 1})
    (file,) = files_in(cache_folder)
    file.write_bytes(content)
    assert cache.load("curves", "key") is None
    cache.store("curves", "key", {"a": 2})
    assert cache.load("curves", "key") == {"a": 2, "key": "key"}


def test_a_directory_that_cannot_be_written_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file lies where the directory should be; that stops even the superuser."""
    (tmp_path / "file").write_text("not a directory")
    for place in ("file", "file/below"):
        monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / place))
        cache.store("curves", "key", {"a": 1})
        assert cache.load("curves", "key") is None
        cache.remove("curves", "key")
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_write_that_fails_leaves_the_old_document_and_no_litter(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    cache.store("curves", "key", {"a": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store("curves", "key", {"a": 2})
    monkeypatch.undo()
    monkeypatch.setenv("EDGESPEC_CACHE", str(cache_folder))
    assert cache.load("curves", "key") == {"a": 1, "key": "key"}
    assert len(files_in(cache_folder)) == 1


def test_a_reader_never_sees_half_a_document(cache_folder: Path) -> None:
    """Two threads replace a long document while it is read 300 times: each is whole."""
    documents = [{"a": [number] * 3000} for number in (1, 2)]
    cache.store("curves", "key", documents[0])
    stop = threading.Event()

    def write(document: dict[str, Any]) -> None:
        while not stop.is_set():
            cache.store("curves", "key", document)

    threads = [threading.Thread(target=write, args=(document,)) for document in documents]
    for thread in threads:
        thread.start()
    try:
        seen = [cache.load("curves", "key") for _ in range(300)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(document in [{**d, "key": "key"} for d in documents] for document in seen)
    assert len(files_in(cache_folder)) == 1
    json.loads(files_in(cache_folder)[0].read_text())
