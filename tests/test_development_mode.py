"""First answers in Python's development mode, whose allocator overwrites what was freed.

It finds addresses of what Python has freed already, and files and sockets that nobody closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import first_answers
import pytest
from random_gguf import Q8_0, write_model

DEVELOPMENT = {
    "PYTHONDEVMODE": "1",
    "PYTHONMALLOC": "debug",
    "PYTHONWARNINGS": "always::ResourceWarning",
}


@pytest.mark.slow
@pytest.mark.model
def test_first_answers_use_nothing_that_was_freed_and_leave_nothing_open(
    tmp_path: Path, measured_cache: Path
) -> None:
    """Of the library, `run`, `chat` from a pipe, `bench` and `serve`: one process has them all."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = write_model(tmp_path / "tiny.gguf", "llama", Q8_0, reads_bytes=True, template=template)
    done = subprocess.run(
        [sys.executable, first_answers.__file__, str(model)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, **DEVELOPMENT, "EDGESPEC_CACHE": str(measured_cache)},
        timeout=110,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "served 3" in done.stdout
    assert "overall" in done.stdout, "nothing was measured"
    assert "ResourceWarning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
