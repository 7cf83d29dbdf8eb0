"""Folders for what is made once for a run, by whichever of its processes comes first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """One folder of that name for a run: workers of pytest-xdist have roots below a common one."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    folder.mkdir(exist_ok=True)
    return folder
