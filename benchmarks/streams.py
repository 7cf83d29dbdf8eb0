"""Matrix products beside what limits them: memory and instructions. Commands of `backends.py`."""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from timeit import repeat
from typing import NamedTuple

import numpy as np

from edgespec.backends.llama.ggml_products import MatrixProduct, quantized
from edgespec.backends.llama.kernels import packed_type, refusal_of_kernels
from edgespec.memory.device import host
from edgespec.memory.device.kernels import instruction_set, packed_bytes
from edgespec.models.gguf.ggml_types import GGML_NUMBERS

ROOT = Path(__file__).parents[1]

# -- read loop -------------------------------------------------------------------------------

_LOOPS = """
#include <stdint.h>
uint64_t read_all(const uint64_t *at, int64_t count) {
    uint64_t sums[16] = {0};
    for (int64_t i = 0; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += at[i + j];
    uint64_t sum = 0;
    for (int j = 0; j < 16; j++) sum += sums[j];
    return sum;
}
// Golden Cove adds constants before they are executed, several in a cycle.
uint64_t add_up(int64_t count) {
    uint64_t sum = 1;
    for (int64_t i = 0; i < count; i += 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            sum += sum;
            __asm__ volatile("" : "+r"(sum));
        }
    }
    return sum;
}
"""


class ReadLoop:
    """A bare loop that reads as much memory as a product, on all cores; and the clock.

    A cloud machine's memory and clock change within seconds, so whatever is measured is measured
    between two of these.

    Args:
        num_bytes: of the memory, several times what the last cache holds.
    """

    def __init__(self, num_bytes: int) -> None:
        self.threads = host.usable_cores()
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder) / "loops.c", Path(folder) / "loops.so"
            source.write_text(_LOOPS)
            command = [
                "cc",
                "-O3",
                "-march=native",
                "-shared",
                "-fPIC",
                str(source),
                "-o",
                str(made),
            ]
            subprocess.run(command, check=True)
            library = ctypes.CDLL(str(made))
        self._read, self._add_up = library.read_all, library.add_up
        self._read.argtypes, self._add_up.argtypes = (
            [ctypes.c_void_p, ctypes.c_int64],
            [ctypes.c_int64],
        )
        share = num_bytes // 8 // self.threads
        self._parts = [np.ones(share, np.uint64) for _ in range(self.threads)]
        self._pool = ThreadPoolExecutor(self.threads)
        self.bytes_per_s()

    def bytes_per_s(self) -> float:
        """Bytes a second of all cores together, the better of two."""
        times = []
        for _ in range(2):
            start = perf_counter()
            list(self._pool.map(lambda part: self._read(part.ctypes.data, part.size), self._parts))
            times.append(perf_counter() - start)
        return sum(part.nbytes for part in self._parts) / min(times)

    def hertz(self) -> float:
        """Additions a second that wait for each other: a processor does one in a cycle."""
        count, times = 1 << 22, []
        for _ in range(3):
            start = perf_counter()
            self._add_up(count)
            times.append(perf_counter() - start)
        return count / min(times)


# -- streams ---------------------------------------------------------------------------------

_STREAMED = (1, 2, 3, 4, 5, 6, 8, 16)
_STREAM_COLUMNS = 1536


def streams() -> None:
    """Products of every type beside a bare read loop in the same seconds, and beside their limit.

    The limit is the larger of two times: reading the weights as fast as the loop, and the
    instructions of the inner loop at the clock, as llvm-mca counts them on this processor. A cell
    is how many times as long as the limit a product takes, and behind it the limit over reading:
    1.1 (1.0) waits for memory alone. Each is the median of some turns.
    """
    parser = argparse.ArgumentParser("backends.py streams")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--sizes", type=int, nargs="+", default=_STREAMED)
    parser.add_argument("--mib", type=int, default=96, help="of weights: more than the last cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mca", default="llvm-mca")
    arguments = parser.parse_args()
    if reason := refusal_of_kernels():
        raise SystemExit(f"no kernels here: {reason}")
    loop = ReadLoop(arguments.mib << 20)
    cycles = _cycles_here(arguments)
    print(f"{host.cpu_name()}, {instruction_set()}, {loop.threads} threads")
    print(f"| {'':<7} | GB/s |" + "".join(f" {f'n = {n}':>11} |" for n in arguments.sizes))
    print("| --- |" + " ---: |" * (len(arguments.sizes) + 1))
    for name in arguments.types:
        speed, cells = _streamed(name, loop, cycles, arguments)
        shown = "".join(f" {f'{over:.2f} ({limit:.2f})':>11} |" for over, limit in cells)
        print(f"| {name:<7} | {speed / 1e9:4.1f} |{shown}", flush=True)


