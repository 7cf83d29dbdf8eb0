"""What this machine lets this process use: processor cores and memory.

Affinity masks and container limits count as the machine: a process confined to two cores of
sixty-four has two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

from edgespec.memory.device import cgroups
from edgespec.memory.device.cgroups import read_text
from edgespec.memory.device.llama_binary import kernel_files, package_version

# Our word for an instruction set -> Linux's.
_FEATURE_FLAGS = {
    "avx2": "avx2",
    "avx512": "avx512f",
    "neon": "asimd",
    "dotprod": "asimddp",
    "i8mm": "i8mm",
}
_MOST_SYSCTL = 256  # bytes
_CPUS = Path("/sys/devices/system/cpu")
_PERFORMANCE_CPUS = Path("/sys/devices/cpu_core/cpus")  # Intel's, where there are others
_DEVICE_TREE = Path("/proc/device-tree")


def allowed_cpus() -> list[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_busy_s() -> float | None:
    """Seconds that processors worked for a container whose quota binds; None without one."""
    cores, group = cgroups.quota()
    return None if group is None or cores >= len(allowed_cpus()) else cgroups.busy_s(group)


def granted_cpus() -> float:
    """Logical CPUs that this process may keep busy: affinity and quotas."""
    return min(float(len(allowed_cpus())), cgroups.quota()[0])


def usable_cores() -> int:
    """Physical cores this process should use: affinity, hyper-threads and quota respected.

    One thread per physical core is fastest for the matrix products of a decode step, which
    saturate a core's vector units or its memory bandwidth. Cores that are slow enough to hold up
    the others are left out.
    """
    cores = _fast_cores(_CPUS, *allowed_cpus())
    if platform.system() != "Linux":
        fast = int.from_bytes(_sysctl("hw.perflevel0.physicalcpu"), "little")
        cores = min(cores, fast or psutil.cpu_count(logical=False) or cores)
    return max(1, int(min(cores, cgroups.quota()[0])))


@functools.cache
def _fast_cores(folder: Path, *cpus: int) -> int:
    """Physical cores of the fast ones among some CPUs: a plan asks often, and they stay."""
    return len(
        {
            read_text(folder / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
            for cpu in _fast_cpus(list(cpus))
        }
    )


def _fast_cpus(cpus: list[int]) -> list[int]:
    """Those that a step is fastest on, where cores differ.

    A step waits for its slowest thread, and each has an equal part of the work: n cores are worth
    n times the slowest one's capacity. Of Intel's two kinds only performance cores are used, as
    llama.cpp does: efficiency cores bring no memory bandwidth of their own.
    """
    if performance := _numbers_of(read_text(_PERFORMANCE_CPUS)):
        return [cpu for cpu in cpus if cpu in performance] or cpus
    capacities = {cpu: read_text(_CPUS / f"cpu{cpu}" / "cpu_capacity") for cpu in cpus}
    if not all(text.isdecimal() for text in capacities.values()):
        return cpus
    order = sorted(cpus, key=lambda cpu: -int(capacities[cpu]))
    worth = [count * int(capacities[cpu]) for count, cpu in enumerate(order, 1)]
    best = max(range(len(worth)), key=lambda i: (worth[i], i))
    return order[: best + 1]


def _numbers_of(ranges: str) -> set[int]:
    """Of a list as Linux writes it: "0-3,8"."""
    numbers: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def free_memory() -> Iterator[tuple[Path | None, int]]:
    """Bytes that are free: of the machine (None), and of each group that limits this process."""
    yield None, int(psutil.virtual_memory().available)
    yield from cgroups.free_memory()


def available_bytes() -> int:
    """Memory this process can still take without swapping; swap is never counted."""
    return min(free for _, free in free_memory())


def total_bytes() -> int:
    """Memory of the machine."""
    return int(psutil.virtual_memory().total)


@functools.cache
def cpu_name() -> str:
    """The processor's own name, for reports and cache keys; of a board without one, the board's.

    All ARM processors of a kind are "ARMv8 Processor rev 1 (v8l)".
    """
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name") and "ARMv" not in line:
            return line.split(":", 1)[1].strip()
    board = read_text(_DEVICE_TREE / "model").strip("\0")
    brand = _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    return board or brand or platform.processor() or platform.machine()


@functools.cache
def llama_build() -> str:
    """Version of llama-cpp-python, and a sample of its kernels: compiler flags change them, too."""
    installed = package_version() or "missing"
    digest = hashlib.blake2b(digest_size=4)
    for library in kernel_files():
        with contextlib.suppress(OSError), library.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            # 64 samples: a library for GPUs has hundreds of megabytes.
            for place in range(0, size, max(1, size // 64)):
                file.seek(place)
                digest.update(file.read(4096))
    return f"{installed} {digest.hexdigest()}"


def cpu_features() -> list[str]:
    """Instruction sets that decide which kernels llama.cpp's CPU backend uses.

    Of "avx2", "avx512", "dotprod", "i8mm", "neon"; empty where the system does not tell.
    """
    flags = cpu_flags()
    return sorted(ours for ours, theirs in _FEATURE_FLAGS.items() if theirs in flags)


def cpu_flags() -> frozenset[str]:
    """Instruction sets by Linux's names; empty on other systems."""
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def last_cache_bytes() -> int:
    """Bytes of all last-level caches together, as Linux tells them; 0 where nobody does."""
    caches: dict[str, int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            size = (folder / "size").read_text().strip()
            caches[(folder / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(caches.values())


def _sysctl(name: str) -> bytes:
    """What macOS says of itself; empty where it says nothing, and on other systems."""
    if platform.system() != "Darwin":
        return b""
    import ctypes

    query = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    size = ctypes.c_size_t(_MOST_SYSCTL)
    value = ctypes.create_string_buffer(_MOST_SYSCTL)
    if query is None or query(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return b""
    return value.raw[: size.value]


def has_unified_memory() -> bool:
    """Whether the GPU, if there is one, uses the processor's memory: Apple silicon, Jetson."""
    if platform.system() == "Darwin":
        return platform.machine() == "arm64"
    # Not the board's name: JetPack 5 calls it "NVIDIA Orin Nano Developer Kit".
    return "nvidia,tegra" in read_text(_DEVICE_TREE / "compatible")


def device_key() -> str:
    """What makes a measured step time valid again: this processor with this many cores."""
    return f"{cpu_name()} | {platform.machine()} | {usable_cores()} cores"
