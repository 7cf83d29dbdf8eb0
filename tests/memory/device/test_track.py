"""Measured memory: peaks, parts, and samples over time."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time

import pytest
from planning_cases import held

from edgespec.memory.device.track import (
    MemoryTracker,
    peak_resident_bytes,
    private_bytes,
    resident_bytes,
)

MIB = 1 << 20


def test_the_peak_stays_where_the_memory_was_largest() -> None:
    before = resident_bytes()
    with held(64 * MIB):
        with_block = resident_bytes()
    assert with_block >= before + 60 * MIB
    assert peak_resident_bytes() >= with_block - MIB
    assert resident_bytes() <= with_block - 60 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="smaps_rollup is Linux's")
def test_anonymous_memory_is_a_part_of_the_resident_one() -> None:
    before = private_bytes()
    with held(64 * MIB):
        assert 60 * MIB < private_bytes() - before < 68 * MIB
        assert private_bytes() < resident_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are glibc's")
def test_large_buffers_are_given_back_when_they_are_freed() -> None:
    """In whichever thread, of a process that freed nothing before: glibc kept the second."""
    code = """
import ctypes, threading
from edgespec.memory.device.track import limit_freed_memory, resident_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 24 << 20
def allocate():
    before = resident_bytes()
    for _ in range(3):
        place = libc.malloc(size)
        ctypes.memset(place, 1, size)
        libc.free(ctypes.c_void_p(place))
    print(resident_bytes() - before)
limit_freed_memory()
allocate()
other = threading.Thread(target=allocate)
other.start()
other.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert max(map(int, done.stdout.split())) < 8 * MIB


def test_samples_follow_what_happens() -> None:
    with MemoryTracker(interval_s=0.01) as tracker:
        tracker.mark("small")
        time.sleep(0.05)
        tracker.mark("large")
        # Pages of the system: what other tests freed could be used again for a bytearray.
        with mmap.mmap(-1, 48 * MIB) as block:
            block[::4096] = b"x" * len(block[::4096])
            time.sleep(0.05)
    (start, small), (middle, large) = tracker.phases
    assert (small, large) == ("small", "large")
    early = [s.resident_bytes for s in tracker.samples if start <= s.time_s < middle]
    late = [s.resident_bytes for s in tracker.samples if s.time_s > middle]
    assert early and max(late) >= max(early) + 40 * MIB
    times = [sample.time_s for sample in tracker.samples]
    assert times == sorted(times)


def test_a_tracker_stops_when_the_work_raises() -> None:
    tracker = MemoryTracker(interval_s=0.01)
    with pytest.raises(ValueError, match="work"), tracker:
        raise ValueError("work")
    count = len(tracker.samples)
    time.sleep(0.05)
    assert len(tracker.samples) == count


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's allocator")
def test_threads_allocate_where_memory_is_given_back() -> None:
    """What a thread has freed goes back, as far as it is whole pages at the end, too."""
    code = """
import ctypes, threading
from edgespec.memory.device.track import give_back_memory, private_bytes, use_one_arena
use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallopt(-3, 64 << 20)  # M_MMAP_THRESHOLD, as after a large buffer was freed
libc.mallopt(-1, 64 << 20)  # M_TRIM_THRESHOLD
before = private_bytes()
def work():
    places = [libc.malloc(100_000) for _ in range(200)]
    for place in places:
        ctypes.memset(place, 1, 100_000)
    for place in places:
        libc.free(place)
thread = threading.Thread(target=work)
thread.start()
thread.join()
give_back_memory()
print(private_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * MIB
