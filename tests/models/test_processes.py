"""Modules that are started as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.models.processes import start_module

_LIMIT_S = 60.0


def test_a_folder_of_scripts_does_not_stand_in_for_modules(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')\n")
    if sys.version_info < (3, 11):
        pytest.skip("needs PYTHONSAFEPATH")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        process = start_module("json.tool", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        out, _ = process.communicate(b'{"a": 1}', timeout=_LIMIT_S)
    finally:
        os.chdir(before)
    assert json.loads(out) == {"a": 1} and process.returncode == 0
