"""`make`: which Python it takes before anything is installed, and what it compiles."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.memory.device import host

MAKEFILE = Path(__file__).parents[1] / "Makefile"
pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or not MAKEFILE.exists(), reason="needs make and the checkout"
)


def python(path: Path, version: tuple[int, int], installs: str = "exit 1") -> Path:
    """A program that answers as a Python of that version; what it installs fails by itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = f"{version[0]}.{version[1]}"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  *sys.exit*) exit {int(version < (3, 10))};;\n"
        f"  *print*) echo {number}; exit 0;;\n"
        f"esac\n{installs}\n"
    )
    path.chmod(0o755)
    return path


def make(
    folder: Path, *arguments: str, target: str = "run", **variables: str
) -> subprocess.CompletedProcess[str]:
    shutil.copy(MAKEFILE, folder)
    (folder / "pyproject.toml").write_text('dependencies = ["llama-cpp-python==1.2.3"]\n')
    for name in ("edge", "backends", "memory", "quantize", "cli", "models"):
        (folder / name).mkdir(exist_ok=True)
    return subprocess.run(
        [shutil.which("make") or "make", target, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_first_line_says_which_python_is_needed_and_which_was_found(tmp_path: Path) -> None:
    done = make(tmp_path, f"PYTHON={python(tmp_path / 'old', (3, 8))}")
    first = done.stderr.splitlines()[0]
    assert "error: edgespec needs Python 3.10 or newer" in first and "is Python 3.8" in first
    assert "hint: " in done.stderr and "PYTHON=" in done.stderr
    assert done.returncode and not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = make(tmp_path, "PYTHON=no-such-python")
    assert "no-such-python was not found" in done.stderr.splitlines()[0]


def test_an_environment_of_an_old_python_is_made_anew(tmp_path: Path) -> None:
    """The new one is only begun: what would be installed fails at once."""
    python(tmp_path / ".venv" / "bin" / "python", (3, 8))
    (tmp_path / ".venv" / "installed-by-another").touch()
    new = python(tmp_path / "new", sys.version_info[:2], 'echo begun "$@" >&2; exit 1')
    done = make(tmp_path, f"PYTHON={new}")
    assert "is of another Python (3.8): made anew" in done.stderr
    assert "begun -m venv .venv" in done.stderr
    assert not (tmp_path / ".venv" / "installed-by-another").exists()


def test_a_good_environment_stays_whatever_the_systems_python_is(tmp_path: Path) -> None:
    used = python(tmp_path / ".venv" / "bin" / "python", (3, 12))
    shutil.copy(python(tmp_path / "old", (3, 8)), tmp_path / "python3")
    done = make(tmp_path, f"PATH={tmp_path}:/usr/local/bin:/usr/bin:/bin")
    assert "made anew" not in done.stderr and "needs Python" not in done.stderr
    assert used.exists()


def test_an_environment_of_another_python_than_the_one_that_is_named_is_made_anew(
    tmp_path: Path,
) -> None:
    python(tmp_path / ".venv" / "bin" / "python", (3, 11))
    done = make(tmp_path, f"PYTHON={python(tmp_path / 'new', (3, 12))}")
    assert "is of another Python (3.11): made anew" in done.stderr


@pytest.mark.parametrize("compiler", ["c++", ""])
def test_ready_wheels_are_taken_and_without_a_compiler_edgespecs_own(
    tmp_path: Path, compiler: str
) -> None:
    """A path with the usual programs and no compiler, or one that is there."""
    needed = "sh sed cut cksum cat find sort grep head tail date mkdir rm touch sleep uname test"
    (tmp_path / "dist").mkdir()
    for name in f"{needed} {compiler}".split():
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    python(tmp_path / ".venv" / "bin" / "python", (3, 12), f'echo "$@" >>{tmp_path}/said')
    (tmp_path / "dist" / f"llama_cpp_python-1-py3-none-{platform.machine()}.whl").touch()
    done = make(tmp_path, PATH=str(tmp_path))
    takes = "avx2" in host.cpu_flags() or platform.machine() != "x86_64"
    assert ("with the wheels in dist" in done.stderr) == takes
    if takes:
        installs = (tmp_path / "said").read_text().splitlines()[-1]
        what = "-e .[demo,hub,serve]" if compiler else "edgespec[demo,hub,serve]"
        assert installs.startswith(f"-m pip install --no-compile --find-links dist {what}")
    other = make(tmp_path, "ARCH=riscv64", target="dist", PATH=str(tmp_path))
    assert other.returncode and "apt install g++-riscv64-linux-gnu" in other.stderr


# Writes down what it is asked for; a wheel is a file of that name, and installed without a trace.
# The checkout's kernels are compiled unless they are there.
INSTALLS = """\
echo "$CMAKE_ARGS $@" >>pip.log
case "$*" in
  *-e*) ls build/kernels-1 || { mkdir -p build/kernels-1; touch build/kernels-1/a.o compiled; };;
esac
while [ $# -gt 1 ]; do
  [ "$1" != --wheel-dir ] || { mkdir -p "$2" && touch "$2/llama_cpp_python-1.2.3-any.whl"; }
  shift
done
exit 0"""


def installed(folder: Path, cache: Path, **variables: str) -> tuple[list[str], list[str]]:
    """What a new checkout with an empty environment compiles, and which wheels it installs."""
    python(folder / ".venv" / "bin" / "python", sys.version_info[:2], INSTALLS)
    done = make(folder, target="install", EDGESPEC_CACHE=str(cache), **variables)
    assert done.returncode == 0, done.stderr
    lines = (folder / "pip.log").read_text().splitlines()
    return (
        [line for line in lines if "-m pip wheel" in line],
        [line.rpartition("/llama.cpp/")[2] for line in lines if line.endswith(".whl")],
    )


def test_llama_cpp_is_compiled_once_for_its_flags_and_with_workers(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (first,), wheels = installed(tmp_path / "one", cache)
    assert "-DGGML_RPC=ON" in first and first.endswith("llama-cpp-python==1.2.3")
    assert installed(tmp_path / "other", cache) == ([], wheels)
    (gpu,), others = installed(tmp_path / "gpu", cache, CMAKE_ARGS="-DGGML_CUDA=ON")
    assert "-DGGML_CUDA=ON" in gpu and "-DGGML_RPC=ON" in gpu
    assert len(wheels) == len(others) == 1 and wheels != others


def test_kernels_are_compiled_once_for_their_sources(tmp_path: Path) -> None:
    compiled = []
    for name, source in (("one", "int a;"), ("other", "int a;"), ("changed", "int b;")):
        kernels = tmp_path / name / "backends" / "kernels"
        kernels.mkdir(parents=True)
        (kernels / "a.cpp").write_text(source)
        installed(tmp_path / name, tmp_path / "cache")
        compiled.append((tmp_path / name / "compiled").exists())
    assert compiled == [True, False, True]


def test_a_llama_cpp_that_somebody_installed_stays(tmp_path: Path) -> None:
    packages = tmp_path / "own" / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / "llama_cpp_python-1.2.3.dist-info").mkdir(parents=True)
    assert installed(tmp_path / "own", tmp_path / "cache") == ([], [])


def test_what_is_known_of_types_is_kept_for_another_checkout(tmp_path: Path) -> None:
    known = []
    for name in ("one", "other"):
        looks = "mkdir -p .mypy_cache; echo $@ >>.mypy_cache/known"
        python(tmp_path / name / ".venv" / "bin" / "mypy", sys.version_info[:2], looks)
        done = make(tmp_path / name, target="types", EDGESPEC_CACHE=str(tmp_path / "cache" / "new"))
        assert done.returncode == 0, done.stderr
        known += [len((tmp_path / name / ".mypy_cache" / "known").read_text().splitlines())]
    assert known == [2, 4]
