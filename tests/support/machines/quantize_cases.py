"""What tests of quantizing share: a conversation, matrices, and the command with little work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_gguf import VOCABULARY
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.files import comparison, quantizing
from edgespec.memory.device import host
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.gguf.writer import Value, write_gguf
from edgespec.quantize import step_times
from edgespec.quantize.texts import Chat

CHAT = Chat(before=[1, 2], between=[3, 4], ends=frozenset({VOCABULARY - 1}), openings=[[5, 6]])


def write_matrix(path: Path, entries: dict[str, tuple[int, list[float]]]) -> Path:
    """An importance matrix of counts and sums by tensor."""
    tensors = {}
    for name, (count, sums) in entries.items():
        tensors[f"{name}.in_sum2"] = np.array([sums], np.float32)
        tensors[f"{name}.counts"] = np.array([[count]], np.float32)
    keys: dict[str, Value] = {"imatrix.datasets": ["data"], "imatrix.chunk_count": 7}
    write_gguf(path, keys, tensors)
    return path


def little_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As much measuring as a test can afford."""
    monkeypatch.delenv("EDGESPEC_DATA", raising=False)
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quantizing, "_FIT_TEXTS", 2)
    monkeypatch.setattr(comparison, "TEXTS", 2)
    monkeypatch.setattr(comparison.held_out, "__defaults__", (2,))
    monkeypatch.setattr(step_times, "_FLUSHED_FLOATS", 1)
    monkeypatch.setattr(step_times, "_REPEATS", 1)
    monkeypatch.setattr(host, "usable_cores", lambda: 1)


class Clock:
    """A clock that goes on by so much whenever it is looked at."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
