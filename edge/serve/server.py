"""A server of one engine: `app` for whoever has a server already, `run` for who has none."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edgespec.annotations import check_arguments
from edgespec.decode.engine import Engine
from edgespec.errors import BackendError, MissingDependencyError, UnsupportedError
from edgespec.memory.plan.plan import Plan
from edgespec.serve.access import (
    AuthSettings,
    check_exposure,
    check_tools,
    checked_keys,
    checked_origins,
    is_loopback,
)
from edgespec.serve.parsing import Defaults, Limits
from edgespec.serve.pool import Member, Pool, Shared
from edgespec.serve.service import Service
from edgespec.serve.tool_servers import ToolServers

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgespec.serve.running import Running

_START_S = 30.0  # that a thread may take until it answers
_QUIET_S = 0.5  # without an answer, before what only some answers need is prepared
_BACKLOG = 128  # connections that wait while a model is loaded


class Server:
    """OpenAI's interface to a loaded model, or to several of a pool.

        with edgespec.load("model.gguf") as engine, edgespec.Server(engine) as server:
            print(server.start())

    Args:
        engine: answers; it is not closed with the server. Or a pool of models, which is.
        names: of the model, as clients ask for it; the first one is what answers call it.
        keys: API keys, of which requests need one; None asks for none.
        origins: of web pages that may use the server besides its own; "*" is all.
        hosts: names by which clients reach the server, besides those of this machine: that of a
            proxy, or host.docker.internal; "*" takes any name.
        defaults: settings of answers whose request does not say otherwise.
        limits: how much a request may ask for.
        plan: what the engine was loaded with, to be shown.
        file_name: of the model, to be shown.
        any_model: answer for every model that is asked for, whatever its name.
        tools: servers of tools that the page may call; they are closed with the server.

    Raises MissingDependencyError without the packages of the `serve` extra, and UnsupportedError
    for blank keys and for what is no origin.
    """

    def __init__(
        self,
        engine: Engine | Pool,
        *,
        names: Sequence[str] = ("edgespec",),
        keys: Sequence[str] | None = None,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
        defaults: Defaults | None = None,
        limits: Limits | None = None,
        plan: Plan | None = None,
        file_name: str = "",
        any_model: bool = False,
        tools: ToolServers | None = None,
    ) -> None:
        check_arguments(Server.__init__, names=names, keys=keys, origins=origins)
        require_packages()
        self._keys, self._hosts = checked_keys(keys), tuple(hosts)
        self._origins = checked_origins(origins)
        if tools is not None:
            check_tools(self._keys, self._origins, self._hosts)
        if not isinstance(engine, Pool):
            shared = Shared(limits or Limits())
            service = Service(
                engine,
                names=names,
                defaults=defaults,
                shared=shared,
                plan=plan,
                file_name=file_name,
            )
            member = Member(service, is_pinned=True, loaded=service)
            engine = Pool([member], shared=shared, any_model=any_model)
        self.pool, engine.shared.tools = engine, tools
        self._running: Running | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def service(self) -> Service:
        """The first model that is loaded."""
        service: Service = self.pool.ready()[0]
        return service

    def app(self, hosts: Sequence[str] = ()) -> ASGIApp:
        """An ASGI application, to be mounted or run elsewhere.

        Where it listens is not known here. Without keys it answers only by names of this machine,
        those of the server's `hosts`, and these.

        Args:
            hosts: further names by which clients reach it; "*" takes any name.
        """
        for service in self.pool.ready():
            service.prepare_formats()
        return self._app([*self._hosts, *hosts], takes_any=bool(self._keys) and not hosts)

    def _app(self, hosts: Sequence[str], *, takes_any: bool) -> ASGIApp:
        from edgespec.serve.app import make_app

        known = None if takes_any or "*" in hosts else hosts
        return make_app(self.pool, AuthSettings(self._keys, self._origins, known))

    def run(self, listener: socket.socket, ready: threading.Event | None = None) -> None:
        """Answer on a socket of `bind`, until an interrupt or `close`.

        Raises UnsupportedError where others could use it without a key.
        """
        from edgespec.serve.running import Running

        host = listener.getsockname()[0]
        check_exposure(host, self._keys)
        app = self._app(self._hosts, takes_any=not is_loopback(host))

        def on_start() -> None:
            threading.Thread(target=self._prepare_formats, daemon=True).start()
            if ready is not None:
                ready.set()

        self._running = Running(app, self.pool.limits, on_start, self.pool.shared.stop)
        try:
            self._running.run([listener])
        finally:
            self._is_over.set()
            self.pool.close()
            self._running.has_ended()

    def _prepare_formats(self) -> None:
        """Prepare what answers of a form need, when nobody has been answered for a moment.

        That keeps the interpreter for half a second: who asks in the first one waits for less than
        if the server had begun later.
        """
        for service in self.pool.ready():
            while not self._is_over.wait(_QUIET_S):
                if not service.is_busy:
                    service.prepare_formats()
                    break

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Answer in a thread of its own until `close`; returns the address, `http://HOST:PORT`.

        Port 0 takes a free one. Raises as `bind`.
        """
        listener, ready = bind(host, port, self._keys), threading.Event()
        address = address_of(listener)
        self._thread = threading.Thread(
            target=self.run, args=(listener, ready), name="edgespec-server", daemon=True
        )
        self._thread.start()
        if not ready.wait(_START_S):
            raise BackendError(f"the server does not answer on {address} after {_START_S:.0f} s")
        return address

    def close(self) -> None:
        """Stop, and end all generations; safe to call twice."""
        self._is_over.set()
        if self._running is not None:
            self._running.stop()
        if self._thread is not None:
            self._thread.join()
        self.pool.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def bind(host: str, port: int, keys: Sequence[str] = ()) -> socket.socket:
    """A socket that listens: from now on the port is taken, and clients wait to be answered.

    Raises UnsupportedError where it cannot be had, and where others could use it without a key.
    """
    check_exposure(host, keys)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once only where the protocol is named: otherwise every second part of what a
    # kept connection is sent waits 40 ms for the client.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Windows' SO_REUSEADDR would share the port with another server; elsewhere it is what lets a
    # server that was just ended start again.
    reuse = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    try:
        listener.setsockopt(socket.SOL_SOCKET, reuse, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as problem:
        listener.close()
        if getattr(problem, "errno", None) == errno.EADDRINUSE:
            raise UnsupportedError(
                f"port {port} of {host or 'this machine'} is in use: another server listens there",
                hint="end that server, or choose another --port; 0 takes a free one",
            ) from problem
        reason = getattr(problem, "strerror", None) or problem
        raise UnsupportedError(
            f"cannot listen on {host} port {port}: {reason}", hint="choose another --port or --host"
        ) from problem
    return listener


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def require_packages() -> None:
    """Raise MissingDependencyError where the packages of the `serve` extra are missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"a server needs the package {missing[0]}", hint="pip install 'edgespec[serve]'"
        )
