"""Prefixes on disk: found by tokens and by text, under a budget, and never wrong after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.errors import SessionFileError
from edgespec.memory.store.cells import (
    USUAL_BYTES,
    Piece,
    PrefixStore,
    ends_of,
    forget,
    kept_bytes,
    read_session,
    usual_budget,
)

TEXT = list(range(1000, 1100))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    return tmp_path / "prefixes"


def store_of(budget: int = 1 << 20, key: str = "key") -> PrefixStore:
    return PrefixStore(key, "a.gguf", budget)


def cells(size: int, letter: bytes = b"c") -> Callable[[str], int]:
    return lambda path: Path(path).write_bytes(letter * size)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def test_the_longest_beginning_is_found_by_another_process() -> None:
    store = store_of()
    first = store.add(None, 0, TEXT[:40], "", cells(9))
    second = store.add(first, 40, TEXT[40:60], "", cells(9))
    store.add(second, 60, TEXT[60:], "", cells(9))
    branch = store.add(second, 50, [7, 8, 9], "", cells(9))
    for one in (store, store_of()):
        found = one.find(TEXT[:70], "", 1000)
        assert found is not None and found[1] == 70 and found[0].text == TEXT
        found = one.find([*TEXT[:50], 7, 8], "", 1000)
        assert found is not None and found[1] == 52 and found[0].path == branch.path
        assert found[0].text == [*TEXT[:50], 7, 8, 9]
        assert [piece.start for piece in found[0].chain] == [0, 40, 50]
        found = one.find(TEXT, "", 60)  # a context of so many tokens has no room for more
        assert found is not None and found[1] == 60
        assert one.find([5], "", 1000) is None
        assert one.find(TEXT, "another", 1000) is None
    assert store_of(key="another").find(TEXT, "", 1000) is None


def test_a_text_is_found_in_other_tokens() -> None:
    """Negative ids are images, and ids below 10 control tokens; others are letters, a pair two."""

    def bytes_of(token: int) -> bytes:
        return b"" if token < 10 else b"ab" if token == 99 else bytes([token])

    mine, theirs = [1, 97, 98, 2, -5, 99, 3, 97], [1, 99, 2, -5, 97, 98, 3, 97, 98]
    store = store_of()
    store.add(None, 0, mine, "", cells(9), ends=ends_of(mine, bytes_of, is_open=True))

    def known(ids: list[int]) -> list[int]:
        found = store.find_text({digest: place for place, digest in ends_of(ids, bytes_of)}, "")
        return ids if found is None else [*found[0], *ids[found[1] :]]

    assert known(theirs) == [*mine[:-1], 97, 98]
    assert known([*theirs[:-1], 4]) == [*mine, 4]  # an answer has ended, whatever ends it
    assert known([1, 98, 2, -5, 97]) == [1, 98, 2, -5, 97]
    assert known([1, 99, 2, -6, 97]) == [1, 97, 98, 2, -6, 97]  # another image
    assert ends_of([97, 1], bytes_of) != ends_of([97, 2], bytes_of)


def test_what_was_used_last_stays_within_the_budget(_folder: Path) -> None:
    store = store_of(budget=5500)
    first = store.add(None, 0, TEXT[:10], "", cells(1000))
    second = store.add(first, 10, TEXT[10:20], "", cells(1000))
    other = store_of(key="another model").add(None, 0, [1, 2, 3], "", cells(1000))
    store.touch(second)
    third = store.add(None, 0, [4, 5, 6], "", cells(2000))
    assert sum(one.stat().st_size for one in files(_folder)) <= 5500
    assert not other.path.exists() and second.path.exists()
    store.add(third, 3, [7, 8], "", cells(2500))
    assert first.path.exists() or not second.path.exists()  # ends go before beginnings
    assert third.path.exists() and sum(one.stat().st_size for one in files(_folder)) <= 5500
    with pytest.raises(OSError, match="larger than the budget"):
        store.add(None, 0, [9], "", cells(7000))
    found = store.find([4, 5, 6, 7, 8], "", 1000)
    assert found is not None and found[1] == 5


def test_the_end_of_a_new_text_goes_before_its_beginning(_folder: Path) -> None:
    store = store_of(budget=8000)
    first = store.add(None, 0, TEXT[:10], "", cells(3000))
    second = store.add(first, 10, TEXT[10:20], "", cells(3000))
    store.add(None, 0, [4, 5, 6], "", cells(3000))
    assert first.path.exists() and not second.path.exists()


def test_a_damaged_file_is_never_read(_folder: Path) -> None:
    """One changed bit anywhere: cells, tokens, sizes or names."""
    piece = store_of().add(None, 0, TEXT[:20], "", cells(40), ends=[(5, "f" * 32)])
    good = piece.path.read_bytes()
    for place in range(len(good)):
        piece.path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        store = store_of()
        found = store.find(TEXT[:20], "", 1000)
        assert found is None or not store.is_whole(found[0]), place
        spelled = store.find_text({"f" * 32: 5}, "")
        assert spelled is None or spelled[0] == TEXT[:5]
    for cut in (0, 10, len(good) - 1):
        piece.path.write_bytes(good[:cut])
        assert store_of().find(TEXT[:20], "", 1000) is None
    piece.path.write_bytes(good)
    assert store_of().is_whole(store_of().find(TEXT[:20], "", 1000)[0])  # type: ignore[index]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_text_with_one_damaged_piece_is_not_whole(_folder: Path, damaged: int) -> None:
    """And what comes before that piece stays."""
    store, pieces = store_of(), list[Piece]()
    for end in (5, 10, 15):
        parent = pieces[-1] if pieces else None
        pieces.append(store.add(parent, end - 5, TEXT[end - 5 : end], "", cells(40)))
    content = bytearray(pieces[damaged].path.read_bytes())
    content[7] ^= 1
    pieces[damaged].path.write_bytes(content)
    assert not store.is_whole(pieces[2])
    assert [one.path.exists() for one in pieces] == [number < damaged for number in range(3)]


def test_files_are_of_their_owner_alone_and_are_deleted(_folder: Path) -> None:
    piece = store_of().add(None, 0, TEXT, "secret salt", cells(2000))
    assert piece.path.stat().st_mode & 0o777 == 0o600
    assert piece.path.parent.stat().st_mode & 0o777 == _folder.stat().st_mode & 0o777 == 0o700
    assert b"secret" not in piece.path.read_bytes()
    assert list(kept_bytes()) == ["a.gguf"] and kept_bytes()["a.gguf"] > 2000
    forget()
    assert not files(_folder) and not kept_bytes()


def test_a_small_disk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((USUAL_BYTES * 5, USUAL_BYTES), (1 << 30, 0)):
        told = (1 << 50, 0, free)
        usage = type("Usage", (), dict(zip(("total", "used", "free"), told, strict=True)))
        monkeypatch.setattr("shutil.disk_usage", lambda _path, usage=usage: usage)
        assert usual_budget() == expected


# Forks writers, each of which dies at some byte of a file, or at some moment; then looks.
_KILLS = """
import os, random, resource, signal, sys, time
from pathlib import Path
from edgespec.memory.store.cells import read_session
from edgespec.memory.store.cells import PrefixStore

