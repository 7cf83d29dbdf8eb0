"""What else computes on this machine: the cores that other processes keep busy.

Threads that wait for each other at every layer are slowed tenfold by one busy neighbour, so a
measurement says whether there was one, and an engine takes fewer threads beside one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from edgespec.memory.device.cgroups import read_text
from edgespec.memory.device.host import allowed_cpus, available_bytes, cgroup_busy_s

_LOGGER = logging.getLogger("edgespec.decode")
_stalls = itertools.count()  # of this process; the first one is told
_LOADS = Path("/proc/loadavg")
_LOOK_S = 0.5  # at other programs, after a stall
BUSY = 0.15  # of a core, beyond which speeds are not those of this machine

# Seconds: now, spent by the processors this process may use, and of that by us.
Look = tuple[float, float, float]


@functools.cache
def our_cpus() -> tuple[int, ...]:
    """Logical CPUs of this process, as it began: libraries may pin its threads later."""
    return tuple(allowed_cpus())


@functools.cache
def _has_quota() -> bool:
    """Whether a container's quota bound when this process began."""
    return cgroup_busy_s() is not None


def _busy_s() -> float:
    """Seconds that the processors this process may use were busy so far, a container's share."""
    if _has_quota() and (inside := cgroup_busy_s()) is not None:
        return inside
    found = psutil.cpu_times(percpu=True)
    ours = [found[cpu] for cpu in our_cpus() if cpu < len(found)]
    waiting = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as users, too
    return sum(sum(one) - sum(getattr(one, kind, 0.0) for kind in waiting) for one in ours)


def alone() -> Look:
    """The look of a process without children: takes 20 us on two cores."""
    return time.monotonic(), _busy_s(), time.process_time()


def of_steps(threads: Collection[int]) -> Look:
    """The look of threads that make steps, by native id: whoever else computes here is beside them.

    Those of libraries work for them, those of Python do something else, such as reading what other
    clients send. Where a system does not tell threads apart, all of them are of the steps. What
    threads that have ended computed is, too: a team of OpenMP ends with an answer.
    """
    now, busy_s, ours_s = alone()
    if sys.platform == "linux":
        others = {one.native_id for one in threading.enumerate()}.difference(threads)
        ours_s -= sum(_spent_by(one) for one in others if one is not None)
    return now, busy_s, ours_s


def _spent_by(thread: int) -> float:
    """Seconds that a thread of this process computed so far: by a clock that Linux has of each."""
    try:
        return time.clock_gettime(~thread << 3 | 6)
    except OSError:  # it has ended
        return 0.0


def with_children() -> Look:
    """The look of a process whose children belong to it: takes milliseconds."""
    ours = 0.0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        try:
            spent = one.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        ours += spent.user + spent.system
    return time.monotonic(), _busy_s(), ours


def running_now() -> int:
    """Threads of others that have a processor, or wait for one, at this moment.

    The fewest of some looks, as most threads run for a moment only: 20 us where there are none, 8
    ms else. Linux alone tells, of the whole machine: 0 where this process has a part of it.
    """
    fewest = _runnable() - 1  # without this thread
    for _ in range(4):
        if fewest <= 0:
            break
        time.sleep(0.002)
        fewest = min(fewest, _runnable() - 1)
    return max(0, fewest)


def _runnable() -> int:
    """Threads of the machine that have a processor or wait for one; 0 where nothing tells."""
    if _has_quota() or len(our_cpus()) != os.cpu_count():
        return 0
    words = read_text(_LOADS).split()
    return int(words[3].partition("/")[0]) if len(words) > 3 else 0


class Neighbours:
    """Processor time of everything but this process, since the last look."""

    def __init__(self, look: Callable[[], Look] = with_children) -> None:
        self._look = look
        self._seen = look()

    def share(self) -> float:
        """Cores that others kept busy since the last call, or since the beginning."""
        before, self._seen = self._seen, self._look()
        elapsed_s, everything_s, ours_s = (
            now - then for now, then in zip(self._seen, before, strict=True)
        )
        return max(0.0, everything_s - ours_s) / max(1e-3, elapsed_s)


def note_stall(ms: float, expected_ms: float) -> None:
    """Log that a step took that much longer, and what else runs; once in a process.

    Another thread looks, as that takes half a second.
    """
    if next(_stalls) == 0:
        threading.Thread(target=_log_stall, args=(ms, expected_ms), daemon=True).start()


def _log_stall(ms: float, expected_ms: float) -> None:
    before = _spent_s()
    time.sleep(_LOOK_S)
    spent = {one: s - before[one] for one, s in _spent_s().items() if one in before}
    (_, name), most_s = max(spent.items(), key=lambda one: one[1], default=((0, ""), 0.0))
    others = f"{name} computes beside it, on {most_s / _LOOK_S:.1f} cores"
    others = others if most_s >= BUSY * _LOOK_S else "no other program computes now"
    _LOGGER.info(
        "a step took %.1f s, %.0f times what it usually takes; %s, and %.0f MiB are free",
        *(ms / 1e3, ms / expected_ms, others, available_bytes() / 2**20),
    )


def _spent_s() -> dict[tuple[int, str], float]:
    """Processor seconds of other processes, by id and name."""
    found = {}
    for one in psutil.process_iter(["name", "cpu_times"]):
        times = one.info["cpu_times"]
        if times is not None and one.pid != psutil.Process().pid:
            found[one.pid, one.info["name"] or "?"] = times.user + times.system
    return found
