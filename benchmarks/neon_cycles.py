"""Cycles of products by NEON on processors that are not at hand, as llvm-mca counts them.

    python benchmarks/neon_cycles.py [--llama SOURCE] [--mca llvm-mca-16]

A cell is the cycles of 16 rows by 32 columns of weights, for each column of activations: of the
inner loop, with all in the first cache. `SOURCE` is llama.cpp's: its plain dot products, and the
products of rearranged weights, are counted beside ours. llvm-mca knows no memory and no branches.
Where it has no model of a processor it takes that of an older one: LLVM 16 counts the Cortexes and
the N1 alike, as a Cortex-A57, and the M1 as Apple's first 64-bit core. It needs
aarch64-linux-gnu-g++.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSORS = ("cortex-a76", "cortex-a78", "neoverse-n1", "apple-m1")
TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4")
_COLUMNS = (1, 4)
_SETS = {"neon_dotprod": "Neon", "neon_i8mm": "NeonPairs"}
_MARCH = "-march=armv8.2-a+dotprod+i8mm+fp16"
_PRODUCTS = {"sdot": 16, "smmla": 32, "udot": 16}  # of bytes, of one instruction
_BLOCK = 16 * 32
_ITERATIONS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--llama", type=Path, help="llama.cpp's source")
    parser.add_argument("--mca", default="llvm-mca")
    arguments = parser.parse_args()
    print(f"| {'':<34} |" + "".join(f" {name:>11} |" for name in PROCESSORS))
    print("| --- |" + " ---: |" * len(PROCESSORS))
    with tempfile.TemporaryDirectory() as folder:
        listings = [_ours(Path(folder), name) for name in _SETS]
        if arguments.llama:
            listings += _theirs(arguments.llama / "ggml")
        for label, columns, body in sorted(_loops("\n".join(listings))):
            cycles = [_cycles(body, columns, arguments.mca, name) for name in PROCESSORS]
            print(f"| {label:<34} |" + "".join(f" {one:11.1f} |" for one in cycles))


def _ours(folder: Path, name: str) -> str:
    """The assembly of tiles of every type, half a panel each."""
    lines = [f'#include "{ROOT}/backends/kernels/{name}.cpp"', "namespace edgespec {"]
    for kind in TYPES:
        for n in _COLUMNS:
            lines.append(
                f'extern "C" __attribute__((flatten)) void edgespec__{kind}__{name}__{n}('
                "const uint8_t* a, int64_t b, Activations x, float* o, int64_t s) "
                f"{{ tile<{_SETS[name]}<0>, {kind}, 1, {n}>(a, b, x, o, s); }}"
            )
    source = folder / f"{name}.cpp"
    source.write_text("\n".join([*lines, "}"]))
    return _compiled(source, "-std=c++17", "-ffp-contract=off", f"-I{ROOT}/backends/kernels")


def _theirs(ggml: Path) -> list[str]:
    arm = ggml / "src/ggml-cpu/arch/arm"
    where = [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
    return [
        _compiled(arm / "quants.c", "-xc", "-std=c11", "-D_GNU_SOURCE", *where),
        _compiled(arm / "repack.cpp", "-std=c++17", *where),
    ]


def _compiled(source: Path, *options: str) -> str:
    command = ["aarch64-linux-gnu-g++", *options, "-O3", _MARCH, "-w", "-S", str(source), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(listing: str) -> list[tuple[str, int, str]]:
    """Of each function of products: what it is, its columns, and its inner loop."""
    found = []
    for match in re.finditer(r"^(\w+):\n(.*?)\.cfi_endproc", listing, re.M | re.S):
        name, body = match[1], _inner_loop(match[2].splitlines())
        ours = re.match(r"edgespec__(\w+)__(\w+)__(\d)$", name)
        theirs = re.match(r"ggml_(vec_dot|gemv|gemm)_(\w+?)_q8_[0K](_\w+)?$", name)
        if body and ours:
            label = f"{ours[1]} edgespec {ours[2].removeprefix('neon_')} n={ours[3]}"
            found.append((label, int(ours[3]), body))
        elif body and theirs and (theirs[2].split("_4x")[0].split("_8x")[0].upper() in TYPES):
            columns = 4 if theirs[1] == "gemm" else 1
            found.append((f"{theirs[2].upper()} llama.cpp {theirs[1]}", columns, body))
    return found


def _inner_loop(lines: list[str]) -> str:
    """The shortest loop with the most products of bytes."""
    places = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"([.\w]+):", line))}
    best: tuple[int, int, list[str]] = (0, 0, [])
    for end, line in enumerate(lines):
        branch = re.match(r"\t(?:b\.?\w*|cbn?z|tbn?z)\t(?:.*, )?([.\w]+)$", line)
        start = places.get(branch[1], end) if branch else end
        body = [one for one in lines[start:end] if re.match(r"\t[a-z]", one)]
        best = max(best, (_num_products(body), -len(body), body))
    return "\n".join(best[2]) if best[0] else ""


def _num_products(body: list[str]) -> int:
    return sum(_PRODUCTS.get(line.split()[0], 0) for line in body)


def _cycles(body: str, columns: int, mca: str, processor: str) -> float:
    """Cycles of 16 rows by 32 columns of weights, for each column of activations."""
    command = [mca, "-mtriple=aarch64", f"-mcpu={processor}", "-mattr=+dotprod,+i8mm,+fullfp16"]
    command += [f"-iterations={_ITERATIONS}", "-instruction-info=0", "-resource-pressure=0"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total, done.stdout
    return int(total[1]) / _ITERATIONS * _BLOCK / _num_products(body.splitlines())


if __name__ == "__main__":
    main()