SIZE, source = 30_000, random.Random(5)
def cells(text):
    return bytes([sum(text) % 251]) * (SIZE + 1000 * text[1])
def write(store, seed):
    for number in range(seed * 100, seed * 100 + 100):
        parent = None
        for start in range(0, 90, 30):
            text = [number, *range(start, start + 29)]
            data = cells(text)
            parent = store.add(parent, start, text, "", lambda path: Path(path).write_bytes(data))
killed = found = 0
for seed in range(100):
    child = os.fork()
    if not child:
        if seed % 4:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            most = source.randrange(1, 3 * SIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        write(PrefixStore("key", "model", 400_000), seed)
    source.random()
    if not seed % 4:
        time.sleep(source.uniform(0.002, 0.05))
        os.kill(child, signal.SIGKILL)
    killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0
    store = PrefixStore("key", "model", 400_000)
    for piece in store._all():
        found += 1
        assert store.is_whole(piece), piece
        assert len(piece.text) == piece.end
        with piece.path.open("rb") as file:
            assert file.read(len(cells(piece.tokens))) == cells(piece.tokens)
    left = [one for one in os.listdir(store._folder) if not one.endswith(".cells")]
    assert not left, left
    assert sum(one.stat().st_size for one in store._folder.iterdir()) <= 400_000
print(killed, found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills by a limit of the size of files")
def test_a_hundred_writers_are_killed_and_nothing_wrong_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", _KILLS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    killed, found = map(int, done.stdout.split())
    assert killed == 100 and found > 100


def test_a_piece_whose_beginning_was_removed_is_not_found(_folder: Path) -> None:
    store = store_of()
    first = store.add(None, 0, TEXT[:40], "", cells(9))
    second = store.add(first, 40, TEXT[40:], "", cells(9))
    os.utime(first.path, ns=(0, 0))
    first.path.unlink()
    for one in (store, store_of()):
        assert one.find(TEXT, "", 1000) is None
    with pytest.raises(SessionFileError):
        read_session(first.path)
    store.add(None, 0, TEXT[:40], "", cells(9))
    for one in (store_of(), store):
        found = one.find(TEXT, "", 1000)
        assert found is not None and found[0].path == second.path
