"""Which tests may skip in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

def test_of_a_machine():
    pytest.skip("llama.cpp sees no GPU here")

def test_of_a_package():
    pytest.skip("the wheel is not there")
"""


def test_a_skip_that_is_not_listed_fails_the_run(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-q"]
    config = ["-c", str(folder.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *config, str(tmp_path / "test_it.py")],
        env=os.environ | {"CI": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    told = done.stdout.split("short test summary")[0]
    assert "test_it.py::test_of_a_package: the wheel is not there" in told
    assert "test_of_a_machine" not in told
