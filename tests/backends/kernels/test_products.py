"""Products of quantized weights: every instruction set of this processor against the reference."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.memory.device.llama_binary import library_folder

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "backends" / "kernels"
# Without contraction: a product and a sum are rounded alike by every compiler.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra"]


SETS = ["amx_int8", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dotprod", "scalar"]


def build(folder: Path, compiler: str, *options: str) -> Path:
    """The check, compiled. Skips where there is no such compiler; no warning is allowed."""
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler}")
    path = folder / "check_products"
    sources = [Path(__file__).with_name("check_products.cpp"), *sorted(KERNELS.glob("*.cpp"))]
    command = [found, *FLAGS, *options, f"-I{KERNELS}", *map(str, sources), "-ldl", "-o", str(path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (built.returncode, built.stderr) == (0, "")
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("kernels"), "c++")


def run(*command: str | Path, instructions: str | None = None) -> str:
    """What the check prints."""
    environment = dict(os.environ, EDGESPEC_KERNELS_ISA=instructions or "")
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


@pytest.mark.parametrize("instructions", SETS)
def test_products_are_those_of_the_reference_bit_for_bit(program: Path, instructions: str) -> None:
    """For seven types, any number of columns and split of rows, and values that are not finite."""
    shown = run(program, instructions=instructions)
    if f"instructions: {instructions}," not in shown:
        pytest.skip(f"this processor has no {instructions}")
    assert shown.endswith("\n0 failures\n")


@pytest.mark.slow
def test_products_by_avx2_where_there_is_nothing_better(program: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("not an x86-64 processor")
    shown = run(emulator("qemu-x86_64"), "-cpu", "max", program)
    assert "instructions: avx2," in shown and shown.endswith("\n0 failures\n")


@pytest.mark.slow
def test_products_by_neon(tmp_path: Path) -> None:
    arm = emulator("qemu-aarch64")
    program = build(tmp_path, "aarch64-linux-gnu-g++", "-static", "-Wl,--no-warnings")
    for instructions in ["neon_i8mm", "neon_dotprod"]:
        shown = run(arm, "-cpu", "max", program, instructions=instructions)
        assert f"instructions: {instructions}," in shown and shown.endswith("\n0 failures\n")


def test_the_reference_reads_blocks_as_ggml_does(program: Path) -> None:
    folder = library_folder()
    found = sorted(folder.glob("libggml-base.*")) if folder is not None else []
    if not found:
        pytest.skip("this build of llama.cpp has no libggml-base of its own")
    shown = run(program, str(found[0]))
    assert "ggml: yes" in shown and shown.endswith("\n0 failures\n")


def test_pip_compiles_every_file() -> None:
    named = set(re.findall(r'"(backends/kernels/[^"]+)"', (ROOT / "pyproject.toml").read_text()))
    files = [*KERNELS.glob("*.cpp"), *KERNELS.glob("*.h")]
    assert named == {file.relative_to(ROOT).as_posix() for file in files}
