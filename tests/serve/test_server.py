"""A server in a program, where its packages are missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgespec.errors import UnsupportedError
from edgespec.serve.access import is_loopback, local_hosts
from edgespec.serve.server import bind, check_exposure

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


def test_only_this_machine_uses_a_server_without_a_key() -> None:
    assert is_loopback("127.0.0.5") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    assert local_hosts("0.0.0.0") == ()
    check_exposure("127.0.0.1", ())
    check_exposure("0.0.0.0", ("key",))
    with pytest.raises(UnsupportedError, match=r"others could use a server on 0\.0\.0\.0"):
        check_exposure("0.0.0.0", ())


def test_a_port_in_use_is_told() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnsupportedError, match=f"port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(UnsupportedError, match="cannot listen"):
        bind("127.0.0.1", 70000)
