"""Calls that no test misses: statements that only call something are left out, one at a time.

    python benchmarks/mutants.py [--count 300] [--seed 1] [--only edge/serve] [--seconds 60]

A function that is tested is not wired until a test fails when its call is removed. Of all such
calls in the rooms that put things together some are drawn. For each, tests run that reach it: those
of its own folder first, the quick ones before the others, until one fails. "lives" is told where
none does, with how many of them ran in that time.

Which tests reach a call is recorded once, by all of them, into the file of `--reached`: in a copy
of the product whose calls say so, in processes that tests start, too. Then one process collects all
tests and is forked for each call. The fork has the new code in place of the old one's, as a second
copy has for the processes that it starts. The product itself is never changed.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_ROOMS = "edge/setup", "edge/serve", "edge/decode", "edge/bench", "backends", "cli", "memory"
_SAID = "_LOG", "LOG", "warnings", "logging"  # what a person reads, no behaviour
_OPTIONS = "--slow", "-p", "no:cacheprovider", "--rootdir", str(_ROOT), str(_ROOT / "tests")
_MOST_BYTES = 8 << 30  # a loop may have lost its end
_HANGS_S = 5  # more than five times of what a test takes, which may be on a busy core
_TOOK = re.compile(r"([\d.]+)s (?:setup|call|teardown) +(.+)")
_FAILED = re.compile(r"(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?")
# Lies beside the copy whose calls say that they are reached, and when: (setup), (call).
_RECORDER = """
import os, sys
seen = set()
def at(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in seen:
        seen.add((number, test))
        try:
            with open({path!r}, "a") as file:
                file.write(f"{{number}} {{int('_pytest' in sys.modules)}} {{test}}\\n")
        except OSError:  # a guest that may not write
            pass
"""


class Call(NamedTuple):
    """A statement that calls something, and where: its line, from 1."""

    path: str
    line: int
    text: str
    inside: str  # its class and function

    @property
    def name(self) -> str:
        """The same one after other lines of its file have changed."""
        return f"{self.path} {self.inside}: {self.text}"


class Reached(NamedTuple):
    """What the recording run found."""

    tests: dict[str, list[str]]  # of a call's name: tests, and files of tests
    seconds: dict[str, float]  # of a test that passed


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
                yield Call(name, node.lineno, text, ".".join(inside))


def copy_product(folder: Path) -> None:
    """As it is installed: with the compiled kernels, which an editable one has elsewhere."""
    found = find_spec("edgespec")
    assert found is not None and found.origin is not None
    no_code = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(found.origin).parent, folder / "edgespec", ignore=no_code)


def place_of(call: Call, folder: Path) -> Path:
    """Its file in a copy."""
    return folder / "edgespec" / call.path.removeprefix("edge/")


def put_before(place: Path, prefixes: dict[int, str]) -> None:
    """Write something in front of the statements at these lines."""
    lines = place.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, prefix in prefixes.items():
        line = lines[number - 1]
        start = len(line) - len(line.lstrip())
        lines[number - 1] = line[:start] + prefix + line[start:]
    place.write_text("".join(lines), encoding="utf-8")


# -- which tests reach a call -----------------------------------------------------------------


def record(there: Sequence[Call], workers: int) -> Reached:
    """Run all tests in a copy whose calls write down the test that reaches them."""
    with tempfile.TemporaryDirectory() as name:
        folder, written = Path(name), Path(name) / "reached.txt"
        copy_product(folder)
        (folder / "_recorder.py").write_text(_RECORDER.format(path=str(written)))
        prefixes = defaultdict[Path, dict[int, str]](dict)
        for number, call in enumerate(there):
            prefix = f"__import__('_recorder').at({number}); "
            prefixes[place_of(call, folder)][call.line] = prefix
        for place, of_file in prefixes.items():
            put_before(place, of_file)
        command = [sys.executable, "-m", "pytest", "-vv", "--durations=0", *_OPTIONS]
        command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        told = subprocess.run(
            command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": name}, capture_output=True,
            text=True, check=False,
        ).stdout  # fmt: skip
        return _read_record(there, told, written.read_text(encoding="utf-8"))


def _read_record(there: Sequence[Call], told: str, written: str) -> Reached:
    """A session's fixture and a process serve other tests, too: these stand for their file."""
    seconds = defaultdict[str, float](float)
    for line in told.splitlines():
        if match := _TOOK.fullmatch(line.strip()):
            seconds[match[2]] += float(match[1])
    for line in told.splitlines():
        if match := _FAILED.fullmatch(line.strip()):
            seconds.pop(match[1], None)
    tests = defaultdict[str, set[str]](set)
    for line in written.splitlines():
        number, in_pytest, test = line.split(" ", 2)
        test, _, phase = test.rpartition(" ")
        whole = test if in_pytest == "1" and phase == "(call)" else test.partition("::")[0]
        tests[there[int(number)].name].add(whole)
    return Reached({name: sorted(found) for name, found in tests.items()}, dict(seconds))


def tests_of(call: Call, reached: Reached, most_seconds: float) -> tuple[list[str], int]:
    """Tests that reach it, the likeliest and quickest first, and how many there are in all."""
    found = set(reached.tests.get(call.name, ()))
    own = "tests/" + call.path.removeprefix("edge/").removesuffix(".py")
    folder, _, name = own.rpartition("/")

    def order(test: str) -> tuple[int, float]:
        near = (f"{folder}/test_{name}.py::", f"{folder}/", "tests/")
        return [test.startswith(one) for one in near].index(True), reached.seconds[test]

    there = [one for one in reached.seconds if one in found or one.partition("::")[0] in found]
    chosen, total = list[str](), 0.0
    for test in sorted(there, key=order):
        if not chosen or total + reached.seconds[test] <= most_seconds:
            chosen.append(test)
            total += reached.seconds[test]
    return chosen, len(there)


# -- what fails without a call ----------------------------------------------------------------


class Fork(Exception):
    """This process is a fork, which leaves what it was in and goes on to its tests."""


class Forks:
    """A plugin of pytest: where tests would run, forks of this process run some of them."""

    def __init__(
        self, product: Path, seconds: dict[str, float], trials: Callable[[Forks], None]
    ) -> None:
        self.product, self._seconds, self._trials = product, seconds, trials
        self.pid = os.getpid()
        self.told: Path | None = None  # in a fork: where it tells the first test that failed
        self._functions = defaultdict[str, list[FunctionType]](list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        self._items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # what is frozen is not listed
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                self._functions[one.__code__.co_filename].append(one)
        gc.freeze()
        try:
            self._trials(self)
        except Fork as fork:
            session.items[:] = fork.args[0]
            return None  # pytest's own loop follows
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.told and not self.told.exists():
            self.told.write_text(report.nodeid)

    def first_failure(self, tests: Sequence[str], changed: Path | None, seconds: float) -> str:
        """The first test that fails, with the code that a file has now; "" where all pass."""
        folder = tempfile.mkdtemp()
        told = Path(folder) / "failed.txt"
        if not (process := os.fork()):
            self.told = told
            os.setpgid(0, 0)
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, most))
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if changed is not None:
                self._replace(changed)
            items = [self._items[one] for one in tests if one in self._items]
            for item in items:
                item.add_marker(pytest.mark.timeout(_HANGS_S + 5 * self._seconds[item.nodeid]))
            raise Fork(items)
        end = time.monotonic() + seconds
        while not (ended := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.01)
            if told.exists():
                end = min(end, time.monotonic() + _HANGS_S)
        with suppress(ProcessLookupError):  # what it started and left
            os.killpg(process, signal.SIGKILL)
        status = ended[1] if ended[0] else os.waitpid(process, 0)[1]
        failed = told.read_text() if told.exists() else "the process crashes" if status else ""
        shutil.rmtree(folder, ignore_errors=True)
        return failed if ended[0] or "::" in failed else "hangs"

    def _replace(self, place: Path) -> None:
        """Give this process's functions of a file the code that stands there now."""
        new: dict[tuple[str, int], CodeType] = {}
        todo = [compile(place.read_text(encoding="utf-8"), str(place), "exec")]
        while todo:
            code = todo.pop()
            new[code.co_name, code.co_firstlineno] = code
            todo += [one for one in code.co_consts if isinstance(one, CodeType)]
        for one in self._functions[str(place)]:
            one.__code__ = new[one.__code__.co_name, one.__code__.co_firstlineno]


