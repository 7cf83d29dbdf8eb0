"""Whether this process has kernels, as plans see it: one answer, whatever was asked before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgespec.memory.device import kernels
from edgespec.memory.device.kernels import (
    attends,
    missing_kernels,
    packed_bytes,
    refuse_kernels,
)

Q4_0 = 2


def test_sizes_follow_an_error_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also sizes that were asked for before it, and those that were first asked for under it."""
    if reason := missing_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
    shapes = [(Q4_0, 1024, 64), (Q4_0, 4096, 224)]
    known = packed_bytes(*shapes[0])
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_missing", [])
        refuse_kernels("another version")
        assert missing_kernels() == "another version"
        assert [packed_bytes(*shape) for shape in shapes] == [0, 0]
        assert not attends(64, 64)
    assert missing_kernels() == ""
    assert packed_bytes(*shapes[0]) == known > 0
    assert packed_bytes(*shapes[1]) > 0
    assert attends(64, 64)


@pytest.mark.model
def test_a_model_loaded_for_something_else_keeps_no_kernels_out() -> None:
    """llama.cpp lists its buffer types with the first model, here one that texts are scored by."""
    code = """
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.models.embedded import embedded_model
from edgespec.quantize.context import EvalContext

EvalContext(embedded_model(), context_size=256, batch_size=32, threads=1).close()
print(refusal_of_kernels())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout != "a model was loaded before them\n"


def test_without_a_compiled_library_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "None: cannot open shared object file"."""
    monkeypatch.setattr(kernels, "kernel_library", lambda: None)
    with pytest.raises(OSError, match="were not compiled"):
        kernels.open_library()
