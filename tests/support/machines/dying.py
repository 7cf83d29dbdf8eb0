"""Runs Python code in a process that dies, or whose disk is full, at a chosen moment."""

from __future__ import annotations

import os
import subprocess
import sys
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
import os, resource, signal, sys

at, room, folder, code = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
count = 0

def watch(event, arguments):
    global count
    if event not in {_CALLS!r} or not str(arguments[0]).startswith(folder):
        return
    if event == "open":
        mode, flags = arguments[1:]
        if not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
    count += 1
    if count == at:
        os._exit({DIED})

if room >= 0:
    if at == 0:  # 0: writes fail; else the process is killed in the middle of one
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
else:
    sys.addaudithook(watch)
exec(compile(code, "code", "exec"), {{"__name__": "__main__"}})
"""


def _run(code: str, folder: Path, at: int, room: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WATCHED, str(at), str(room), str(folder), code]
    environment = {**os.environ, "EDGESPEC_CACHE": str(folder / "cache")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )


def dies_before_call(code: str, folder: Path, number: int) -> bool:
    """Run `code`, which dies before its n-th change to files below `folder`; whether it did."""
    done = _run(code, folder, number, -1)
    assert done.returncode in (0, DIED), done.stderr
    return done.returncode == DIED


def dies_in_a_write(code: str, folder: Path, size: int) -> bool:
    """Run `code`, which dies when a file would get larger than `size` bytes; whether it did."""
    done = _run(code, folder, 1, size)
    assert done.returncode <= 0, done.stderr
    return done.returncode != 0


def on_a_full_disk(code: str, folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    """Run `code` where no file can get larger than `size` bytes."""
    return _run(code, folder, 0, size)


# -- what a worker of `edgespec.bench.worker` can do instead of its work -----------------------


def ends_with_status_3(_parent: Connection) -> None:
    """Read no call and send no answer."""
    sys.exit(3)


def chatters(parent: Connection) -> None:
    """Answer one call, printing from Python and from below it meanwhile."""
    leave_stdout_and_interrupts()
    print("welcome\n" * 10_000, flush=True)
    os.write(1, b"welcome\n" * 10_000)
    _method, (model, *_) = parent.recv()
    parent.send(("result", [str(model)]))
