"""Weights as edgespec's kernels read them: a file for each model, mapped by all that run it.

Packing is done once: a later start reads neither the model's weights nor packs them, and processes
that run one model have one copy, whose pages the system may drop and read again.

A file appears when it is whole. Its document has its size, a checksum and what the file system says
of it: number and times. One that is as it was left is taken as it is; one that was copied or
touched is read and held against its sum first, if memory has room for all of it; any other is not
used, and written anew. Files that were used least recently go first.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread, get_native_id

from edgespec.memory.store import cache
from edgespec.models.writing import remove_dead, whole_file

LEAST_BYTES = 256 << 20  # of packed weights, which packing takes a second for
_KIND, _SUFFIX, _LOCK = "packed", ".weights", ".lock"
_SHARE = 0.25  # of a disk, that all files together take
_BLOCK_BYTES = 1 << 20  # beside the first answers


class PackedFile:
    """The packed weights of one model.

    Args:
        key: what they depend on: the file, the kernels, and what of it they are.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._document = cache.path_of(_KIND, key)
        self.path = self._document.with_suffix(_SUFFIX)

    @contextmanager
    def opened(self) -> Iterator[tuple[int, str] | None]:
        """A handle of the file, and the layout it was written with; None: there is none."""
        handle = -1
        try:
            try:
                handle = os.open(self.path, os.O_RDONLY)
                found = self._checked(handle)
            except OSError:
                found = None
            yield None if found is None else (handle, found)
        finally:
            if handle >= 0:
                os.close(handle)

    def _checked(self, handle: int) -> str | None:
        """The layout of an open file, if that is what its document says."""
        document = cache.load(_KIND, self._key)
        if document is None or os.fstat(handle).st_size != document.get("size"):
            return None
        if document.get("seen") != _seen(handle):
            if document.get("crc32") is None or _checksum(handle) != document["crc32"]:
                return None
            cache.store(_KIND, self._key, {**document, "seen": _seen(handle)})
        with suppress(OSError):
            os.utime(self._document)
        return str(document.get("layout"))

    def begin(self, model: str, nbytes: int, *, needed: bool = False) -> NewFile:
        """An empty one for a model's packed weights, which take about so many bytes.

        One that is `needed`, as memory has no room for them, may take more of the disk. Raises
        OSError where it cannot be, and BlockingIOError where another process is at it.
        """
        return NewFile(self, model, nbytes, 0.75 if needed else _SHARE)

    def keep(self, model: str, handle: int, layout: str, *, summed: bool) -> None:
        """Note what a file is, which has its name. Raises OSError."""
        size, checksum = os.fstat(handle).st_size, _checksum(handle) if summed else None
        document = {"model": model, "size": size, "layout": layout, "crc32": checksum}
        document["seen"] = _seen(handle)
        if problem := cache.store(_KIND, self._key, document):
            raise problem

    def remove(self) -> None:
        """Forget them."""
        _unlink(self.path)

    def make_room(self, nbytes: int, share: float) -> None:
        """Remove what was used least recently, until all take this share of the disk.

        One that is larger by itself was needed: it stays beside them. Raises OSError where this one
        is larger.
        """
        most = _room(share)
        if nbytes > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        others = ((used, size, path) for path, size, used in _files() if path != self.path)
        found = sorted(one for one in others if one[1] <= most)
        left = most - nbytes - sum(size for _, size, _ in found)
        for _, size, path in found:
            if left >= 0:
                return
            _unlink(path)
            left += size


