"""A server in a program, where its packages are missing."""

from __future__ import annotations

import subprocess
import sys

# As where the extra was not installed: nothing of it is found, and importing it would fail.
PROGRAM = """
import importlib.util, sys

hidden = ("anyio", "starlette", "uvicorn")
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in hidden else found(name, *more)
sys.modules.update(dict.fromkeys(hidden))

import edgespec
from edgespec.backends.fake import FakeBackend
from edgespec.decode.engine import Engine

try:
    edgespec.Server(Engine(FakeBackend(lambda context: [0.0], 1)))
except edgespec.MissingDependencyError as problem:
    print(problem, "|", problem.hint)
"""


def test_missing_packages_are_a_sentence() -> None:
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    wanted = "a server needs the package starlette | pip install 'edgespec[serve]'\n"
    assert (made.stdout, made.stderr) == (wanted, "")
