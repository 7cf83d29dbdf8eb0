"""Decoding beside other programs, with teams of threads that give way and with fixed ones.

    python benchmarks/neighbours.py [MODEL] [--seconds 6] [--repeats 3]

Plain decoding of each of the processes, in tokens/s: alone, two of them at once, beside a program
that computes all of the time on one core, beside one that does so for a third of it, and beside a
compiler. Fixed teams and those that give way take turns; the median of the repeats is shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from edgespec.backends.llama import backend as llamacpp
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.tree import DraftTree
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.models.embedded import embedded_model

_SOURCE = "#include <map>\n#include <regex>\nint main() { return 0; }\n"
_PROMPT, _CONTEXT = 32, 768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path, default=embedded_model())
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=("fixed", "giving way"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(_decode(arguments.model, arguments.seconds, arguments.child == "fixed"))
        return
    print(f"{arguments.model.name} on {cpu_name()}, {usable_cores()} cores; tokens/s\n")
    print("| beside | fixed | giving way |\n| --- | --- | --- |")
    for name, neighbour, processes in (
        ("nothing", None, 1),
        ("another of itself", None, 2),
        ("a busy program", _busy(1.0), 1),
        ("a program that is busy a third of the time", _busy(0.33), 1),
        ("a compiler", _compile, 1),
    ):
        if neighbour is _compile and shutil.which("c++") is None:
            continue
        found: dict[str, list[str]] = {"fixed": [], "giving way": []}
        for _ in range(arguments.repeats):
            for kind, rates in found.items():
                rates += _one(arguments, kind, neighbour, processes)
        middle = (statistics.median(map(float, rates)) for rates in found.values())
        print(f"| {name} | {' | '.join(f'{rate:.0f}' for rate in middle)} |", flush=True)


def _one(
    arguments: argparse.Namespace, kind: str, neighbour: Callable[[], None] | None, processes: int
) -> list[str]:
    """Tokens/s of each process."""
    beside = 0 if neighbour is None else os.fork()
    if neighbour is not None and beside == 0:
        neighbour()
    command = [sys.executable, __file__, str(arguments.model), "--child", kind]
    command += ["--seconds", str(arguments.seconds)]
    try:
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)
        ]
        return [process.communicate()[0].strip() for process in running]
    finally:
        if beside:
            os.kill(beside, 9)
            os.waitpid(beside, 0)


def _decode(model: Path, seconds: float, is_fixed: bool) -> float:
    if is_fixed:
        setattr(llamacpp, "TEAMS", _Fixed())  # noqa: B010
    settings = LlamaSettings(context_size=1024, threads=usable_cores())
    backend = LlamaBackend(model, settings)
    backend.prefill(range(100, 100 + _PROMPT))
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        backend.verify(DraftTree.chain((100,)))
        backend.commit((0,))
        steps += 1
        if backend.length > _CONTEXT:
            backend.truncate(_PROMPT)
    backend.close()
    return steps / seconds


class _Fixed:
    def enter(self, most: int) -> int:
        return most

    def leave(self) -> None: ...


def _busy(share: float) -> Callable[[], None]:
    def work() -> None:
        while True:
            start = time.monotonic()
            while time.monotonic() < start + 0.1 * share:
                pass
            time.sleep(0.1 * (1.0 - share))

    return work


def _compile() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.cpp"
        source.write_text(_SOURCE)
        while True:
            subprocess.run(["c++", "-O2", "-c", str(source), "-o", os.devnull], check=False)


if __name__ == "__main__":
    main()
