"""Products of quantized weights: every instruction set of this processor against the reference."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.memory.device.llama_binary import library_folder

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "backends" / "kernels"
# Without contraction: a product and a sum are rounded alike by every compiler.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The check, compiled."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("kernels") / "check_products"
    sources = [Path(__file__).with_name("check_products.cpp"), *sorted(KERNELS.glob("*.cpp"))]
    command = [compiler, *FLAGS, f"-I{KERNELS}", *map(str, sources), "-ldl", "-o", str(path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (built.returncode, built.stderr) == (0, "")
    return path


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_products_are_those_of_the_reference_bit_for_bit(program: Path) -> None:
    """For seven types, any number of columns, and any split of the rows."""
    assert run(program).endswith("\n0 failures\n")


def test_the_reference_reads_blocks_as_ggml_does(program: Path) -> None:
    folder = library_folder()
    found = sorted(folder.glob("libggml-base.*")) if folder is not None else []
    if not found:
        pytest.skip("this build of llama.cpp has no libggml-base of its own")
    shown = run(program, str(found[0]))
    assert "ggml: yes" in shown and shown.endswith("\n0 failures\n")
