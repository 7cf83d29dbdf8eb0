"""Files of cells of a KV cache, with a JSON document behind them: saved sessions, kept prefixes.

    cells, as the backend writes them | document | magic, sizes, SHA-256 of all before it

What was cut off or changed is never read, and a writer that dies leaves the file that was there.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from edgespec.errors import SessionFileError
from edgespec.models.writing import reason, whole_file

_MAGIC = b"edgespec session\x01"
_FOOTER = struct.Struct("<17sQQ32s")  # magic, bytes of the cache, bytes of the JSON, digest
_HINT = "name a file that /save or Session.save wrote"


def write_session(
    path: Path, document: dict[str, Any], write_cache: Callable[[str], int] | None = None
) -> None:
    """Replace `path` by a file, or leave it as it is.

    `write_cache` writes the cache to the path it is given and returns how many bytes it wrote.
    Raises SessionFileError when the file cannot be written.
    """
    try:
        with whole_file(path, private=True) as partial:
            write_parts(partial, json.dumps(document).encode(), write_cache)
    except OSError as problem:
        raise SessionFileError(
            f"cannot write {path}: {reason(problem)}", hint="name a file in a folder of yours"
        ) from problem


def read_session(path: Path) -> tuple[dict[str, Any], int]:
    """The document of a file, and how many bytes of cache come first.

    Raises SessionFileError for a file that is missing, damaged, or of another kind.
    """
    try:
        with open(path, "rb") as file:
            cache_bytes, json_bytes, wanted = _sizes(path, file)
            digest = _digest(file, cache_bytes)
            text = file.read(json_bytes)
    except OSError as problem:
        raise SessionFileError(f"cannot read {path}: {problem.strerror}", hint=_HINT) from problem
    digest.update(text)
    if digest.digest() != wanted:
        raise SessionFileError(f"{path} is damaged: its checksum is wrong")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise SessionFileError(f"{path} is damaged: {problem}") from problem
    if not isinstance(document, dict):
        raise SessionFileError(f"{path} is damaged: it holds no conversation")
    return document, cache_bytes


def write_parts(
    path: Path, document: bytes, write_cache: Callable[[str], int] | None = None
) -> None:
    """Write cache, document and footer to an empty file. Raises OSError."""
    cache_bytes = write_cache(os.fspath(path)) if write_cache is not None else 0
    with path.open("r+b") as file:
        file.truncate(cache_bytes)
        digest = _digest(file, cache_bytes)
        file.seek(cache_bytes)
        digest.update(document)
        file.write(document)
        file.write(_FOOTER.pack(_MAGIC, cache_bytes, len(document), digest.digest()))


def read_document(path: Path) -> bytes:
    """The bytes of a file's document, without a look at the cells: nothing vouches for them.

    Raises as `read_session`, and OSError.
    """
    with open(path, "rb") as file:
        cache_bytes, json_bytes, _ = _sizes(path, file)
        file.seek(cache_bytes)
        return file.read(json_bytes)


def _sizes(path: Path, file: IO[bytes]) -> tuple[int, int, bytes]:
    """What the footer says: bytes of the cache, bytes of the document, the checksum."""
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER.size:
        raise SessionFileError(f"{path} is not a session of edgespec", hint=_HINT)
    file.seek(size - _FOOTER.size)
    magic, cache_bytes, json_bytes, wanted = _FOOTER.unpack(file.read(_FOOTER.size))
    if magic != _MAGIC:
        raise SessionFileError(f"{path} is not a session of edgespec, or is cut off", hint=_HINT)
    if cache_bytes + json_bytes + _FOOTER.size != size or json_bytes > 256 << 20:
        raise SessionFileError(f"{path} is damaged: its sizes do not add up")
    return cache_bytes, json_bytes, wanted


def _digest(file: IO[bytes], size: int) -> hashlib._Hash:
    """SHA-256 of the first `size` bytes; the file stands behind them afterwards."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest
