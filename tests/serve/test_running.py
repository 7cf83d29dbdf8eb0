"""How a server's process ends: politely, whatever its threads do and its limits are."""

from __future__ import annotations

import asyncio
import errno
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import httpx
import psutil
import pytest
from command_line import with_imports
from queue_cases import CHAT, HELLO, generations
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S, in_thread, join, until

from edgespec.cli import serve
from edgespec.serve import running
from edgespec.serve.parsing import Limits
from edgespec.serve.running import Connections, Running

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its signals end a process at once")

# A server in the main thread; its model never returns from a call into C, or takes its time.
PROGRAM = """
import ctypes, sys
from serving_cases import TEMPLATE, Speaker
from edgespec.decode.engine import Engine
from edgespec.models import chat
from edgespec.serve.server import Server, address_of, bind

class Stuck(Speaker):
    def verify(self, tree):
        if "stuck" in sys.argv:
            ctypes.CDLL(None).sleep(600)
        return super().verify(tree)

ENDLESS = "{{ ('a' * 1000000) | trim('b' * 9000000 ~ 'a') }}"  # half an hour in one call into C
chat._guest._limits = chat._guest._limits._replace(seconds=0.5)

with bind("127.0.0.1", 0) as listener:
    print(address_of(listener), flush=True)
    backend = Stuck()
    backend.step_s = 0.03
    template = ENDLESS if "endless" in sys.argv else TEMPLATE
    with Engine(backend, chat_template=template) as engine, Server(engine) as server:
        server.run(listener)
print("ended", flush=True)
"""


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=with_imports(),
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def ask(address: str) -> httpx.Response | None:
    try:
        return httpx.post(address + CHAT, json=HELLO, timeout=PATIENCE_S)
    except httpx.HTTPError:
        return None


def test_a_second_signal_ends_the_process_whatever_runs() -> None:
    """Python's threads are waited for at its end, and a call into C hears of nothing."""
    with served("stuck") as (address, process):
        thread, _ = in_thread(lambda: ask(address))
        until(lambda: generations(address) == 1)
        process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(address))  # it has heard
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        join(thread)


def is_refused(address: str) -> bool:
    try:
        httpx.get(f"{address}/health")
    except httpx.HTTPError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("one", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_it_after_a_while(one: signal.Signals) -> None:
    """In two seconds, which the command line's end is part of."""
    with served("stuck") as (address, process):
        thread, _ = in_thread(lambda: ask(address))
        until(lambda: generations(address) == 1)
        process.send_signal(one)
        assert process.wait(PATIENCE_S) == 0
        join(thread)
    longest = running._GRACE_S + running._CLOSE_S + serve._END_S + running._HELD_S
    assert longest <= 2


def test_a_thread_that_keeps_the_interpreter_is_ended_as_well() -> None:
    """No thread of Python's runs then, and no handler."""
    program = "import ctypes; from edgespec.serve.running import end_within; end_within(0.1)"
    command = [sys.executable, "-c", f"{program}; ctypes.PyDLL(None).sleep(600)"]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 1


def test_a_template_without_an_end_keeps_nothing_from_ending() -> None:
    """Nor anybody waiting: it is rendered in a process of its own, which is ended with this one."""
    with served("endless") as (address, process):
        threads = [in_thread(lambda: ask(address))[0] for _ in range(3)]
        server = psutil.Process(process.pid)

        def renders() -> bool:
            with suppress(psutil.NoSuchProcess):  # it has had its 0.5 s; another one follows
                return any(one.cpu_times().user > 0.2 for one in server.children())
            return False

        until(renders)
        guests = server.children()
        assert httpx.get(f"{address}/health", timeout=PATIENCE_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        for thread in threads:
            join(thread)
        until(lambda: not any(one.is_running() for one in guests))


def test_a_request_waits_for_a_template_without_an_end_once() -> None:
    """What is asked of it besides, such as how its model calls tools, is not tried then."""
    with served("endless") as (address, process):
        answer = ask(address)
        assert answer is not None and answer.status_code == 400
        assert re.search(
            r"the model's chat template fails: it takes more than (0\.5|10) s", answer.text
        )
        spent_s = psutil.Process(process.pid).cpu_times().children_user
    assert spent_s < 1


def test_a_signal_lets_answers_end_and_what_comes_after_the_server() -> None:
    with served() as (address, process):
        thread, answers = in_thread(lambda: ask(address))
        until(lambda: generations(address) == 1)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "ended\n"
        assert process.wait(PATIENCE_S) == 0
        join(thread)
    assert answers[0] is not None and answers[0].status_code == 200


def test_a_program_that_goes_on_behind_its_server_is_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "faulthandler", watchdog := Mock())
    server = Running(Mock(), Limits(), on_start=Mock(), on_stop=Mock())
    server.handle_exit(signal.SIGTERM, None)
    server.has_ended()
    assert server._timer is not None and server._timer.finished.is_set()
    watchdog.cancel_dump_traceback_later.assert_called_once_with()


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with served() as (address, process):
            assert systemd.recv(99) == b"READY=1"
            assert httpx.get(f"{address}/health", timeout=PATIENCE_S).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert systemd.recv(99) == b"STOPPING=1"
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("where", ["", "nowhere", "/no/such/socket", "@no such one", "/a\0b"])
def test_who_is_not_there_to_be_told_keeps_nothing_from_going_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {"NOTIFY_SOCKET": where})
    running.tell_systemd("READY=1")


def test_no_thread_keeps_the_interpreter_for_long(serve: Serve) -> None:
    """A large schema that is read would hold up each step of all answers."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        serve(Speaker())
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)


def test_a_server_that_ends_out_of_descriptors_leaves_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio tries again later, once for each place of the backlog: 2,048 tracebacks."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.1)

    class Full(socket.socket):
        def accept(self) -> NoReturn:
            raise OSError(errno.EMFILE, "Too many open files")

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(Connections(Limits()).handle)
        with Full() as listener:
            listener.bind(("127.0.0.1", 0))
            server = await loop.create_server(asyncio.Protocol, sock=listener, backlog=8)
            with socket.create_connection(listener.getsockname()):
                await asyncio.sleep(0.05)
                server.close()
                await asyncio.sleep(0.2)

    asyncio.run(serve())
    assert ["no more connections" in one.message for one in caplog.records] == [True]


STARTS = """
import asyncio, sys
from edgespec.serve.app import make_app
from edgespec.serve.pool import Pool

app = make_app(Pool([]))

async def start():
    came, told = asyncio.Queue(), asyncio.Queue()
    await came.put({"type": "lifespan.startup"})
    running = asyncio.ensure_future(app({"type": "lifespan"}, came.get, told.put))
    print((await told.get())["type"], "anyio._backends._asyncio" in sys.modules)
    await came.put({"type": "lifespan.shutdown"})
    await running

asyncio.run(start())
"""


def test_a_first_request_waits_for_no_imports() -> None:
    command = [sys.executable, "-c", STARTS]
    done = subprocess.run(command, capture_output=True, text=True, env=with_imports())
    assert done.stdout.split() == ["lifespan.startup.complete", "True"], done.stderr
