"""Who may use a server, and by which names. Knows no HTTP package."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server.

    Args:
        keys: any of them lets in; without one everybody who reaches the server may use it.
        origins: of pages that browsers may let use it, besides its own; "*" is all.
        hosts: names it is reached by; empty takes any.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()


def local_hosts(host: str) -> tuple[str, ...]:
    """Names by which a server on a loopback address is reached; none for other addresses.

    A page on the internet may have its name lead to this machine, and is then not the server's.
    """
    return ("localhost", "127.0.0.1", "::1", host) if is_loopback(host) else ()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
