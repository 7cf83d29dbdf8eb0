"""Step times of two builds of llama.cpp, in turns.

python benchmarks/builds.py MODEL... --other FOLDER [--sizes 1 2 8] [--prompt 192] [--rounds 40]
    [--kernels off] [--json OUT]

Each build has a process of its own, which stands still (SIGSTOP) while the other one makes a step:
threads that wait in busy loops disturb nobody. `--other` is a folder that Python finds packages in
before the others, with another `llama_cpp`: a wheel that `make dist` made, unpacked. Printed is how
many times as fast the other build is: the median over pairs of neighbouring steps, and its 95%
interval by order statistics.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from math import sqrt
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from shared import write_results

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.team import TEAMS
from edgespec.measure.timing import one_step, some_tokens
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.host import usable_cores

_DEPTH = 128  # tokens that steps come behind
_BATCH, _NODES = 128, 16  # tokens of a prompt at once, and of a step
_Z = 1.96  # of a normal distribution: 95% are within


class Build:
    """A process of one build, which stands still between two questions."""

    def __init__(self, command: list[str], folder: Path | None) -> None:
        found = {} if folder is None else {"PYTHONPATH": str(folder)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **pipes, env={**os.environ, **found})
        self._process: subprocess.Popen[str] = process
        self.library = self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ms(self, tokens: int) -> float:
        """Of the better one of two steps over so many tokens, behind one that is not counted."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        found = float(self._answer())
        self._process.send_signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def answer(arguments: argparse.Namespace) -> None:
    """Make the steps that are asked for, and tell how long each took."""
    import llama_cpp

    room = _DEPTH + max(*arguments.sizes, arguments.prompt) + 64
    settings = RunConfig(room, _BATCH, _NODES, 1, usable_cores(), kernels=arguments.kernels == "on")
    TEAMS._next_look_s = float("inf")  # the other build is no neighbour: it stands still
    with closing(LlamaBackend(arguments.models[0], settings)) as backend:
        _fill(backend, _DEPTH)
        print(llama_cpp.__file__, flush=True)
        for line in sys.stdin:
            tokens, times = int(line), list[float]()
            for _ in range(3):
                start = perf_counter()
                if tokens <= _NODES:
                    one_step(backend, tokens)
                else:
                    _fill(backend, tokens)
                times.append(perf_counter() - start)
                backend.truncate(_DEPTH)
                if tokens > _NODES:
                    break
            print(min(times[1:] or times) * 1e3, flush=True)


def _fill(backend: LlamaBackend, count: int) -> None:
    for start in range(0, count, _BATCH):
        backend.prefill(some_tokens(backend, min(_BATCH, count - start)))


def compared(builds: list[Build], tokens: int, rounds: int) -> dict[str, Any]:
    """How many times as fast the second one is, its interval, and the milliseconds of both."""
    pairs = []
    for number in range(rounds):  # who begins changes
        order = builds if number % 2 else builds[::-1]
        times = {build: build.ms(tokens) for build in order}
        pairs.append([times[build] for build in builds])
    ratios = sorted(one / other for one, other in pairs)
    away = _Z * sqrt(rounds) / 2
    low, high = max(0, round(rounds / 2 - away)), min(rounds - 1, round(rounds / 2 + away))
    ms = [median(column) for column in zip(*pairs, strict=True)]
    return {"ratio": median(ratios), "low": ratios[low], "high": ratios[high], "ms": ms}


def main() -> None:
    """Measure each file with both."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--other", type=Path, help="with another llama_cpp")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 2, 8))
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kernels", choices=("on", "off"), default="on")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return answer(arguments)
    found = {}
    for model in arguments.models:
        command = [sys.executable, __file__, str(model), "--one", "--kernels", arguments.kernels]
        command += ["--prompt", str(arguments.prompt), "--sizes", *map(str, arguments.sizes)]
        with ExitStack() as opened:
            folders = None, arguments.other
            builds = [opened.enter_context(closing(Build(command, one))) for one in folders]
            if builds[0].library == builds[1].library:
                raise SystemExit(f"there is no other llama_cpp in {arguments.other}")
            for tokens in (*arguments.sizes, arguments.prompt):
                rounds = max(6, arguments.rounds // (4 if tokens == arguments.prompt else 1))
                one = compared(builds, tokens, rounds)
                found[f"{model.name} {tokens}"] = one
                ms = " and ".join(f"{each:.1f}" for each in one["ms"])
                print(
                    f"{model.name}, {tokens} tokens: {one['ratio']:.3f} "
                    f"[{one['low']:.3f}, {one['high']:.3f}], {ms} ms, {rounds} pairs",
                    flush=True,
                )
    if arguments.json:
        write_results(arguments.json, {"kernels": arguments.kernels, "builds": found})


if __name__ == "__main__":
    main()
