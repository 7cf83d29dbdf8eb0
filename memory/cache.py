"""Small JSON documents kept between runs: measured curves and calibration.

They live in the user's cache directory (`EDGESPEC_CACHE` overrides it), are written atomically, and
are never needed: an unreadable or damaged one is measured again, an unwritable directory is
ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_directory() -> Path:
    """Where edgespec keeps what it measured."""
    if override := os.environ.get("EDGESPEC_CACHE"):
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("edgespec", appauthor=False))


def _path(kind: str, key: str) -> Path:
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return cache_directory() / kind / f"{digest}.json"


def load(kind: str, key: str) -> dict[str, Any] | None:
    """The document stored under `kind` and `key`, or None."""
    try:
        document = json.loads(_path(kind, key).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(document, dict) and document.get("key") == key
    return document if is_ours else None


def store(kind: str, key: str, document: dict[str, Any]) -> None:
    """Keep `document` for the next run, if the directory can be written."""
    path = _path(kind, key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({**document, "key": key}, file)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # it is there only if something went wrong
                os.unlink(temporary)


def remove(kind: str, key: str) -> None:
    """Forget a document."""
    with contextlib.suppress(OSError):
        _path(kind, key).unlink()
