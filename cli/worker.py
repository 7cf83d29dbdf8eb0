"""`edgespec worker`: lends this machine's devices to another one."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.render import note
from edgespec.errors import UnsupportedError
from edgespec.serve.access import is_loopback

_PORT = 50052  # that of llama.cpp's server


def worker(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; any other needs --insecure.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0: a free one.")
    ] = _PORT,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Most memory to lend: 4GiB, 800MB. Default: what is free."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="CPU threads. Default: cores.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let whoever reaches --host run code here.")
    ] = False,
) -> None:
    """Lend this machine's devices to another one. Example: edgespec worker --memory 4GiB

    There, --workers HOST:PORT uses them. The protocol has no authentication and no encryption:
    whoever reaches the port can run code here. So it listens on this machine alone; reach it
    through ssh: ssh -N -L 50052:127.0.0.1:50052 USER@THIS_MACHINE. Another --host needs --insecure,
    and comes from the command line alone: neither from EDGESPEC_HOST nor from a file.
    """
    from edgespec.backends.llama.worker import Worker, silence_c
    from edgespec.memory.device.accelerators import require_rpc
    from edgespec.memory.device.host import usable_cores

    if not is_loopback(host) and not insecure:
        raise UnsupportedError(
            f"a worker on {host} would run code for whoever reaches it: its protocol has no "
            "authentication",
            hint="use an ssh tunnel to 127.0.0.1, or add --insecure in a network where you trust "
            "everybody",
        )
    memory_bytes = None if memory is None else options.size_bytes("--memory", memory)
    with _bind(host, port) as listener:  # before anything is measured
        if not is_loopback(host):
            note(
                "warning: no authentication, no encryption: whoever reaches this port can run "
                "code here; prefer --host 127.0.0.1 and an ssh tunnel"
            )
        require_rpc()
        silence_c()
        served = Worker(memory_bytes, threads or usable_cores(), note)
        address, number = listener.getsockname()[:2]
        note(f"lending {served.describe()} at {address}:{number}; Ctrl-C stops")
        served.run(listener)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UnsupportedError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot listen on {host} port {port}: {problem.strerror or problem}",
            hint="use another --port, or an address of this machine with --host",
        ) from problem
