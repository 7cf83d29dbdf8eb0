"""Memory that running programs have planned for and not taken yet, so that no other plans with it.

A program that is about to load writes down what it will hold; what of that it does not hold yet is
not free for others. Entries are the user's, in the cache directory. Programs of other users and of
other containers are not seen, nor others where nothing can be written there.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from edgespec.memory.device import cgroups, host
from edgespec.memory.store import cache

_KIND, _KEY = "reservations", "programs"


def reserve(nbytes: int, fits: Callable[[], bool]) -> bool:
    """Reserve memory for this process if it `fits`, in place of what it had reserved before.

    `nbytes` counts what the process holds already, and no mapped weights. No two processes are
    asked at once whether it fits; what is reserved already fits.
    """
    answer: list[bool] = []

    def change(document: dict[str, Any] | None) -> dict[str, Any] | None:
        answer.append(_ours(document) == nbytes or fits())
        return _changed(document, nbytes) if answer[0] else None

    cache.update(_KIND, _KEY, change)
    return answer[0]


def release() -> None:
    """Give up what this process has reserved."""
    if _ours(cache.load(_KIND, _KEY)):
        cache.update(_KIND, _KEY, lambda document: _changed(document, 0))


def unreserved_bytes() -> int:
    """Memory that this process can still take and that no other program counts on."""
    left = list(_left(cache.load(_KIND, _KEY)))
    if not left:
        return host.available_bytes()
    free = (
        free - sum(nbytes for group, nbytes in left if folder in (None, group, *group.parents))
        for folder, free in host.free_memory()
    )
    return max(0, min(host.available_bytes(), *free))


def _changed(document: dict[str, Any] | None, nbytes: int) -> dict[str, Any]:
    """The entries with this process's, and without those that are of no use any more."""
    now = time.time()
    kept = [one for one in _entries(document) if _is_of_use(one, now)]
    if nbytes:
        group = next((str(one.folder) for one in cgroups.groups("memory")), "")
        kept.append(
            {
                "pid": os.getpid(),
                "start": psutil.Process().create_time(),
                "bytes": nbytes,
                "group": group,
                "where": _where(),
                "time": now,
            }
        )
    return {"programs": kept}


_TYPES = {"pid": int, "start": float, "bytes": int, "group": str, "where": str, "time": float}


def _entries(document: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The entries that are whole."""
    found = (document or {}).get("programs")
    return [
        one
        for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict) and all(type(one.get(key)) is kind for key, kind in _TYPES.items())
    ]


def _here(document: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [one for one in _entries(document) if one["where"] == _where()]


def _ours(document: dict[str, Any] | None) -> int:
    """What this process has reserved."""
    ours = (one for one in _here(document) if one["pid"] == os.getpid() and _is_alive(one))
    return sum(one["bytes"] for one in ours)


def _left(document: dict[str, Any] | None) -> Iterator[tuple[Path, int]]:
    """What other programs have reserved and do not hold yet, by the group they are in."""
    for one in _here(document):
        if one["pid"] != os.getpid() and _is_alive(one):
            yield Path(one["group"]), max(0, one["bytes"] - _taken(one["pid"]))


def _is_of_use(one: dict[str, Any], now: float) -> bool:
    """Whether an entry is another living program's, as far as that can be told."""
    if one["where"] != _where():
        # A day is enough for machines and containers that cannot be looked at from here.
        return abs(now - float(one["time"])) < 86400.0
    is_other: bool = one["pid"] != os.getpid()
    return is_other and _is_alive(one)


def _where() -> str:
    """This machine since it was started, and which processes can be seen from here."""
    boot = cgroups.read_text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()
    try:
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return boot


def _is_alive(one: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(one["pid"])
        # Within two seconds, as clocks are set now and then.
        is_same: bool = abs(process.create_time() - one["start"]) < 2.0
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, OverflowError, ValueError):
        return False
    except psutil.Error:  # there, but not to be looked at
        return True


def _taken(pid: int) -> int:
    """Resident bytes of a process, of mapped files those of libraries at most."""
    try:
        held = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    files = int(getattr(held, "shared", 0))
    # Of an interpreter and the libraries: pages of files that count as taken. Others are pages of
    # mapped weights, which are not reserved: the kernel can give them up.
    return int(held.rss) - files + min(files, 48 << 20)
