"""Runs Python code in a process that dies, or whose disk is full, at a chosen moment."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from edgespec.models.processes import leave_stdout_and_interrupts

DIED = 86
LIMIT_S = 120.0
# Calls that change what lies on a disk. A death between two of them leaves what one before the
# second leaves.
_CALLS = (
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime", "os.chmod", "open"
)  # fmt: skip
_WATCHED = f"""
import ast, os, resource, signal, sys, traceback

folder, code = sys.argv[1:]
count = last = 0

def watch(event, arguments):
    global count
    if event not in {_CALLS!r} or not str(arguments[0]).startswith(folder):
        return
    if event == "open":
        mode, flags = arguments[1:]
        if not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
    count += 1
    if count == last:
        os._exit({DIED})

def run(at, room):
    global last
    last = at
    if room >= 0:
        if at == 0:  # 0: writes fail; else the process is killed in the middle of one
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    else:
        sys.addaudithook(watch)
    exec(compile(code, "code", "exec"), {{"__name__": "__main__"}})

# What it imports takes much longer than what it does: each run is a fork that has it already.
imports = [one for one in ast.parse(code).body if isinstance(one, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module(imports, []), "imports", "exec"), {{}})
for line in sys.stdin:
    at, room = map(int, line.split())
    child = os.fork()
    if child == 0:
        try:
            run(at, room)
            sys.stderr.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Program:
    """Code that writes below a folder, as often as it is asked to, each time in a process."""

    def __init__(self, code: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCHED, str(folder), code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "EDGESPEC_CACHE": str(folder / "cache")},
        )
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(LIMIT_S) == 0, self.said()
        self._process.stdout.close()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def said(self) -> str:
        """What it wrote to stderr since this was asked."""
        assert self._process.stderr is not None
        return (self._process.stderr.read() or b"").decode()

    def _run(self, at: int, room: int) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"%d %d\n" % (at, room))
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.said()
        return int(line)

    def dies_before_call(self, number: int) -> bool:
        """Whether it died: it does before its n-th change to files below its folder."""
        status = self._run(number, -1)
        assert status in (0, DIED), self.said()
        return status == DIED

    def finishes(self) -> bool:
        return not self.dies_before_call(10**6)

    def dies_in_a_write(self, size: int) -> bool:
        """Whether it died: it does when a file would get larger than `size` bytes."""
        status = self._run(1, size)
        assert status <= 0, self.said()
        return status != 0

    def on_a_full_disk(self, size: int) -> int:
        """Its exit status where no file can get larger than `size` bytes."""
        return self._run(0, size)


# -- what a loaded model's process can do instead of its work --------------------------------------


def ends_with_status_3(_parent: Connection) -> None:
    """Read no call and send no answer."""
    sys.exit(3)


def chatters(parent: Connection) -> None:
    """Answer one call, printing from Python and from below it meanwhile, until it is closed."""
    leave_stdout_and_interrupts()
    print("welcome\n" * 10_000, flush=True)
    os.write(1, b"welcome\n" * 10_000)
    _method, (model, *_) = parent.recv()
    parent.send(("result", [str(model)]))
    with suppress(EOFError):
        parent.recv()
