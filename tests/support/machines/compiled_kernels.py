"""The checks of the kernels, compiled with a C++ compiler of this machine or for another one."""

from __future__ import annotations

import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "backends" / "kernels"
CHECKS = Path(__file__).parents[2] / "backends" / "kernels"
# Of addresses and of undefined behaviour, but for what multiplies compile times.
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=all",
)
# Without contraction: a product and a sum are rounded alike by every compiler.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra"]
ARM_COMPILER = "aarch64-linux-gnu-g++"
_ARM_OPTIONS = ("-static", "-Wl,--no-warnings")


def built_kernels() -> list[Path]:
    """The objects that the installation has compiled from these sources, or none."""
    newest = max(
        path.stat().st_mtime for path in KERNELS.iterdir() if path.suffix in (".cpp", ".h")
    )
    names = [f"{source.stem}.o" for source in sorted(KERNELS.glob("*.cpp"))]
    for folder in ROOT.glob("build/kernels-*/backends/kernels"):
        objects = [folder / name for name in names]
        if all(path.exists() and path.stat().st_mtime > newest for path in objects):
            return objects
    return []


def compile_kernels(compiler: str, *options: str, only: tuple[str, ...] = ()) -> list[Path]:
    """The kernels' objects, compiled where a source, the compiler or an option is another one.

    Skips where there is no such compiler; no warning is allowed. `only` those of these names, for a
    check that needs no others: all take minutes.
    """
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler}")
    sources = [path for path in sorted(KERNELS.glob("*.cpp")) if not only or path.stem in only]
    command = [found, *FLAGS, *options, "-c", *map(str, sources)]
    version = subprocess.run([found, "--version"], capture_output=True, timeout=60).stdout
    stamp = sha256(b"".join((repr(command).encode(), version)))
    for path in (*sources, *sorted(KERNELS.glob("*.h"))):
        stamp.update(path.read_bytes())
    folder = ROOT / "build" / f"checks-{stamp.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{source.stem}.o" for source in sources]
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            built = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)
            assert (built.returncode, built.stderr) == (0, "")
            (folder / "done").touch()
    return objects


def link_check(folder: Path, name: str, objects: list[Path], compiler: str, *options: str) -> Path:
    """The program of `name`.cpp in that folder."""
    path, source = folder / name, CHECKS / f"{name}.cpp"
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


def run_on_arm(folder: Path, check: str, *arguments: str, instructions: str) -> str:
    """What a check prints on an emulated processor."""
    objects = compile_kernels(ARM_COMPILER)
    program = link_check(folder, check, objects, ARM_COMPILER, *_ARM_OPTIONS)
    emulated = (emulator("qemu-aarch64"), "-cpu", "max", program)
    shown = run(*emulated, *arguments, instructions=instructions)
    assert instructions in shown
    return shown


def emulator(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found
