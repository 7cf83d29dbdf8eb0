"""Limits of the control groups (cgroups, v1 and v2) that this process is in.

A group limits all processes in it and below it, so the process's own group and every group above it
count: the smallest limit holds. Only groups that a mount shows can be read; a container often sees
none but its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC = Path("/proc/self")
_MOST_READ = 4 << 20  # bytes; hosts of many containers have thousands of mounts
_V2 = ""  # the controllers that v2's line in /proc/self/cgroup names

# What a group's memory may be and is, and what the names in its `memory.stat` begin with.
# v1's names without "total_" leave out the groups below.
_MEMORY_V2 = (("memory.max", "memory.high"), "memory.current", "", "file_")
_MEMORY_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "total_")


@dataclass(frozen=True, slots=True)
class Group:
    """A folder of a mounted hierarchy."""

    folder: Path
    place: str  # in its hierarchy, below what is mounted
    is_v2: bool


def read_text(path: Path) -> str:
    """The text of a small file, without spaces around it; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_READ).decode(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return ""


def groups(controller: str) -> tuple[Group, ...]:
    """This process's group of a controller, such as "memory", and all above it; its own first."""
    return _groups(controller, _PROC, read_text(_PROC / "cgroup"))


@functools.lru_cache(maxsize=16)
def _groups(controller: str, proc: Path, memberships: str) -> tuple[Group, ...]:
    paths = _paths(memberships)
    inside, outside = [], []
    for line in read_text(proc / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        where, what = before.split(" "), after.split(" ")
        is_v2 = what[0] == "cgroup2"
        is_hierarchy = is_v2 or (what[0] == "cgroup" and controller in what[-1].split(","))
        if len(where) < 5 or not is_hierarchy:
            continue
        point, root = Path(_unescaped(where[4])), _unescaped(where[3])
        path = paths.get(_V2 if is_v2 else controller, "/")
        try:
            below = PurePosixPath(path).relative_to(root)
        except ValueError:
            below = None
        if below is None or ".." in below.parts:
            # The group has no name here, as in some namespaces: the mounted one is all there is.
            outside.append(Group(point, ".", is_v2))
            continue
        for level in (below, *below.parents):
            inside.append(Group(point / level, str(level), is_v2))
    return tuple(inside or outside)


def _paths(memberships: str) -> dict[str, str]:
    """This process's group by controller; v2's under `_V2`."""
    found: dict[str, str] = {}
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            found |= dict.fromkeys(controllers.split(","), path)
    return found


def _unescaped(text: str) -> str:
    """A path of mountinfo, in which a space is written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _number(text: str) -> int | None:
    """A number that limits something; None for "max", -1 or anything else."""
    # One of more than 19 digits is no number below 2^63, and limits nothing.
    is_number = text.isascii() and text.isdigit() and len(text) <= 19
    return int(text) if is_number else None


def _counts(path: Path) -> dict[str, int]:
    """The numbers of a file of names and numbers."""
    pairs = (line.split() for line in read_text(path).splitlines())
    found = ((pair[0], _number(pair[1])) for pair in pairs if len(pair) == 2)
    return {name: count for name, count in found if count is not None}


# -- memory --------------------------------------------------------------------------------


def free_memory() -> Iterator[tuple[Path, int]]:
    """Bytes that each limited group may still take, by its folder.

    Cached pages of files count as free, used lately or not: the kernel gives them up before it
    kills. Those that are not written yet do not count, since some kernels kill before they are.
    """
    for group in groups("memory"):
        names, used_name, lists, dirty = _MEMORY_V2 if group.is_v2 else _MEMORY_V1
        limits = [_number(read_text(group.folder / name)) for name in names]
        limit = min((one for one in limits if one is not None), default=None)
        if limit is None:
            continue
        stat = _counts(group.folder / "memory.stat")
        cached = sum(stat.get(f"{lists}{kind}_file", 0) for kind in ("active", "inactive"))
        unwritten = stat.get(f"{dirty}dirty", 0) + stat.get(f"{dirty}writeback", 0)
        used = _number(read_text(group.folder / used_name)) or 0
        yield group.folder, max(0, limit - max(0, used - max(0, cached - unwritten)))


# -- processors ----------------------------------------------------------------------------


def busy_s(group: Group) -> float | None:
    """Seconds that processors worked for a group; None if unknown."""
    if group.is_v2:
        spent = _counts(group.folder / "cpu.stat").get("usage_usec")
        return None if spent is None else spent / 1e6
    for other in groups("cpuacct"):
        if other.place == group.place and not other.is_v2:
            spent = _number(read_text(other.folder / "cpuacct.usage"))
            return None if spent is None else spent / 1e9
    return None


def quota() -> tuple[float, Group | None]:
    """The smallest quota in cores, and the group that has it; infinity without one."""
    least: tuple[float, Group | None] = float("inf"), None
    for group in groups("cpu"):
        if group.is_v2:
            fields = read_text(group.folder / "cpu.max").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            fields = [read_text(group.folder / name) for name in names]
        time_us, period_us = [*map(_number, fields), None, None][:2]
        if time_us and period_us and time_us / period_us < least[0]:
            least = time_us / period_us, group
    return least
