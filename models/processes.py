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
from typing import Any, BinaryIO


def start_module(
    module: str, *arguments: str, environment: dict[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Run a module with its messages in a pipe; `streams` say where stdin (nothing) and stderr go.

    The folder a person happens to be in is no place for it to import from.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
        **{"stdin": subprocess.DEVNULL, **streams},
    )


def messages_out() -> BinaryIO:
    """Called first of all in such a process: where it writes what its parent reads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out
