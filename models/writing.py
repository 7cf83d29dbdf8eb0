"""Files and folders that appear only when they are whole.

Until it is complete, what is written lies beside its place as `.NAME.NUMBER.partial`, and its
writer holds the lock `.NAME.NUMBER.partial.lock`. A process that dies at any moment thus leaves the
old file or the new one. What it had begun is removed by the next one that writes to the same place.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from edgespec.errors import EdgespecError, UnsupportedError

_PATIENCE_S = 10.0  # who removes what is left holds a lock for milliseconds
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(problem: OSError) -> str:
    """Why a file could not be read or written; some errors of libraries hold nothing but a text."""
    return problem.strerror or str(problem)


def is_full(problem: OSError) -> bool:
    """Whether there was no room for what was written."""
    return problem.errno in _FULL


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A new path beside `target` for what is to become it; whatever is left there is removed.

    Removes what dead processes left of the same target, too.
    """
    remove_dead(target.parent, target.name)
    partial = target.with_name(f".{target.name}.{os.urandom(6).hex()}.partial")
    with _locked(partial):
        try:
            yield partial
        finally:
            _remove(partial)


@contextmanager
def whole_file(target: Path, *, synced: bool = True, private: bool = False) -> Iterator[Path]:
    """An empty file beside `target` that replaces it at the end of the block, unless that raises.

    What is no ordinary file, such as a pipe or `/dev/stdout`, is written to directly, as is one
    that may be written to in a folder that may not.

    Args:
        synced: whether a power cut must not lose it either.
        private: whether only its owner may read it.

    Raises OSError.
    """
    target = Path(os.path.realpath(target))  # a link stays one
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        yield target
        return
    with making(target) as partial:
        os.close(
            os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
        )
        yield partial
        put_in_place(partial, target, synced=synced)


@contextmanager
def refusing(what: object, hint: str) -> Iterator[None]:
    """Let it be told in a sentence where the body cannot write something. Raises UnsupportedError.

    Our own errors stay what they are, of which some are an OSError, too.
    """
    try:
        yield
    except EdgespecError:
        raise
    except OSError as problem:
        raise UnsupportedError(f"cannot write {what}: {reason(problem)}", hint=hint) from problem


def put_in_place(made: Path, target: Path, *, synced: bool = True) -> None:
    """Give a file, or a folder of files, its final name. Raises OSError."""
    if synced:
        for path in sorted(made.iterdir()) if made.is_dir() else [made]:
            _sync(path)
        if made.is_dir():
            _sync(made)
    os.replace(made, target)
    if synced:
        _sync(target.parent)


def remove_dead(folder: Path, name: str = "") -> None:
    """Remove what dead processes began to write in a folder, or began to write for one name."""
    wanted = re.compile(rf"(\.{re.escape(name) or '.*'}\.[0-9a-f-]+\.partial)(\.lock)?")
    with suppress(OSError):
        found = map(wanted.fullmatch, os.listdir(folder))
        for partial in {folder / one[1] for one in found if one}:
            with suppress(OSError, NotImplementedError, RuntimeError), _locked(partial, wait=False):
                _remove(partial)


@contextmanager
def _locked(partial: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a partial file, which ends with its process, whichever container that is in.

    Where no file can be locked the writer goes on, and what it leaves is not removed. Who does not
    `wait` is told: TimeoutError where another one writes, and whatever else keeps it from locking.
    """
    from filelock import FileLock

    path = Path(f"{partial}.lock")
    lock = FileLock(path, timeout=_PATIENCE_S if wait else 0)
    try:
        if not path.parent.is_dir():  # which the lock would make, whatever was mistyped
            raise FileNotFoundError(path.parent)
        while not lock.is_locked:
            lock.acquire()
            if not path.exists():  # whoever removed what was left took this lock's file for that
                lock.release()
    except (OSError, NotImplementedError, RuntimeError):
        if not wait:
            raise
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink()
            lock.release()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):  # it is there only if something went wrong
        path.unlink()


def _sync(path: Path) -> None:
    """Bring a file to the disk, or a folder's names where folders can be synced."""
    is_folder = path.is_dir()
    with suppress(OSError) if is_folder else nullcontext():
        handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
