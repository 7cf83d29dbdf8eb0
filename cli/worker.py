"""`edgespec worker`: lends this machine's devices to another one."""

from __future__ import annotations

import socket

from edgespec.cli import options
from edgespec.cli.options import SERVER
from edgespec.cli.render import note
from edgespec.errors import UnsupportedError
from edgespec.option_fields import option, size_bytes

_PORT = 50052  # that of llama.cpp's server


def worker(
    host: str = option(
        "127.0.0.1", "Address to listen on; any other needs --insecure.", panel=SERVER
    ),
    port: int = option(
        _PORT,
        "Port; 0: a free one.",
        also="-p",
        panel=SERVER,
        low=0,
        high=65535,
    ),
    memory: int | None = option(
        None,
        "Most memory to lend: 4GiB, 800MB. Default: what is free.",
        read=size_bytes,
        panel=options.MEMORY,
    ),
    threads: int | None = option(None, "CPU threads. Default: cores.", also="-t", low=1),
    insecure: bool = option(False, "Let whoever reaches --host run code here."),
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
    from edgespec.serve.access import is_loopback

    if not is_loopback(host) and not insecure:
        raise UnsupportedError(
            f"a worker on {host} would run code for whoever reaches it: its protocol has no "
            "authentication",
            hint="use an ssh tunnel to 127.0.0.1, or add --insecure in a network where you trust "
            "everybody",
        )
    try:  # before anything is measured
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot listen on {host} port {port}: {problem.strerror or problem}",
            hint="use another --port, or an address of this machine with --host",
        ) from problem
    with listener:
        if not is_loopback(host):
            note(
                "warning: no authentication, no encryption: whoever reaches this port can run "
                "code here; prefer --host 127.0.0.1 and an ssh tunnel"
            )
        require_rpc()
        silence_c()
        served = Worker(memory, threads or usable_cores(), note)
        address, number = listener.getsockname()[:2]
        note(f"lending {served.describe()} at {address}:{number}; Ctrl-C stops")
        served.run(listener)
