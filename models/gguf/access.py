"""The bytes of model files; whatever the system does, the outcome is these or one of our errors."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from edgespec.errors import (
    DoesNotFitError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
    no_memory_hint,
)


def read_part(file: IO[bytes], offset: int, size_bytes: int) -> bytes:
    """Bytes of an open model file whose size was checked when its header was read.

    Raises ModelFileError where the file has become shorter since, or the disk fails.
    """
    try:
        file.seek(offset)
        found = file.read(size_bytes)
        while len(found) < size_bytes and (part := file.read(size_bytes - len(found))):
            found += part
    except OSError as error:
        raise ModelFileError(f"{file.name!r} cannot be read: {error.strerror}") from None
    if len(found) < size_bytes:
        raise _shrunk(Path(file.name))
    return found


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Let an error of mapping a part of a model file be ours. Raises ModelFileError."""
    try:
        yield
    except ValueError:  # numpy's: the part goes beyond the end
        raise _shrunk(path) from None
    except OSError as error:
        raise _unread(path, error) from None


def _unread(path: Path, error: OSError | ValueError) -> EdgespecError:
    reason = f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}"
    if getattr(error, "errno", None) == errno.ENOMEM:  # nothing is wrong with the file
        return DoesNotFitError(reason, hint=no_memory_hint("end other programs"))
    return ModelFileError(reason, hint="check its name and permissions")


def _shrunk(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{str(path)!r} has become shorter since it was opened",
        hint="something writes to it; start again when that has ended",
    )


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Maps a regular file for reading. Raises ModelNotFoundError or ModelFileError."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path} is a folder", hint="name the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is a device or pipe", hint="name a .gguf file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path} is empty", hint="download it again")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(
            f"there is no file {path}",
            hint="check the path",
        ) from None
    except ModelFileError:
        raise
    except (OSError, ValueError) as error:
        raise _unread(path, error) from None
    with mapping, memoryview(mapping) as data:
        yield data
