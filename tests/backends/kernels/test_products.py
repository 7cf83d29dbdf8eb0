"""Products of quantized weights: every instruction set of this processor against the reference."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
from compiled_kernels import (
    CHECKS,
    FLAGS,
    KERNELS,
    SANITIZERS,
    compile_kernels,
    emulator,
    link_check,
    run,
    run_on_arm,
)

from edgespec.memory.device.llama_binary import library_folder

pytestmark = pytest.mark.timeout(600)  # where the kernels have to be compiled
ROOT = Path(__file__).parents[3]
SETS = ["amx_int8", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dotprod"]


@pytest.fixture(scope="module")
def program(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_check(tmp_path_factory.mktemp("check"), "check_products", objects, "c++")


@pytest.mark.parametrize("instructions", SETS)
def test_products_are_those_of_the_reference_bit_for_bit(program: Path, instructions: str) -> None:
    """For every type, any number of columns and split of rows, and values that are not finite."""
    shown = run(program, instructions=instructions)
    if f"instructions: {instructions}," not in shown:
        pytest.skip(f"this processor has no {instructions}")
    assert shown.endswith("\n0 failures\n")


@pytest.mark.long
def test_products_by_avx2_where_there_is_nothing_better(program: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("emulates programs of this processor, which is not x86-64")
    shown = run(emulator("qemu-x86_64"), "-cpu", "max", program)
    assert "instructions: avx2," in shown and shown.endswith("\n0 failures\n")


@pytest.mark.long
@pytest.mark.parametrize("instructions", ["neon_i8mm", "neon_dotprod"])
def test_products_by_neon(tmp_path: Path, instructions: str) -> None:
    shown = run_on_arm(tmp_path, "check_products", instructions=instructions)
    assert shown.endswith("\n0 failures\n"), shown


def test_the_reference_reads_blocks_as_ggml_does(program: Path) -> None:
    folder = library_folder()
    found = sorted(folder.glob("libggml-base.*")) if folder is not None else []
    shown = run(program, *found[:1], instructions="scalar")
    assert shown.endswith("\n0 failures\n")
    if not found:
        pytest.skip("this build of llama.cpp has no libggml-base of its own")
    assert "ggml: yes" in shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "instructions", "header", "needed"),
    [
        ("amx", "amx_int8", "emulated_amx.h", "AVX-512 VNNI"),
        ("avx_vnni", "avx_vnni", "emulated_vnni.h", "AVX2"),
    ],
)
def test_products_by_emulated_instructions(
    objects: list[Path], tmp_path: Path, source: str, instructions: str, header: str, needed: str
) -> None:
    """AMX's tiles and AVX-VNNI's products in software; the rest is this processor's."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        pytest.skip("AMX exists on x86-64 alone, and a program asks Linux for it")
    made = tmp_path / f"{source}.o"
    command = [
        "c++",
        *FLAGS,
        "-O1",
        "-include",
        CHECKS / header,
        "-Wno-unused-variable",
        "-c",
        KERNELS / f"{source}.cpp",
        "-o",
        made,
    ]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    others = [path for path in objects if path.name != made.name]
    checked = link_check(tmp_path, "check_products", [made, *others], "c++")
    shown = run(checked, instructions=instructions)
    if f"instructions: {instructions}," not in shown:
        pytest.skip(f"this processor has no {needed}")
    assert shown.endswith("\n0 failures\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "instructions"),
    [("products", "avx512_vnni"), ("products", "avx2"), ("attention", "avx512_vnni")],
)
def test_sanitizers_report_nothing(tmp_path: Path, check: str, instructions: str) -> None:
    options = ("-O1", *SANITIZERS)
    built = compile_kernels("c++", *options)
    program = link_check(tmp_path, f"check_{check}", built, "c++", *options)
    arguments = ("8",) if check == "attention" else ()
    shown = run(program, *arguments, instructions=instructions)
    if instructions not in shown:
        pytest.skip(f"this processor has no {instructions}")
    assert shown.endswith("\n0 failures\n"), shown


def test_pip_compiles_every_file() -> None:
    named = set(re.findall(r'"(backends/kernels/[^"]+)"', (ROOT / "pyproject.toml").read_text()))
    files = [*KERNELS.glob("*.cpp"), *KERNELS.glob("*.h")]
    assert named == {file.relative_to(ROOT).as_posix() for file in files}
