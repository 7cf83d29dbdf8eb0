"""Memory that was there when a run was planned, and is not when it is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from random_gguf import Q8_0, write_model

from edgespec.backends.llama import context
from edgespec.backends.llama.library import LIBRARY_LOG
from edgespec.errors import DoesNotFitError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")

# The limit is set once everything is open that a process needs besides.
PROGRAM = """
import resource, sys
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
from edgespec.backends.llama.library import library
from edgespec.errors import DoesNotFitError

path, room = sys.argv[1], int(sys.argv[2])
LlamaBackend(path, RunConfig(256, 32, max_nodes=4, gpu_layers=0)).close()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
try:
    LlamaBackend(path, RunConfig(1 << 20, 32, max_nodes=4, gpu_layers=0, mapped=False))
except DoesNotFitError as problem:
    print(problem, problem.hint, sep="\\n")
"""


@pytest.mark.model
def test_a_device_that_is_full_is_an_error_with_a_hint(tmp_path: Path) -> None:
    """llama.cpp ends neither the process, nor is the file called too new."""
    file = write_model(tmp_path / "m.gguf", "llama", Q8_0, reads_bytes=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), str(64 << 20)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    error, hint = done.stdout.splitlines()
    assert error.startswith("llama.cpp cannot make a context of 1048576 tokens: ")
    assert "failed to allocate" in error
    assert re.fullmatch(r"this process may use \d+ MiB of addresses: raise `ulimit -v` .*", hint)


@pytest.mark.parametrize(
    "words", ["error loading model vocabulary: std::bad_alloc", "unable to allocate X"]
)
def test_no_memory_is_no_newer_architecture(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIBRARY_LOG, "problem", lambda: words)
    assert isinstance(context._failure("it cannot be loaded", "it is newer"), DoesNotFitError)
    monkeypatch.setattr(LIBRARY_LOG, "problem", lambda: "unknown architecture")
    assert context._failure("it cannot be loaded", "it is newer").hint == "it is newer"