def _streamed(
    name: str,
    loop: ReadLoop,
    cycles: dict[tuple[str, int], float],
    arguments: argparse.Namespace,
) -> tuple[float, list[tuple[float, float]]]:
    """The loop's bytes a second; by columns, time over the limit, and the limit over reading."""
    kind = GGML_NUMBERS[name]
    values = np.sin(np.arange(32 * _STREAM_COLUMNS) ** 1.7).astype(np.float32)
    few = quantized(kind, values.reshape(32, -1))
    copies = (arguments.mib << 20) // few.nbytes
    rows, data = 32 * copies, np.tile(few, copies)
    num_bytes, groups = packed_bytes(kind, rows, _STREAM_COLUMNS), rows / 16 * _STREAM_COLUMNS / 32
    speeds = []
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in arguments.sizes}
    with ExitStack() as opened:
        products = {
            n: opened.enter_context(
                MatrixProduct(
                    kind,
                    data,
                    (_STREAM_COLUMNS, rows),
                    tokens=n,
                    threads=loop.threads,
                    buffer_type=packed_type(),
                )
            )
            for n in arguments.sizes
        }
        for n, product in products.items():
            product(np.ones((n, _STREAM_COLUMNS), np.float32))
        for _ in range(arguments.rounds):
            before, hertz = loop.bytes_per_s(), loop.hertz()
            for n, product in products.items():
                took = min(repeat(product.compute, repeat=2, number=1))
                after = loop.bytes_per_s()
                speeds.append(after)
                reading = num_bytes / ((before + after) / 2)
                limit = max(reading, cycles.get((name, n), 0) * n * groups / loop.threads / hertz)
                found[n].append((took / limit, limit / reading))
                before = after
    cells = [tuple(map(statistics.median, zip(*pairs, strict=True))) for pairs in found.values()]
    return statistics.median(speeds), cells


# -- cycles ----------------------------------------------------------------------------------

PROCESSORS = ("cortex-a76", "cortex-a78", "neoverse-n1", "apple-m1")
TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4")
_COLUMNS = (1, 4)
_SETS = {
    "neon_dotprod": "Neon<0>",
    "neon_i8mm": "NeonPairs<0>",
    "avx2": "Avx2",
    "avx_vnni": "Vector256<Quads>",
    "avx512_vnni": "Avx512",
}
_BLOCK = 16 * 32
_ITERATIONS = 200


class _Machine(NamedTuple):
    """How code of a kind of processors is compiled, read and counted."""

    compiler: tuple[str, ...]
    branch: str  # a conditional one, and where it goes
    products: dict[str, int]  # of bytes, of one instruction; of vectors of 512 bits twice as many
    mca: tuple[str, ...]


_ARM = _Machine(
    ("aarch64-linux-gnu-g++", "-march=armv8.2-a+dotprod+i8mm+fp16"),
    r"\t(?:b\.?\w*|cbn?z|tbn?z)\t(?:.*, )?([.\w]+)$",
    {"sdot": 16, "smmla": 32, "udot": 16},
    ("-mtriple=aarch64", "-mattr=+dotprod,+i8mm,+fullfp16"),
)
_X86 = _Machine(
    ("c++", "-march=native"),
    r"\tj\w+\t([.\w]+)$",
    {"vpmaddubsw": 32, "vpdpbusd": 32},
    ("-mtriple=x86_64",),
)


def cycles() -> None:
    """Cycles of products by NEON on processors that are not at hand, as llvm-mca counts them.

    A cell is the cycles of 16 rows by 32 columns of weights, for each column of activations: of
    the inner loop, with all in the first cache. `SOURCE` is llama.cpp's: its plain dot
    products, and the products of rearranged weights, are counted beside ours. llvm-mca knows no
    memory and no branches. Where it has no model of a processor it takes that of an older one:
    LLVM 16 counts the Cortexes and the N1 alike, as a Cortex-A57, and the M1 as Apple's first
    64-bit core. It needs aarch64-linux-gnu-g++.
    """
    parser = argparse.ArgumentParser("backends.py cycles")
    parser.add_argument("--llama", type=Path, help="llama.cpp's source")
    parser.add_argument("--mca", default="llvm-mca")
    arguments = parser.parse_args()
    print(f"| {'':<34} |" + "".join(f" {name:>11} |" for name in PROCESSORS))
    print("| --- |" + " ---: |" * len(PROCESSORS))
    with tempfile.TemporaryDirectory() as folder:
        sets = ("neon_dotprod", "neon_i8mm")
        listings = [_ours(Path(folder), _ARM, name, TYPES, _COLUMNS) for name in sets]
        if arguments.llama:
            listings += _theirs(arguments.llama / "ggml")
        for label, columns, body in sorted(_loops("\n".join(listings), _ARM)):
            cycles = [_cycles(body, columns, _ARM, arguments.mca, name) for name in PROCESSORS]
            print(f"| {label:<34} |" + "".join(f" {one:11.1f} |" for one in cycles))


