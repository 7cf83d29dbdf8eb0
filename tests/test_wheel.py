"""A wheel holds everything that runs, and runs outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from sysconfig import get_platform

import pytest

import edgespec

ROOT = Path(__file__).parent.parent
KERNELS = Path("edgespec", "backends", "kernels")
PARTS = (*("backends", "cli", "edge", "memory", "models", "quantize"), "pyproject.toml")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy of the sources, so that nothing of earlier builds gets into it.

    But for the kernels, where this environment has them: compiling them takes two minutes.
    """
    copy, made = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in (*PARTS, "README.md", "LICENSE"):
        part = ROOT / name
        if part.is_dir():
            shutil.copytree(part, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(part, copy)
    built = copy / "build" / f"lib.{get_platform()}-{sys.implementation.cache_tag}" / KERNELS
    built.mkdir(parents=True)
    for library in (Path(edgespec.__file__).parents[1] / KERNELS).glob("_kernels.*"):
        shutil.copy(library, built)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", made, copy],
        check=True,
        capture_output=True,
    )
    return next(made.glob("edgespec-*.whl"))


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_what_they_read(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"edge": "edgespec", **{one: f"edgespec/{one}" for one in PARTS[:2] + PARTS[3:6]}}
    for folder, package in folders.items():
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".typed", ".html", ".css", ".js"):
                assert f"{package}/{file.relative_to(ROOT / folder).as_posix()}" in names
    assert "edgespec/models/smollm2-135m-head.gguf" in names
    assert "-cp310-abi3-" in wheel.name  # one for all versions
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


@pytest.mark.slow
@pytest.mark.model
def test_a_wheel_answers_outside_the_checkout(
    wheel: Path, tmp_path: Path, measured_cache: Path
) -> None:
    """Its packages are unpacked alone; what they need is that of this environment."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    start = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); "
        "import edgespec.cli.main as command; "
        "print(command.__file__, file=sys.stderr); command.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, "run", "Name three colours.", "--max-tokens", "8"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", "EDGESPEC_CACHE": str(measured_cache)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(tmp_path / "installed" / "edgespec" / "cli" / "main.py"))
    assert done.stdout.strip()
