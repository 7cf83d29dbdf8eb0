"""A server of one engine: `app` for whoever has a server already, `run` for who has none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgespec.annotations import check_arguments
from edgespec.decode.engine import Engine
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.plan.plan import Plan
from edgespec.serve.access import Access, is_loopback, local_hosts
from edgespec.serve.defaults import Defaults
from edgespec.serve.limits import Limits
from edgespec.serve.packages import require_packages
from edgespec.serve.service import Service

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgespec.serve.running import Running

_START_S = 30.0  # that a thread may take until it listens


class Server:
    """OpenAI's interface to a loaded model.

        with edgespec.load("model.gguf") as engine, edgespec.Server(engine) as server:
            print(server.start())

    Args:
        engine: answers; it is not closed with the server.
        names: of the model, as clients ask for it; the first one is what answers call it.
        keys: API keys, of which requests need one; empty asks for none.
        origins: of web pages that may use the server besides its own; "*" is all.
        defaults: settings of answers whose request does not say otherwise.
        limits: how much a request may ask for.
        plan: what the engine was loaded with, to be shown.

    Raises MissingDependencyError without the packages of the `serve` extra.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: Sequence[str] = ("edgespec",),
        keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        defaults: Defaults | None = None,
        limits: Limits | None = None,
        plan: Plan | None = None,
    ) -> None:
        check_arguments(Server.__init__, names=names, keys=keys, origins=origins)
        require_packages()
        self.service = Service(engine, names=names, defaults=defaults, limits=limits, plan=plan)
        self._keys, self._origins = tuple(keys), tuple(origins)
        self._running: Running | None = None
        self._thread: threading.Thread | None = None

    def app(self, hosts: Sequence[str] = ()) -> ASGIApp:
        """An ASGI application, to be mounted or run elsewhere.

        Args:
            hosts: names it is reached by; empty takes any.
        """
        from edgespec.serve.app import make_app

        return make_app(self.service, Access(self._keys, self._origins, hosts))

    def run(self, listener: socket.socket, ready: threading.Event | None = None) -> None:
        """Answer on a socket of `bind`, until an interrupt or `close`."""
        from edgespec.serve.running import Running

        app = self.app(local_hosts(listener.getsockname()[0]))
        on_start = ready.set if ready is not None else _nothing
        self._running = Running(app, self.service.limits, on_start)
        try:
            self._running.run([listener])
        finally:
            self.service.close()

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Answer in a thread of its own until `close`; returns the address, `http://HOST:PORT`.

        Port 0 takes a free one. Raises as `bind`.
        """
        listener, ready = bind(host, port), threading.Event()
        address = address_of(listener)
        self._thread = threading.Thread(
            target=self.run, args=(listener, ready), name="edgespec-server", daemon=True
        )
        self._thread.start()
        if not ready.wait(_START_S):
            raise BackendError(f"the server does not listen on {address} after {_START_S:.0f} s")
        return address

    def close(self) -> None:
        """Stop, and end all generations; safe to call twice."""
        if self._running is not None:
            self._running.stop()
        if self._thread is not None:
            self._thread.join()
        self.service.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _nothing() -> None: ...


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises UnsupportedError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as problem:
        listener.close()
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise UnsupportedError(
            f"cannot listen on {host} port {port}: {reason}", hint="choose another --port or --host"
        ) from problem
    return listener


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_exposure(host: str, keys: Sequence[str]) -> None:
    """Raise UnsupportedError for a server that others on the network could use without a key."""
    if not is_loopback(host) and not keys:
        raise UnsupportedError(
            f"others could use a server on {host} without a key",
            hint="give --api-key or --api-key-file, or use --host 127.0.0.1",
        )
