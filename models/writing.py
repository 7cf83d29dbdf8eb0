"""Files and folders that appear only when they are whole.

Until it is complete, what is written lies beside its place as `.NAME.PROCESS-NUMBER.partial`. A
process that dies at any moment thus leaves the old file or the new one, and what it had begun is
removed by the next one that writes to the same place.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NUMBERS = itertools.count()
_OPEN: set[Path] = set()  # partial files of this process that are being written
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
    partial = target.with_name(f".{target.name}.{os.getpid()}-{next(_NUMBERS)}.partial")
    _OPEN.add(partial.absolute())
    try:
        yield partial
    finally:
        _remove(partial)
        _OPEN.discard(partial.absolute())


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
    wanted = re.compile(rf"\.{re.escape(name) or '.*'}\.(\d+)(-\d+)?\.partial")
    with suppress(OSError):
        for path in folder.iterdir():
            found = wanted.fullmatch(path.name)
            if found and not _is_alive(int(found[1]), path):
                _remove(path)


def _is_alive(process: int, partial: Path) -> bool:
    """Whether the process that began a partial file may still be writing it."""
    if process == os.getpid():  # in a container, the dead one often had the same number
        return partial.absolute() in _OPEN
    if os.name == "nt":  # a file in use cannot be removed there anyway
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):  # it is there only if something went wrong
        path.unlink()


def _sync(path: Path) -> None:
    """Bring a file to the disk, or a folder's names where folders can be synced."""
    if path.is_dir():
        with suppress(OSError):
            _sync_opened(os.open(path, os.O_RDONLY))
        return
    _sync_opened(os.open(path, os.O_RDWR))


def _sync_opened(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
