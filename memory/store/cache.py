"""Small JSON documents kept between runs: measured curves and calibration.

They live in the user's cache directory (`EDGESPEC_CACHE` overrides it), are written atomically, and
are never needed: an unreadable or damaged one is measured again, an unwritable directory is
ignored. Processes that share the directory change what is stored one after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.models.writing import reason, remove_dead, whole_file

_LOCK = "lock"  # a file of the directory, which stays
_PATIENCE_S = 2.0  # a change takes milliseconds
_patience_s = _PATIENCE_S  # none for a lock that was waited for in vain, until it can be had again


def cache_directory() -> Path:
    """Where edgespec keeps what it measured."""
    if override := os.environ.get("EDGESPEC_CACHE"):
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("edgespec", appauthor=False))


def nearest_directory() -> Path:
    """The cache directory, or what it would be made in."""
    place = cache_directory()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def delete(paths: Iterable[Path]) -> None:
    """Delete files, where they are still there. Raises UnsupportedError where one cannot be."""
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot delete {problem.filename}: {reason(problem)}", hint="delete it yourself"
        ) from problem


def path_of(kind: str, key: str) -> Path:
    """Where a document is, or would be."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return cache_directory() / kind / f"{digest}.json"


def load(kind: str, key: str) -> dict[str, Any] | None:
    """The document stored under `kind` and `key`, or None."""
    try:
        document = json.loads(path_of(kind, key).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(document, dict) and document.get("key") == key
    return document if is_ours else None


def documents(kind: str) -> Iterator[dict[str, Any]]:
    """All that are stored of a kind, each with its `key`; what is damaged is left out."""
    for path in sorted((cache_directory() / kind).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = json.loads(path.read_text())
            if isinstance(document, dict):
                yield document


def store(kind: str, key: str, document: dict[str, Any]) -> OSError | None:
    """Keep `document` for the next run; see `update`. Returns why it could not be kept."""
    path = path_of(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_dead(path.parent)
        with whole_file(path, synced=False, private=True) as partial:
            partial.write_text(json.dumps({**document, "key": key}))
    except OSError as problem:
        return problem
    return None


def update(
    kind: str, key: str, change: Callable[[dict[str, Any] | None], dict[str, Any] | None]
) -> OSError | None:
    """Store what `change` makes of the document that is stored now; None leaves it as it is.

    No other process changes it meanwhile, so that none loses what another one has stored. Returns
    as `store`.
    """
    with locked():
        document = change(load(kind, key))
        return None if document is None else store(kind, key, document)


def remove(kind: str, key: str) -> None:
    """Forget a document."""
    with locked(), contextlib.suppress(OSError):
        path_of(kind, key).unlink()


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other processes from changing what is stored.

    Where the lock cannot be had, in a directory without locks or from a process that hangs, it goes
    on without: then a change of another process may be lost, and waiting or storing nothing would
    be worse.
    """
    global _patience_s
    lock: Any = None
    with contextlib.suppress(OSError, NotImplementedError, RuntimeError, ImportError):
        # No directory, no locks there, or an interpreter that is shutting down.
        from filelock import FileLock, Timeout

        cache_directory().mkdir(parents=True, exist_ok=True)
        free = FileLock(cache_directory() / _LOCK)
        try:
            free.acquire(timeout=_patience_s, poll_interval=0.01)
            lock, _patience_s = free, _PATIENCE_S
        except Timeout:
            _patience_s = 0.0
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
