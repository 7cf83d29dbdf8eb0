"""uvicorn, told what this server needs: time limits for headers, an end that frees the engine.

A process that was told to end does so, even if a thread never returns from native code.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.serve.parsing import Limits

# Told to end, the process is gone 2 s later: answers under way have the first of them, threads that
# end their steps the next half, and the model is freed in what is left.
_GRACE_S = 1
_CLOSE_S = 0.5
_HELD_S = 0.2  # more, where a thread keeps the interpreter in native code
# How long a thread keeps the interpreter while another one waits. A step of the engine takes it
# about 20 times: beside a thread that reads a large schema that took 364 ms with Python's 5 ms, and
# takes 21 ms with this.
_SWITCH_S = 0.0002
_IDLE_S = 30  # that a connection may be kept without a request


class Running(uvicorn.Server):
    """A server that says when it has begun, and can be stopped from any thread."""

    def __init__(self, app: ASGIApp, limits: Limits, on_start: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(limits.header_s),
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=limits.connections,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._on_start = on_start
        self._timer: threading.Timer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so; from then on the threads of this process switch more often."""
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        await super().startup(sockets)
        self._on_start()
        tell_systemd("READY=1")

    def stop(self) -> None:
        """End it soon; answers under way have a moment."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """An interrupt stops the server; what comes after it still runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [one for one in (signal.SIGINT, signal.SIGTERM) if _is_heard(one)]
        before = {one: signal.signal(one, self.handle_exit) for one in handled}
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


def _is_heard(one: signal.Signals) -> bool:
    return signal.getsignal(one) != signal.SIG_IGN


def _protocol(header_s: float) -> type[asyncio.Protocol]:
    """Connections of which each request's line and headers have to come within `header_s`."""

    class Timed(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            """Time runs while no request is being answered, from its first byte on."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._disarm()
            elif self._timer is None:
                self._timer = self.loop.call_later(header_s, self.transport.abort)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Timed
