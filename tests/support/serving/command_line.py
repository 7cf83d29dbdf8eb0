"""The command line in this process and in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edgespec.memory.device.kernels import missing_kernels

ESCAPE = "\x1b"


class Done(NamedTuple):
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as one JSON document on one line, and nothing else."""
        assert self.out.endswith("\n") and self.out.count("\n") == 1
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Command = Callable[..., Done]


def with_imports() -> dict[str, str]:
    """The environment of a process of Python that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def start(arguments: Sequence[str], cache: str, **environment: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "edgespec.cli.main", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EDGESPEC_CACHE": cache, "COLUMNS": "100", **environment},
    )


def without_stdin(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """A command that has a prompt waits for the end of what may be piped in beside it."""
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    return process


def run(*arguments: str, cache: str, stdin: str = "", **environment: str) -> Done:
    process = start(arguments, cache, **environment)
    out, err = process.communicate(stdin.encode(), timeout=120)
    return Done(process.returncode, out.decode(), err.decode())


CHOICES = {"backend", "head",
    "kv_type", "threads", "drafter", "draft_max", "gpu_layers", "batch_size", "context_size",
    "mapped", "device", "kernels",
}  # fmt: skip
COMPONENTS = {
    "weights", "kv_cache", "compute", "work", "logits", "drafter_tables", "text", "runtime",
}  # fmt: skip
EXACT = {"kv_cache"}  # components that are no ceilings
if not missing_kernels():  # which pack all weights of the embedded model
    COMPONENTS.add("weights_repacked")
    EXACT |= {"weights", "weights_repacked"}


def first_column(block: str) -> list[str]:
    """What begins a line; wrapped lines are indented."""
    lines = [line for line in block.splitlines() if not line.startswith(" ")]
    return [line.split("  ")[0] for line in lines]
