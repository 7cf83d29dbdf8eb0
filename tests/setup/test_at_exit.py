"""Models that are still open when Python ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from random_gguf import Q8_0, write_model

PROGRAM = """
import sys
import edgespec
from edgespec.measure import timing

timing._LOOK_SECONDS = 0.0


class Holder:
    def __init__(self) -> None:
        self.engine = edgespec.load(sys.argv[1], context_size=256, drafter="none")

    def __del__(self) -> None:
        self.engine.close()


holder = Holder()
holder.engine.generate("hi", max_tokens=2)
sys.modules["kept"] = holder  # until nothing can be imported any more
"""


@pytest.mark.model
def test_a_model_that_is_closed_at_the_end_says_nothing(tmp_path: Path) -> None:
    """Its destructor came when modules were gone, and left a traceback."""
    model = write_model(tmp_path / "model.gguf", "llama", Q8_0, reads_bytes=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
