"""uvicorn, told what this server needs: time limits for headers, an end that frees the engine.

A process that was told to end does so, even if a thread never returns from native code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.serve.parsing import LOGGER, Limits

# Told to end, the process is gone 2 s later: answers under way have most of the first of them, and
# are told that the server stops in what is left of it. Threads that end their steps have the next
# half, and the model is freed in the rest.
_ANSWERS_S = 0.6
_GRACE_S = 1
_CLOSE_S = 0.5
_HELD_S = 0.2  # more, where a thread keeps the interpreter in native code
# How long a thread keeps the interpreter while another one waits. A step of the engine takes it
# about 20 times: beside a thread that reads a large schema that took 364 ms with Python's 5 ms, and
# takes 21 ms with this.
SWITCH_S = 0.0002
_IDLE_S = 30  # that a connection may be kept without a request


class Running(uvicorn.Server):
    """A server that says when it has begun, and can be stopped from any thread."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        on_start: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._connections = Connections(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(limits, self._connections),
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._on_start, self._on_stop = on_start, on_stop
        self._timer: threading.Timer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so; from then on the threads of this process switch more often."""
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        asyncio.get_running_loop().set_exception_handler(self._connections.handle)
        await super().startup(sockets)
        self._on_start()
        tell_systemd("READY=1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end for a moment; then those that are left are told that the server stops."""
        timer = asyncio.get_running_loop().call_later(_ANSWERS_S, self._on_stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def stop(self) -> None:
        """End it soon; answers under way have a moment."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """An interrupt stops the server; what comes after it still runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        both = (signal.SIGINT, signal.SIGTERM)
        heard = [one for one in both if signal.getsignal(one) != signal.SIG_IGN]
        before = {one: signal.signal(one, self.handle_exit) for one in heard}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of the first signal; a second one lets no answer go on."""
        self.force_exit = self.should_exit
        if not self.should_exit:
            self._timer = end_within(_GRACE_S + _CLOSE_S)
            tell_systemd("STOPPING=1")
        self.should_exit = True

    def has_ended(self) -> None:
        """Nothing is left that could hang: the process goes on."""
        if self._timer is not None:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()


def tell_systemd(state: str) -> None:
    """Let systemd know, where it waits for that (a unit of Type=notify; `man sd_notify`)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.sendto(state.encode(), address.replace("@", "\0", 1))


def end_within(seconds: float) -> threading.Timer:
    """End the process after this time, whatever its threads do then.

    With the status 0; with 1 where one of them keeps the interpreter: a watchdog in C, which needs
    no thread of Python's, ends it then.
    """
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _HELD_S, exit=True, file=_nowhere())
    return timer


@functools.cache
def _nowhere() -> int:
    """Where the watchdog writes what the threads were doing."""
    return os.open(os.devnull, os.O_WRONLY)


_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TOLD_S = 60.0  # between two lines of the log about connections that are not taken
_OTHER_FILES = 16  # that a process opens besides: models, caches, pipes


class Connections:
    """Those that are open, the idle ones in the order in which they became so.

    Where there are as many as may be, or no descriptors are left, the oldest idle one is closed.
    """

    def __init__(self, limits: Limits) -> None:
        self._most, self._count = min(limits.connections, _descriptors()), 0
        self._idle: dict[asyncio.Transport, None] = {}
        self._told_s = -_TOLD_S

    def add(self, transport: asyncio.Transport) -> None:
        """One that was made; it is idle until a request of it is answered."""
        if self._count >= self._most:
            self._drop_oldest()
        self._count += 1
        self.set_idle(transport, is_idle=True)

    def set_idle(self, transport: asyncio.Transport, *, is_idle: bool) -> None:
        """Whether nothing is being answered on it."""
        if is_idle:
            self._idle.setdefault(transport)
        else:
            self._idle.pop(transport, None)

    def remove(self, transport: asyncio.Transport) -> None:
        self._count -= 1
        self._idle.pop(transport, None)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What fails in the loop. asyncio tells of each connection that it cannot take.

        A second later it wants to go on with each of them, also where the listener is closed now.
        """
        problem = context.get("exception")
        if isinstance(problem, ValueError) and "._start_serving" in context["message"]:
            return
        if not isinstance(problem, OSError) or problem.errno not in _FULL:
            loop.default_exception_handler(context)
            return
        self._drop_oldest()
        now = time.monotonic()
        if now - self._told_s >= _TOLD_S:
            self._told_s = now
            LOGGER.warning(
                "no more connections can be taken (%s): the oldest idle ones are closed; "
                "ulimit -n allows more",
                problem.strerror,
            )

    def _drop_oldest(self) -> None:
        if self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.abort()


def _descriptors() -> int:
    """How many connections the limit of open files leaves."""
    if sys.platform == "win32":
        return 1 << 20
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 1 << 20
    folder = next((one for one in ("/proc/self/fd", "/dev/fd") if os.path.isdir(one)), "")
    return max(1, most - len(os.listdir(folder or ".")) - _OTHER_FILES)


def _protocol(limits: Limits, connections: Connections) -> type[asyncio.Protocol]:
    """Connections that send and take what they are sent in time.

    Each request's line and headers have to come within `header_s`, and within `write_s` something
    of what is sent has to be taken: whatever it is, and whether or not its answer is complete.
    """

    class Timed(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _writes: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # to be told of all that is not taken at once
            connections.add(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._arm()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            connections.set_idle(self.transport, is_idle=self.cycle.response_complete)

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._stop_writes()
            connections.remove(self.transport)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._look(1 << 62)

        def resume_writing(self) -> None:
            self._stop_writes()
            super().resume_writing()

        def _look(self, before: int) -> None:
            """Cut off who took nothing since the last look."""
            size = self.transport.get_write_buffer_size()
            if size >= before:
                self.transport.abort()
            else:
                self._writes = self.loop.call_later(limits.write_s, self._look, size)

        def _stop_writes(self) -> None:
            if self._writes is not None:
                self._writes.cancel()
                self._writes = None

        def _arm(self) -> None:
            """Time runs while no request is being answered, from its first byte on."""
            is_idle = self.cycle is None or self.cycle.response_complete
            connections.set_idle(self.transport, is_idle=is_idle)
            if not is_idle:
                self._disarm()
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.header_s, self.transport.abort)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Timed
