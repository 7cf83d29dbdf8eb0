"""What this machine lets this process use: processor cores and memory.

Affinity masks and container limits count as the machine: a process confined to two cores of
sixty-four has two.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_GPU_KINDS = ("cann", "cuda", "hip", "metal", "musa", "opencl", "sycl", "vulkan")
_CPUS = Path("/sys/devices/system/cpu")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def allowed_cpus() -> list[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cgroup_cpus() -> float:
    """Cores a container's quota grants, or infinity (cgroup v2, then v1)."""
    fields = _read(_CGROUP / "cpu.max").split()
    if not fields:
        quota, period = (
            _read(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")
        )
        fields = [quota, period]
    try:
        quota_us, period_us = float(fields[0]), float(fields[1])
    except (ValueError, IndexError):  # no limit: "max", an absent file
        return float("inf")
    return quota_us / period_us if quota_us > 0 else float("inf")


def usable_cores() -> int:
    """Physical cores this process may use: affinity, hyper-threads and quota respected.

    One thread per physical core is fastest for the matrix products of a decode step, which
    saturate a core's vector units or its memory bandwidth.
    """
    cpus = allowed_cpus()
    siblings = {
        _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus
    }
    cores = len(siblings)
    if platform.system() != "Linux":
        cores = min(cores, psutil.cpu_count(logical=False) or cores)
    return max(1, int(min(cores, _cgroup_cpus())))


def _cgroup_free_bytes() -> float:
    """Bytes a container's memory limit leaves, or infinity (cgroup v2, then v1)."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(_CGROUP / limit_name), _read(_CGROUP / used_name)
        if limit.isdigit() and used.isdigit():
            return max(0, int(limit) - int(used))
    return float("inf")


def available_bytes() -> int:
    """Memory this process can still take without swapping; swap is never counted."""
    return int(min(psutil.virtual_memory().available, _cgroup_free_bytes()))


def total_bytes() -> int:
    """Memory of the machine."""
    return int(psutil.virtual_memory().total)


@functools.cache
def cpu_name() -> str:
    """The processor's own name, for reports and cache keys."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def llama_accelerators() -> tuple[str, ...]:
    """Kinds of GPU llama.cpp was built for: "cuda", "metal", ...; told by its library files.

    The package is located, not imported: planning loads no inference library.
    """
    found = importlib.util.find_spec("llama_cpp")
    kinds: set[str] = set()
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in Path(folder).glob("lib/*ggml-*"):
            kinds.update(kind for kind in _GPU_KINDS if f"ggml-{kind}" in file.name)
    return tuple(sorted(kinds))


def device_key() -> str:
    """What makes a measured step time valid again: this processor with this many cores."""
    return f"{cpu_name()} | {platform.machine()} | {usable_cores()} cores"
