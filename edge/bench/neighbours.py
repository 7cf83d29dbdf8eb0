"""What else computes on this machine while something is measured.

Threads that wait for each other at every layer are slowed tenfold by one busy neighbour, so a
measurement says whether there was one.
"""

from __future__ import annotations

import time

import psutil

BUSY = 0.15  # of a core, beyond which speeds are not those of this machine


class Neighbours:
    """Processor time of everything but this process and its children, since the last look."""

    def __init__(self) -> None:
        self._seen = self._look()

    def share(self) -> float:
        """Cores that others kept busy since the last call, or since the beginning."""
        before, self._seen = self._seen, self._look()
        elapsed_s, everything_s, ours_s = (
            now - then for now, then in zip(self._seen, before, strict=True)
        )
        return max(0.0, everything_s - ours_s) / max(1e-3, elapsed_s)

    @staticmethod
    def _look() -> tuple[float, float, float]:
        """Seconds: now, spent by all processors, and of that by us."""
        times = psutil.cpu_times()
        waiting = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        ours = 0.0
        process = psutil.Process()
        for one in (process, *process.children(recursive=True)):
            try:
                spent = one.cpu_times()
            except psutil.Error:  # it has just ended
                continue
            ours += spent.user + spent.system
        return time.monotonic(), sum(times) - waiting, ours
