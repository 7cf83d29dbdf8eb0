"""Modules that are started as processes of their own, and guests, which may end in any way."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from waiting import until

from edgespec.errors import BackendError
from edgespec.models import processes
from edgespec.models.processes import Guest, GuestEndedError, GuestLimits, start_module

_LIMIT_S = 60.0
_LIMITS = GuestLimits(48 << 20, seconds=0.3, patience_s=_LIMIT_S)


def test_a_folder_of_scripts_does_not_stand_in_for_modules(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')\n")
    if sys.version_info < (3, 11):
        pytest.skip("needs PYTHONSAFEPATH")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        process = start_module("json.tool", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        out, _ = process.communicate(b'{"a": 1}', timeout=_LIMIT_S)
    finally:
        os.chdir(before)
    assert json.loads(out) == {"a": 1} and process.returncode == 0


# ---------------------------------------------------------------------------------- guests

_GUEST = """
import os, signal, sys, time
from edgespec.models.processes import answer_questions

def answer(question):
    print("a library says hello")
    if question == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if question == "spin":
        while True:
            pass
    if question == "sleep":
        time.sleep(600)
    if question == "grow":
        return len("x" * (1 << 30))
    if question == "chatter":
        return "x" * (4 << 20)
    return [os.getpid(), question]

answer_questions(answer)
"""


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    (tmp_path / "a_guest.py").write_text(_GUEST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Guest("a_guest", _LIMITS)
    yield made
    made.end()


def is_alive(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_guest_starts_with_the_first_question_and_stays(guest: Guest) -> None:
    assert guest.pid is None
    odd: list[Any] = ["\ud800 \U0001f600 \u2028\n", 2**70, None, {"a": [1.5]}]
    assert guest.ask(odd) == [guest.pid, odd]
    assert guest.ask(1) == [guest.pid, 1]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("die", "it ends the process that reads it"),
        ("spin", "it takes more than 0.3 s"),
        pytest.param(
            "grow",
            "it takes more than 48 MiB",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory"),
        ),
        ("chatter", "it writes more than 1024 KiB"),
    ],
)
def test_what_ends_a_guest_is_told_and_the_next_question_is_answered(
    guest: Guest, question: str, reason: str
) -> None:
    first = guest.ask(0)[0]
    with pytest.raises(GuestEndedError, match=reason):
        guest.ask(question)
    assert not is_alive(first)
    again, answer = guest.ask(1)
    assert answer == 1 and again != first


def test_what_has_answered_is_not_ended() -> None:
    """On a machine that stood still the answer came and the time was over, both at once."""

    class Answered(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return False

    answered, limits = Answered(), GuestLimits(1 << 30, 1.0, patience_s=0.0)
    answered.set()
    process: Any = SimpleNamespace(pid=0, kill=lambda: pytest.fail("it is ended"))
    processes._watch(process, answered, limits, 1 << 30, [])


def test_what_the_machine_stood_still_is_nobodys_time() -> None:
    class Late(threading.Event):
        looks = iter((False, True))

        def wait(self, timeout: float | None = None) -> bool:
            time.sleep(0.3)
            return next(self.looks)

    process: Any = SimpleNamespace(pid=0, kill=lambda: pytest.fail("it is ended"))
    processes._watch(process, Late(), GuestLimits(1 << 30, 1.0, patience_s=0.2), 1 << 30, [])


def test_a_guest_that_sleeps_is_waited_for_so_long(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "_limits", _LIMITS._replace(patience_s=0.2))
    with pytest.raises(GuestEndedError, match=r"it takes more than 0\.2 s"):
        guest.ask("sleep")


@pytest.mark.parametrize(
    ("limits", "question", "reason"),
    [
        (_LIMITS._replace(data_bytes=1 << 20), "sleep", "more than 1 MiB"),
        (_LIMITS._replace(seconds=0.0), "spin", "more than 0 s"),
    ],
)
def test_where_the_system_has_no_limits_this_process_looks(
    guest: Guest,
    monkeypatch: pytest.MonkeyPatch,
    limits: GuestLimits,
    question: str,
    reason: str,
) -> None:
    guest.ask(0)  # under the limits of the system
    monkeypatch.setattr(processes, "_LIMITS_ITSELF", False)
    monkeypatch.setattr(processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(guest, "_limits", limits)
    with pytest.raises(GuestEndedError, match=reason):
        guest.ask(question)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a pipe be made larger")
def test_a_conversation_goes_in_one_part_where_the_system_allows_it(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    guest.ask(0)
    process = guest._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    sizes = [fcntl.fcntl(one, fcntl.F_GETPIPE_SZ) for one in (process.stdin, process.stdout)]
    assert sizes == [1 << 20] * 2
    guest.end()
    monkeypatch.setattr(processes, "_PIPE_BYTES", 1 << 40)  # more than anybody may have
    assert guest.ask(1)[1] == 1


def test_threads_take_turns(guest: Guest) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(guest.ask, range(64)))
    assert answers == [[guest.pid, number] for number in range(64)]


def test_an_interrupted_question_leaves_no_answer_behind(
    guest: Guest, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C is obeyed at once, and what the guest says later is no answer to another question."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    guest.ask(0)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        guest.ask("sleep")
    assert guest.ask(1)[1] == 1


def test_it_ends_with_its_owner(guest: Guest) -> None:
    pid = guest.ask(0)[0]
    other = Guest("a_guest", _LIMITS)
    last = other.ask(0)[0]
    del other
    gc.collect()
    until(lambda: not is_alive(last))
    assert is_alive(pid)


@pytest.mark.skipif(sys.platform == "win32", reason="its signals")
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
@pytest.mark.parametrize("question", ["1", "'spin'"])
def test_it_ends_with_its_parent(guest: Guest, end: str, question: str) -> None:
    """However that ends, and whatever it does then; a warning at the exit would be an error."""
    code = (
        "import os, signal, threading, time\n"
        "from edgespec.models.processes import Guest, GuestLimits\n"
        f"guest = Guest('a_guest', GuestLimits(48 << 20, 0.3, 60.0))\n"
        "print(guest.ask(0)[0], flush=True)\n"
        f"threading.Thread(target=guest.ask, args=({question},), daemon=True).start()\n"
        f"time.sleep(0.1)\n{end}\n"
    )
    command = [sys.executable, "-X", "dev", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert "Warning" not in done.stderr
    until(lambda: not is_alive(int(done.stdout)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="its forks")
def test_a_fork_has_its_own(guest: Guest) -> None:
    """And its end is none of its parent's guest."""
    code = (
        "import os, sys\n"
        "from edgespec.models.processes import Guest, GuestLimits\n"
        "guest = Guest('a_guest', GuestLimits(48 << 20, 0.3, 60.0))\n"
        "first = guest.ask(0)[0]\n"
        "guest._lock.acquire()\n"  # as another thread may hold it
        "if not os.fork():\n"
        "    sys.exit(guest.ask(0)[0] == first)\n"
        "guest._lock.release()\n"
        "assert os.wait()[1] == 0\n"
        "assert guest.ask(0)[0] == first\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_cannot_be_started_is_a_sentence(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BackendError, match="no process could be started: No such file"):
        guest.ask(0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_guest_is_small_after_a_large_question(guest: Guest) -> None:
    pid = guest.ask(0)[0]
    before = psutil.Process(pid).memory_info().rss
    monster = "x" * (4 << 20)
    guest._limits = _LIMITS._replace(bytes_per_byte=32)
    for _ in range(3):
        assert guest.ask(monster)[1] == monster
    assert guest.pid == pid and psutil.Process(pid).memory_info().rss - before < 4 << 20