def noticed_by(forks: Forks, call: Call, reached: Reached, seconds: float) -> str:
    """What is told of a call: a test that fails without it, and not with it."""
    tests, total = tests_of(call, reached, seconds)
    place = place_of(call, forks.product)
    before, tried = place.read_text(encoding="utf-8"), len(tests)
    while tests:
        put_before(place, {call.line: "if 0: "})  # names of outer functions stay, and lines
        failed = forks.first_failure(tests, place, 3 * seconds + 2 * _HANGS_S)
        place.write_text(before, encoding="utf-8")
        if failed not in tests or not forks.first_failure([failed], None, 3 * seconds):
            return failed or f"lives: {tried} of {total} tests"
        tests = tests[tests.index(failed) + 1 :]  # it fails with the call, too
    return f"lives: {tried} of {total} tests"


def main() -> None:
    """Draw calls, leave each out, and say which live."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--skip", type=int, default=0, help="of those drawn, as they were done")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="calls whose FILE:LINE begins so")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, for a call")
    parser.add_argument("--workers", type=int, default=2, help="that record which tests reach it")
    parser.add_argument(
        "--reached", type=Path, default=Path(tempfile.gettempdir()) / "edgespec-reached.json"
    )
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C, in the background
    files = sorted(path for room in _ROOMS for path in (_ROOT / room).rglob("*.py"))
    there = [call for path in files for call in calls(path)]
    if not chosen.reached.exists():
        found = record(there, chosen.workers)
        chosen.reached.write_text(json.dumps(found._asdict()))
        print(f"{len(found.seconds)} tests, {len(found.tests)} of {len(there)} calls are reached")
    reached = Reached(**json.loads(chosen.reached.read_text()))
    there = [one for one in there if f"{one.path}:{one.line}".startswith(chosen.only)]
    drawn = random.Random(chosen.seed).sample(there, min(chosen.count, len(there)))
    print(f"{len(drawn)} of {len(there)} calls", flush=True)
    told = Counter[str]()

    def try_all(forks: Forks) -> None:
        for number, call in enumerate(drawn[chosen.skip :], chosen.skip + 1):
            by = noticed_by(forks, call, reached, chosen.seconds)
            told["live" if by.startswith("lives") else "noticed"] += 1
            print(f"{number} {by} | {call.path}:{call.line}: {call.text[:80]}", flush=True)
        print(", ".join(f"{number} {kind}" for kind, number in told.most_common()), flush=True)

    os.chdir(_ROOT)
    folder = tempfile.mkdtemp()
    copy_product(Path(folder))
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    forks = Forks(Path(folder), reached.seconds, try_all)
    try:
        status = pytest.main([*_OPTIONS, "-x", "-q", "-s", "-p", "no:xdist"], plugins=[forks])
    finally:
        if os.getpid() == forks.pid:  # the copy is no fork's, nor of what a test forks
            shutil.rmtree(folder)
    if os.getpid() != forks.pid:
        os._exit(status)


if __name__ == "__main__":
    main()
