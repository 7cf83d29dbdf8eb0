"""Processes of our own that do one job: how they are started, and what they say.

They speak over what was their stdout. Whatever else prints there, such as a library, goes to their
stderr, so that it is never taken for a message. Ctrl-C is their parent's business, which ends them;
they end by themselves when nobody reads them any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

# The folder a person happens to be in is no place to import from.
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def start_module(
    module: str, *arguments: str, environment: dict[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Run a module, its messages in a pipe; `streams` say where stdin (nothing) and stderr go."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, **_SAFE_PATH, **(environment or {})},
        **{"stdin": subprocess.DEVNULL, **streams},
    )


@contextmanager
def importing_safely() -> Iterator[None]:
    """For what `multiprocessing` starts meanwhile: it passes this environment on."""
    before = {name: os.environ.get(name) for name in _SAFE_PATH}
    os.environ.update(_SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def stand_back() -> None:
    """Called first of all in such a process: stdout and Ctrl-C are its parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def messages_out() -> BinaryIO:
    """Called first of all in such a process: where it writes what its parent reads."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    stand_back()
    return out
