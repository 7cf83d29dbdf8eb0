"""The checks of the kernels, compiled with a C++ compiler of this machine or for another one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

KERNELS = Path(__file__).parents[3] / "backends" / "kernels"
CHECKS = Path(__file__).parents[2] / "backends" / "kernels"
# Without contraction: a product and a sum are rounded alike by every compiler.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra"]
ARM_COMPILER = "aarch64-linux-gnu-g++"
_ARM_OPTIONS = ("-static", "-Wl,--no-warnings")


def compile_kernels(folder: Path, compiler: str, *options: str) -> list[Path]:
    """The kernels' objects, compiled by the first process that asks.

    Skips where there is no such compiler; no warning is allowed.
    """
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler}")
    sources = sorted(KERNELS.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    command = [found, *FLAGS, *options, "-c", *map(str, sources)]
    with FileLock(folder / "lock"):
        if not all(path.exists() for path in objects):
            built = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
            assert (built.returncode, built.stderr) == (0, "")
    return objects


def link_check(name: str, objects: list[Path], compiler: str, *options: str) -> Path:
    """The program of `name`.cpp, beside the objects."""
    path, source = objects[0].with_name(name), CHECKS / f"{name}.cpp"
    files = [str(source), *map(str, objects)]
    command = [compiler, *FLAGS, *options, f"-I{KERNELS}", *files, "-ldl", "-pthread"]
    built = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, timeout=300)
    assert (built.returncode, built.stderr) == (0, "")
    return path


def run(*command: str | Path, instructions: str | None = None) -> str:
    """What a check prints."""
    environment = dict(os.environ, EDGESPEC_KERNELS_ISA=instructions or "")
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_on_arm(check: str, objects: list[Path], *arguments: str, instructions: str) -> str:
    """What a check prints on an emulated processor."""
    program = link_check(check, objects, ARM_COMPILER, *_ARM_OPTIONS)
    emulated = (emulator("qemu-aarch64"), "-cpu", "max", program)
    shown = run(*emulated, *arguments, instructions=instructions)
    assert instructions in shown
    return shown


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found