_WIDEST = 6  # columns of a tile that are counted; more take several


def _cycles_here(arguments: argparse.Namespace) -> dict[tuple[str, int], float]:
    """As `_cycles`, of this processor's set, by type and columns; empty where nobody can count."""
    name = instruction_set().replace("amx_int8", "avx512_vnni")  # of few columns
    if name not in _SETS or shutil.which(arguments.mca) is None:
        return {}
    machine = _ARM._replace(compiler=("c++", "-march=native")) if name.startswith("neon") else _X86
    tiles = {n: -(-n // -(-n // _WIDEST)) for n in arguments.sizes}
    with tempfile.TemporaryDirectory() as folder:
        listing = _ours(Path(folder), machine, name, arguments.types, sorted(set(tiles.values())))
    counted = {
        (label.split()[0], columns): _cycles(body, columns, machine, arguments.mca, "native")
        for label, columns, body in _loops(listing, machine)
    }
    return {
        (kind, n): counted[kind, tile]
        for n, tile in tiles.items()
        for kind in arguments.types
        if (kind, tile) in counted
    }


def _ours(
    folder: Path, machine: _Machine, name: str, types: Sequence[str], columns: Sequence[int]
) -> str:
    """The assembly of tiles of types and columns, by NEON of half a panel each."""
    lines = [f'#include "{ROOT}/backends/kernels/{name}.cpp"', "namespace edgespec {"]
    for kind in types:
        for n in columns:
            lines.append(
                f'extern "C" __attribute__((flatten)) void edgespec__{kind}__{name}__{n}('
                "const uint8_t* a, int64_t b, Activations x, float* o, int64_t s) "
                f"{{ tile<{_SETS[name]}, {kind}, 1, {n}>(a, b, x, o, s); }}"
            )
    source = folder / f"{name}.cpp"
    source.write_text("\n".join([*lines, "}"]))
    return _compiled(
        source, machine, "-std=c++17", "-ffp-contract=off", f"-I{ROOT}/backends/kernels"
    )


def _theirs(ggml: Path) -> list[str]:
    arm = ggml / "src/ggml-cpu/arch/arm"
    where = [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
    return [
        _compiled(arm / "quants.c", _ARM, "-xc", "-std=c11", "-D_GNU_SOURCE", *where),
        _compiled(arm / "repack.cpp", _ARM, "-std=c++17", *where),
    ]


def _compiled(source: Path, machine: _Machine, *options: str) -> str:
    command = [*machine.compiler, *options, "-O3", "-w", "-S", str(source), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(listing: str, machine: _Machine) -> list[tuple[str, int, str]]:
    """Of each function of products: what it is, its columns, and its inner loop."""
    found = []
    for match in re.finditer(r"^(\w+):\n(.*?)\.cfi_endproc", listing, re.M | re.S):
        name, body = match[1], _inner_loop(match[2].splitlines(), machine)
        ours = re.match(r"edgespec__(\w+)__(\w+)__(\d)$", name)
        theirs = re.match(r"ggml_(vec_dot|gemv|gemm)_(\w+?)_q8_[0K](_\w+)?$", name)
        if body and ours:
            label = f"{ours[1]} edgespec {ours[2].removeprefix('neon_')} n={ours[3]}"
            found.append((label, int(ours[3]), body))
        elif body and theirs and (theirs[2].split("_4x")[0].split("_8x")[0].upper() in TYPES):
            columns = 4 if theirs[1] == "gemm" else 1
            found.append((f"{theirs[2].upper()} llama.cpp {theirs[1]}", columns, body))
    return found


def _inner_loop(lines: list[str], machine: _Machine) -> str:
    """The shortest loop with the most products of bytes."""
    places = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"([.\w]+):", line))}
    best: tuple[int, int, list[str]] = (0, 0, [])
    for end, line in enumerate(lines):
        branch = re.match(machine.branch, line)
        start = places.get(branch[1], end) if branch else end
        body = [one for one in lines[start:end] if re.match(r"\t[a-z{]", one)]
        best = max(best, (_num_products(body, machine), -len(body), body))
    return "\n".join(best[2]) if best[0] else ""


def _num_products(body: list[str], machine: _Machine) -> int:
    words = [line.removeprefix("\t{vex}").split() for line in body]
    return sum(machine.products.get(one[0], 0) * (2 if "zmm" in one[-1] else 1) for one in words)


def _cycles(body: str, columns: int, machine: _Machine, mca: str, processor: str) -> float:
    """Cycles of 16 rows by 32 columns of weights, for each column of activations."""
    command = [mca, *machine.mca, f"-mcpu={processor}"]
    command += [f"-iterations={_ITERATIONS}", "-instruction-info=0", "-resource-pressure=0"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total, done.stdout
    return int(total[1]) / _ITERATIONS * _BLOCK / _num_products(body.splitlines(), machine)
