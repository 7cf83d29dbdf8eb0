"""Workers of this machine in processes of their own, where llama.cpp was built with RPC."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NO_RPC = "llama.cpp was built without RPC: make clean install"


@dataclass(frozen=True)
class LocalWorker:
    """A worker, and its process."""

    port: int
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def local_worker(*options: str, port: int = 0) -> Iterator[LocalWorker]:
    """A worker on a port, a free one unless it is named, with these options of its command."""
    command = [sys.executable, "-m", "edgespec.cli.main", "worker", "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            told = []
            for line in process.stderr:
                told.append(line)
                if found := re.search(r" at \S+:(\d+);", line):
                    yield LocalWorker(int(found[1]), process)
                    return
            raise RuntimeError(f"the worker did not start: {''.join(told)}")
        finally:
            process.kill()
