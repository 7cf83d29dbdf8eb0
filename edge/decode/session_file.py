"""A conversation in one file: what was said, and what the backend's cache held.

    cache as the backend wrote it (may be empty) | JSON document | magic, both sizes, SHA-256

The description stands at the end because llama.cpp writes and reads its part from the beginning of
a file. A file is written beside its place, synced and renamed, so a process that dies at any moment
leaves the old file or the new one. Nothing of a file is used before its checksum was right.
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
_BLOCK_BYTES = 1 << 20
_MAX_JSON_BYTES = 256 << 20
_HINT = "name a file that /save or Session.save wrote"


def write_session(
    path: Path, document: dict[str, Any], write_cache: Callable[[str], int] | None = None
) -> None:
    """Replace `path` by a session file, or leave it as it is.

    `write_cache` writes the cache to the path it is given and returns how many bytes it wrote.
    Raises SessionFileError when the file cannot be written.
    """
    try:
        with whole_file(path, private=True) as partial:
            cache_bytes = write_cache(os.fspath(partial)) if write_cache is not None else 0
            with partial.open("r+b") as file:
                _finish(file, cache_bytes, json.dumps(document).encode())
    except OSError as problem:
        raise SessionFileError(
            f"cannot write {path}: {reason(problem)}", hint="name a file in a folder of yours"
        ) from problem


def read_session(path: Path) -> tuple[dict[str, Any], int]:
    """The document of a session file, and how many bytes of cache come first.

    Raises SessionFileError for a file that is missing, damaged, or of another kind.
    """
    try:
        with open(path, "rb") as file:
            return _read(path, file)
    except OSError as problem:
        raise SessionFileError(f"cannot read {path}: {problem.strerror}", hint=_HINT) from problem


def _finish(file: IO[bytes], cache_bytes: int, document: bytes) -> None:
    """Append document and footer behind the cache."""
    file.truncate(cache_bytes)
    digest = _digest(file, cache_bytes)
    file.seek(cache_bytes)
    digest.update(document)
    file.write(document)
    file.write(_FOOTER.pack(_MAGIC, cache_bytes, len(document), digest.digest()))


def _read(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], int]:
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER.size:
        raise SessionFileError(f"{path} is not a session of edgespec", hint=_HINT)
    file.seek(size - _FOOTER.size)
    magic, cache_bytes, json_bytes, wanted = _FOOTER.unpack(file.read(_FOOTER.size))
    if magic != _MAGIC:
        raise SessionFileError(f"{path} is not a session of edgespec, or is cut off", hint=_HINT)
    if cache_bytes + json_bytes + _FOOTER.size != size or json_bytes > _MAX_JSON_BYTES:
        raise SessionFileError(f"{path} is damaged: its sizes do not add up")
    digest = _digest(file, cache_bytes)
    text = file.read(json_bytes)
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


def _digest(file: IO[bytes], size: int) -> hashlib._Hash:
    """SHA-256 of the first `size` bytes; the file stands behind them afterwards."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, _BLOCK_BYTES))):
        digest.update(block)
        size -= len(block)
    return digest
