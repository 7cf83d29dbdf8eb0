"""Weights as edgespec's kernels read them: a file for each model, mapped by all that run it.

Packing is done once: a later start reads neither the model's weights nor packs them, and processes
that run one model have one copy, whose pages the system may drop and read again.

A file appears when it is whole. Its document has its size, a checksum and what the file system says
of it: number and times. One that is as it was left is taken as it is; one that was copied or
touched is read and held against its sum first; any other is not used, and written anew. Files that
were used least recently go first.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.memory.store import cache
from edgespec.models.writing import remove_dead, whole_file

LEAST_BYTES = 256 << 20  # of packed weights, which packing takes a second for
_KIND, _SUFFIX = "packed", ".weights"
_SHARE = 4  # the part of a disk that all files together take is one in so many
_BLOCK_BYTES = 32 << 20


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
            checksum = 0
            while block := os.read(handle, _BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
            if checksum != document.get("crc32"):
                return None
            cache.store(_KIND, self._key, {**document, "seen": _seen(handle)})
        with suppress(OSError):
            os.utime(self._document)
        return str(document.get("layout"))

    def write(
        self, model: str, weights: memoryview, layout: str, progress: Callable[[float], None]
    ) -> bool:
        """Keep a model's packed weights; whether they are kept, or another process is at it.

        Raises OSError where they cannot be.
        """
        from filelock import FileLock, Timeout

        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(folder / "lock", timeout=0):
                remove_dead(folder)
                self._make_room(weights.nbytes)
                with whole_file(self.path, private=True) as partial, partial.open("r+b") as file:
                    checksum = _write(file.fileno(), weights, progress)
                document = {"model": model, "size": weights.nbytes, "layout": layout}
                with self.path.open("rb") as file:
                    document |= {"crc32": checksum, "seen": _seen(file.fileno())}
                if problem := cache.store(_KIND, self._key, document):
                    raise problem
        except Timeout:
            return False
        return True

    def remove(self) -> None:
        """Forget them."""
        for path in (self._document, self.path):
            with suppress(OSError):
                path.unlink()

    def _make_room(self, nbytes: int) -> None:
        """Remove what was used least recently, until there is room. Raises OSError."""
        if nbytes > _room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        found = sorted((used, size, path) for path, size, used in _files() if path != self.path)
        left = _room() - nbytes - sum(size for _, size, _ in found)
        for _, size, path in found:
            if left >= 0:
                return
            for one in (path.with_suffix(".json"), path):
                with suppress(OSError):
                    one.unlink()
            left += size


def is_worth_keeping(nbytes: int) -> bool:
    """Whether packed weights are kept unasked: packing takes long, and there is room."""
    with suppress(OSError):
        return LEAST_BYTES <= nbytes <= _room() and os.access(_place(), os.W_OK)
    return False


def _write(handle: int, weights: memoryview, progress: Callable[[float], None]) -> int:
    """Write all of it to the disk; its checksum."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, weights.nbytes)
    checksum = place = 0
    while place < weights.nbytes:
        block = weights[place : place + _BLOCK_BYTES]
        checksum = zlib.crc32(block, checksum)
        place += os.write(handle, block)
        progress(place / weights.nbytes)
    return checksum


def _seen(handle: int) -> list[int]:
    """What tells a file from another one, and from what it was before it was written to."""
    told = os.fstat(handle)
    return [told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns]


def _room() -> int:
    """Bytes that all files may take together: a part of what would be free without them."""
    return (shutil.disk_usage(_place()).free + sum(size for _, size, _ in _files())) // _SHARE


def _place() -> Path:
    """The cache directory, or what it would be made in."""
    place = cache.cache_directory()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _files() -> Iterator[tuple[Path, int, float]]:
    """All files: their paths, bytes, and when they were used."""
    for path in (cache.cache_directory() / _KIND).glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            size, used = path.stat().st_size, 0.0
            with suppress(OSError):  # one without a document was never used
                used = path.with_suffix(".json").stat().st_mtime
            yield path, size, used
