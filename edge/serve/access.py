"""Who may use a server: its keys, origins of web pages, host names. Knows no HTTP package."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from edgespec.errors import UnsupportedError

# Extensions of browsers have schemes of their own; names may be in any script, as punycode.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?|null")


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Who may use a server; without a key everybody who reaches it."""

    keys: Sequence[str] = ()  # as `checked_keys` returns them
    origins: Sequence[str] = ()  # of web pages that browsers may let use it besides its own, or "*"
    hosts: Sequence[str] | None = None  # besides those of this machine; None takes any name

    def has_key(self, sent: str) -> bool:
        """Whether it is one of the keys. All are compared, so that the time says nothing."""
        return any([hmac.compare_digest(sent.encode(), key.encode()) for key in self.keys])

    def takes_origin(self, origin: str) -> bool:
        """Whether pages of an origin may use the server."""
        return "*" in self.origins or _plain_origin(origin) in map(_plain_origin, self.origins)

    def takes_host(self, host: str) -> bool:
        """Whether the server is known by a name, as a Host header has it.

        A page on the internet may have its own name lead to this machine. It is refused where only
        names of this machine are taken.
        """
        if self.hosts is None:
            return True
        name = host_name(host)
        return is_loopback(name) or name in map(host_name, self.hosts)


def checked_keys(keys: Sequence[str] | None) -> tuple[str, ...]:
    """Keys without the white space around them. None is no key.

    Raises UnsupportedError for an empty list and for a key that is blank or no printable ASCII: an
    empty variable must not open a server, and clients send other letters in several ways.
    """
    if keys is None:
        return ()
    made = tuple(key.strip() for key in keys)
    if not made or not all(made):
        raise UnsupportedError(
            "an API key is blank" if made else "the list of API keys is empty",
            hint="give a key of at least one character, or leave the option out; "
            "a variable in it may be unset",
        )
    for number, key in enumerate(made, 1):
        if not key.isascii() or not key.isprintable():
            raise UnsupportedError(
                f"API key {number} has a character that not every client can send",
                hint="use letters without accents, digits and signs, on one line",
            )
    return made


def checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers send them. Raises UnsupportedError for what no browser sends."""
    made = tuple(map(_plain_origin, origins))
    for given, origin in zip(origins, made, strict=True):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UnsupportedError(
                f"{given!r} is no origin of web pages",
                hint="write --cors http://localhost:3000, with the scheme and the port that the "
                "browser shows; --cors '*' takes all pages",
            )
    return made


def check_exposure(host: str, keys: Sequence[str]) -> None:
    """Raise UnsupportedError for a server that others on the network could use without a key."""
    if not is_loopback(host) and not keys:
        raise UnsupportedError(
            f"others could use a server on {host or 'every address'} without a key",
            hint="give --api-key or --api-key-file, or use --host 127.0.0.1",
        )


def check_tools(keys: Sequence[str], origins: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise UnsupportedError for tools that pages of the internet could call without a key."""
    if not keys and ("*" in hosts or origins):
        option = "--allowed-host '*'" if "*" in hosts else "--cors"
        raise UnsupportedError(
            f"other web pages could call the tools of --mcp without a key, by {option}",
            hint=f"give --api-key or --api-key-file, or leave {option} out",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address, or a name stands for this machine."""
    name = host_name(host)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def host_name(host: str) -> str:
    """A host in lower case, without its port, the brackets of IPv6 and the final dot."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    return name.removesuffix(".")


def _plain_origin(origin: str) -> str:
    """As browsers send it: lower case, no final slash."""
    return origin.strip().lower().rstrip("/")


# Whose earlier texts draft for the request that is served: those of the same API key, and without
# keys everybody's. With drafts of others' texts, an answer's time would tell what they wrote.
HISTORY: ContextVar[str] = ContextVar("history", default="")
# Whose cells of the KV cache a request may find: with two or more keys those of its own, and of
# these the ones with its `cache_salt`. Else an answer's time, and its count of cached tokens, would
# tell what others wrote.
CACHE_SALT: ContextVar[str] = ContextVar("cache_salt", default="")


def history_of(key: str) -> str:
    """A name made of an API key, which does not tell the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]
