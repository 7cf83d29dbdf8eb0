"""The package as a program and by its version."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import edgespec


def test_the_version_is_that_of_the_installation() -> None:
    assert edgespec.__version__ == version("edgespec")


def test_what_a_person_sees_is_what_is_public() -> None:
    """Not what the module imports for itself, such as `Any`."""
    shown = [name for name in dir(edgespec) if not name.startswith("_")]
    assert shown == sorted(edgespec.__all__) and "__version__" in dir(edgespec)


def test_python_runs_it_as_a_module() -> None:
    command = [sys.executable, "-m", "edgespec", "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and version("edgespec") in done.stdout
