"""Attention over a cache against float64; what a token's result depends on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "backends" / "kernels"


def test_attention_is_that_of_float64_and_depends_on_what_is_seen_alone(tmp_path: Path) -> None:
    """Sixty shapes and masks: any step size, any threads, hidden cells anywhere."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "check_attention"
    sources = [Path(__file__).with_name("check_attention.cpp"), KERNELS / "attention.cpp"]
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra"]
    command = [compiler, *flags, f"-I{KERNELS}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (built.returncode, built.stderr) == (0, "")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    if "none here" in done.stdout:
        pytest.skip("this processor's attention is llama.cpp's")
    assert done.stdout.endswith("0 failures\n"), done.stdout
