"""Files of a hub and of the caches of other programs."""

from __future__ import annotations

from pathlib import Path

from edgespec.models.hub import fetching


def write(path: Path, text: str = "GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


NAME = "owner/Tiny-GGUF"


def fetch(tag: str = "") -> Path:
    return fetching.fetch(fetching.find(NAME, tag))