class NewFile(Thread):
    """A packed file that somebody writes, and that has its name once it is whole and on the disk.

    A thread brings it there, behind whatever else the processor has to do. `handle` is the open
    file's, until `finish` or `abandon` was called. Raises as `PackedFile.begin`.
    """

    def __init__(self, place: PackedFile, model: str, nbytes: int, share: float) -> None:
        super().__init__(name="packed file", daemon=True)
        self.handle = -1
        self.problem: OSError | None = None  # that kept its pages from the disk
        self._place, self._model, self._room = place, model, (nbytes, share)
        self._layout = ""
        self._is_written = False  # what goes wrong later costs the next start, and no page
        self._begun, self._ended = Event(), Event()
        self.start()
        self._begun.wait()
        if self.problem is not None:
            raise self.problem

    def finish(self, layout: str) -> None:
        """All of it was written, in this layout; the thread goes on from here."""
        self._layout = layout
        self._ended.set()

    def abandon(self) -> None:
        """It will not be whole."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Until it is whole, or was abandoned."""
        from filelock import FileLock, Timeout

        place = self._place
        folder = place.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(place.path.with_suffix(_LOCK), timeout=0, mode=0o600):
                remove_dead(folder)
                place.make_room(*self._room)
                with whole_file(place.path, private=True) as partial, partial.open("r+b") as file:
                    self.handle = file.fileno()
                    self._begun.set()
                    self._ended.wait()
                    if not self._layout:
                        raise BlockingIOError
                    if sys.platform == "linux":  # where threads have priorities: the last one
                        with suppress(OSError):
                            os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
                    os.fsync(self.handle)
                    self._is_written = True
                with place.path.open("rb") as file:
                    summed = self._room[1] == _SHARE  # else all of it would be read again
                    place.keep(self._model, file.fileno(), self._layout, summed=summed)
        except Timeout:
            self.problem = BlockingIOError()
        except OSError as problem:
            if not self._is_written:
                self.problem = problem
        finally:
            self._begun.set()


def kept() -> list[tuple[str, int]]:
    """The models whose packed weights lie on disk, and their bytes: those used last first."""
    names = {
        one["key"]: str(one.get("model", "")) for one in cache.documents(_KIND) if "key" in one
    }
    paths = {cache.path_of(_KIND, key).with_suffix(_SUFFIX): name for key, name in names.items()}
    found = sorted(_files(), key=lambda one: -one[2])
    return [(paths.get(path, "(unfinished)"), size) for path, size, _ in found]


def remove_all() -> None:
    """Remove what is kept; who computes with it goes on."""
    for path, _, _ in _files():
        _unlink(path)


def is_worth_keeping(model: str, nbytes: int) -> bool:
    """Whether packed weights are kept unasked: packing takes long, and there is room.

    What is there already, as it was needed once, is mapped whatever room it takes.
    """
    with suppress(OSError):
        fits = nbytes <= _room(_SHARE) or model in dict(kept())
        return nbytes >= LEAST_BYTES and fits and os.access(cache.nearest_directory(), os.W_OK)
    return False


def _unlink(path: Path) -> None:
    """Remove a file, and first what says that it is one."""
    for one in (path.with_suffix(".json"), path, path.with_suffix(_LOCK)):
        with suppress(OSError):
            one.unlink()


def _checksum(handle: int) -> int:
    """CRC-32 of a whole file."""
    checksum = place = 0
    while block := os.pread(handle, _BLOCK_BYTES, place):
        checksum = zlib.crc32(block, checksum)
        place += len(block)
    return checksum


def _seen(handle: int) -> list[int]:
    """What tells a file from another one, and from what it was before it was written to."""
    told = os.fstat(handle)
    return [told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns]


def _room(share: float) -> int:
    """Bytes that all files may take together: a part of what would be free without them."""
    kept = sum(size for _, size, _ in _files())
    return int(share * (shutil.disk_usage(cache.nearest_directory()).free + kept))


def _files() -> Iterator[tuple[Path, int, float]]:
    """All files: their paths, bytes, and when they were used."""
    for path in (cache.cache_directory() / _KIND).glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            size, used = path.stat().st_size, 0.0
            with suppress(OSError):  # one without a document was never used
                used = path.with_suffix(".json").stat().st_mtime
            yield path, size, used
