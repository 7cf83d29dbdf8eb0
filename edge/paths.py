"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ replaced; as it is where there is no such home folder."""
    return Path(os.path.expanduser(path))
