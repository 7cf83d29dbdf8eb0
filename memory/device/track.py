"""Memory the process really used: peaks, parts, and how it changed over time."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# Larger blocks are given back when they are freed. Rows of logits are smaller: with room for them
# a step asks the system for no pages.
MOST_FREED_BYTES = 4 << 20
_MALLOPT_TRIM, _MALLOPT_MMAP = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_MALLOPT_ARENAS = -8  # M_ARENA_MAX


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far, mapped weights included; 0 if unknown."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def resident_bytes() -> int:
    """Resident set of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def private_bytes() -> int:
    """Resident bytes that are this process's alone, and free again when it gives them back."""
    with suppress(OSError, StopIteration):  # Linux alone has them, in a file that is quick to read
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024
    import psutil

    return int(psutil.Process().memory_full_info().uss)


def use_one_arena() -> None:
    """Let all threads of this process allocate in one place, where that is glibc.

    It keeps what was freed at the ends of all others, whatever `give_back_memory` does: after
    loads and unloads of three models 3 to 40 MiB, and a few of each burst of requests. To be
    called before there are threads. Nothing allocates while it computes, so nobody waits for it.
    """
    _of_glibc("mallopt")(_MALLOPT_ARENAS, 1)


def limit_freed_memory() -> None:
    """From now on glibc keeps at most `MOST_FREED_BYTES` for later, of any thread.

    Without this its thresholds grow with every large buffer that is freed, up to 32 MiB of one
    block and 64 MiB in all.
    """
    _of_glibc("mallopt")(_MALLOPT_MMAP, MOST_FREED_BYTES)
    _of_glibc("mallopt")(_MALLOPT_TRIM, MOST_FREED_BYTES)


def give_back_memory() -> None:
    """Return to the system what the C library keeps of freed memory, where that is glibc."""
    _of_glibc("malloc_trim")(0)


def _of_glibc(name: str) -> Callable[..., object]:
    """One of its functions; elsewhere one that does nothing."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, name, lambda *_: None)


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes at a moment, in seconds since the tracker began."""

    time_s: float
    resident_bytes: int


@dataclass
class MemoryTracker:
    """Samples the resident set in a thread of its own: 20 us every `interval_s`.

    `mark` names the phase that begins, so that a plot can say what the process was doing.
    """

    interval_s: float = 0.05
    samples: list[Sample] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)

    def __enter__(self) -> MemoryTracker:
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def mark(self, phase: str) -> None:
        """A new phase begins now."""
        self.phases.append((time.perf_counter() - self._start, phase))

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        self.samples.append(Sample(time.perf_counter() - self._start, resident_bytes()))
