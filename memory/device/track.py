"""Memory the process really used: peaks, parts, and how it changed over time."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Larger blocks are given back when they are freed. Rows of logits are smaller: with room for them
# a step asks the system for no pages.
MOST_FREED_BYTES = 4 << 20
_MALLOPT_TRIM, _MALLOPT_MMAP = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_MALLOPT_ARENAS = -8  # M_ARENA_MAX
_PAGE_FIELDS = {"Anonymous": "anonymous", "Rss": "resident", "Shared_Clean": "shared_file"}


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far, mapped weights included; 0 if unknown."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
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
    parts = resident_parts()
    if "anonymous" in parts:
        return parts["anonymous"]
    import psutil

    return int(psutil.Process().memory_full_info().uss)


def use_one_arena() -> None:
    """Let all threads of this process allocate in one place, where that is glibc.

    It keeps what was freed at the ends of all others, whatever `give_back_memory` does: after
    loads and unloads of three models 3 to 40 MiB, and a few of each burst of requests. To be
    called before there are threads. Nothing allocates while it computes, so nobody waits for it.
    """
    change = _of_glibc("mallopt")
    if change is not None:
        change(_MALLOPT_ARENAS, 1)


def limit_freed_memory() -> None:
    """From now on glibc keeps at most `MOST_FREED_BYTES` for later, of any thread.

    Without this its thresholds grow with every large buffer that is freed, up to 32 MiB of one
    block and 64 MiB in all.
    """
    limit = _of_glibc("mallopt")
    if limit is not None:
        limit(_MALLOPT_MMAP, MOST_FREED_BYTES)
        limit(_MALLOPT_TRIM, MOST_FREED_BYTES)


def give_back_memory() -> None:
    """Return to the system what the C library keeps of freed memory, where that is glibc."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def resident_parts() -> dict[str, int]:
    """Resident bytes by kind, from Linux' smaps_rollup; empty elsewhere.

    `anonymous` is memory of the process alone, the rest are pages of files.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.count(":") and line.endswith("kB"))
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields}
    return {name: sizes[key] for key, name in _PAGE_FIELDS.items() if key in sizes}


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
