"""Tells large files apart by samples all over them: fine-tunes of one model differ everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from edgespec.errors import ModelFileError

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 10  # of each file


def content_hash(files: Iterable[tuple[Path, int]], *more: str) -> str:
    """16 hexadecimal digits for files and their sizes in bytes, and for `more` about them.

    Reads 64 KiB of each: below a millisecond once they are cached. Raises ModelFileError for a file
    that cannot be read.
    """
    digest = blake2b("\n".join(more).encode(), digest_size=8)
    for path, size in files:
        digest.update(f"{size}\n".encode())
        try:
            with path.open("rb", buffering=0) as file:
                for sample in range(_SAMPLES):
                    file.seek(size * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
