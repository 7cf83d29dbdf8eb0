"""Calls that no test misses: statements that only call something are taken out, one at a time.

    python benchmarks/mutants.py [--count 300] [--seed 1] [--only edge/serve] [--seconds 240]

A function that is tested is not wired until a test fails when its call is removed. Of all such
calls in the rooms that put things together some are drawn; for each, the files of tests run that
lie at its file's path or share its rarest names. "lives" is told where they pass: a test elsewhere
may still fail. The product is copied once, and only the copy is changed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
_ROOMS = "edge/setup", "edge/serve", "edge/decode", "edge/bench", "backends", "cli", "memory"
_SIBLINGS = "backends", "cli", "memory", "models", "quantize"
_SLOW, _BROKEN = "neither in that time", "fails with it, too"
_MOST_FILES = 6  # of tests, for a call
_NAME = re.compile(r"edgespec(?:\.\w+)+|[A-Za-z_]\w{3,}")
_SAID = "_LOGGER", "LOGGER", "warnings", "logging"  # what a person reads, no behaviour


class Call(NamedTuple):
    """A statement that calls something, by its lines, from 1."""

    path: str
    first: int
    last: int
    text: str
    inside: tuple[str, ...]  # names of its function and class


def calls(path: Path) -> Iterator[Call]:
    """Statements of a file's functions whose value nobody takes."""
    name = path.relative_to(_ROOT).as_posix()
    todo: list[tuple[ast.AST, tuple[str, ...]]] = [(ast.parse(path.read_text()), ())]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = *inside, node.name
        todo += [(one, inside) for one in ast.iter_child_nodes(node)]
        if not isinstance(node, ast.Expr) or not inside:
            continue
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            text = ast.unparse(value)
            if not text.startswith(_SAID) and not text.startswith("super().__init__"):
                yield Call(name, node.lineno, node.end_lineno or node.lineno, text, inside)


def without(source: str, call: Call) -> str:
    """The same source with `pass` in its place."""
    lines = source.splitlines(keepends=True)
    indent = lines[call.first - 1][: -len(lines[call.first - 1].lstrip())]
    lines[call.first - 1 : call.last] = [f"{indent}pass\n"]
    return "".join(lines)


@cache
def _words() -> dict[Path, frozenset[str]]:
    """Of each file of tests: the names in it, and what it imports."""
    found = (_ROOT / "tests").rglob("test_*.py")
    return {one: frozenset(_NAME.findall(one.read_text(encoding="utf-8"))) for one in found}


def tests_of(call: Call) -> list[Path]:
    """Files of tests: that at its file's path, then those with the rarest of its names."""
    inside = call.path.removeprefix("edge/").removesuffix(".py")
    own = _ROOT / "tests" / f"{inside.rpartition('/')[0]}/test_{inside.rpartition('/')[2]}.py"
    names = {*_NAME.findall(call.text), *call.inside, f"edgespec.{inside.replace('/', '.')}"}
    weights = {
        one: 1 / number for one in names if (number := sum(one in w for w in _words().values()))
    }

    def weight(path: Path) -> float:
        return sum(weights.get(one, 0.0) for one in names & _words()[path])

    likely = sorted(_words(), key=weight, reverse=True)
    return list(dict.fromkeys([*([own] if own.exists() else []), *likely]))[:_MOST_FILES]


def _failed(product: Path, tests: Sequence[str], seconds: float) -> str:
    """The first test that fails; "" where all pass. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(product)}
    done = subprocess.run(
        [*command, *tests], cwd=_ROOT, env=environment, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    return f"exit {done.returncode}" if done.returncode else ""


def _noticed_by(product: Path, call: Call, seconds: float) -> str:
    """The test that fails without a call, and not with it; "" where all pass."""
    place = product / "edgespec" / call.path.removeprefix("edge/")
    before = place.read_text(encoding="utf-8")
    place.write_text(without(before, call), encoding="utf-8")
    try:
        failed = _failed(product, [str(one) for one in tests_of(call)], seconds)
        place.write_text(before, encoding="utf-8")
        if "::" in failed and _failed(product, [failed], seconds):
            return f"{_BROKEN}: {failed}"
    except subprocess.TimeoutExpired:
        return _SLOW
    finally:
        place.write_text(before, encoding="utf-8")
    return failed


def main() -> None:
    """Draw calls, take each out, and say which live."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--seconds", type=float, default=240.0, help="for the tests of a call")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C, in the background
    files = sorted(path for room in _ROOMS for path in (_ROOT / room).rglob("*.py"))
    there = [call for path in files for call in calls(path) if call.path.startswith(chosen.only)]
    drawn = random.Random(chosen.seed).sample(there, min(chosen.count, len(there)))
    print(f"{len(drawn)} of {len(there)} calls", flush=True)
    told = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        product = Path(folder)
        shutil.copytree(_ROOT / "edge", product / "edgespec")
        for name in _SIBLINGS:
            shutil.copytree(_ROOT / name, product / "edgespec" / name)
        for call in drawn:
            by = _noticed_by(product, call, chosen.seconds)
            kind = "lives" if not by else by if by == _SLOW else by.split(":")[0]
            told[kind if kind in (_SLOW, _BROKEN, "lives") else "noticed"] += 1
            print(f"{by or 'lives'} | {call.path}:{call.first}: {call.text[:80]}", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in told.most_common()))


if __name__ == "__main__":
    main()
