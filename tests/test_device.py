"""The device probe on machines made of files: containers, hyper-threads, affinity masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from edgespec.memory import device
from edgespec.memory.track import peak_resident_bytes

GIB = 1 << 30
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends a Linux machine: files by path, CPUs, siblings of CPUs, free memory."""
    root = tmp_path / "machine"
    root.mkdir()
    monkeypatch.setattr(device, "_CGROUP", root / "cgroup")
    monkeypatch.setattr(device, "_CPUS", root / "cpu")
    monkeypatch.setattr("platform.system", lambda: "Linux")

    def pretend(
        cgroup: dict[str, str] | None = None,
        *,
        cpus: Iterable[int] = range(8),
        siblings: dict[int, str] | None = None,
        free: int = 8 * GIB,
    ) -> None:
        files = {f"cgroup/{name}": text for name, text in (cgroup or {}).items()}
        for cpu, text in (siblings or {}).items():
            files[f"cpu/cpu{cpu}/topology/thread_siblings_list"] = text
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")
        allowed = set(cpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
        memory = SimpleNamespace(available=free, total=16 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return pretend


# ------------------------------------------------------------------------------ cores


def test_cores_without_any_limit(machine: Machine) -> None:
    machine()
    assert device.usable_cores() == 8


def test_hyper_threads_of_a_core_count_once(machine: Machine) -> None:
    machine(cpus=range(4), siblings={0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert device.usable_cores() == 2


def test_an_affinity_mask_counts_as_the_machine(machine: Machine) -> None:
    """CPUs 2 and 6 are one core and 3 is half of another one: two cores."""
    machine(cpus={2, 3, 6}, siblings={cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert device.allowed_cpus() == [2, 3, 6]
    assert device.usable_cores() == 2


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "350000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu.max": "200000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000"}, 8),
    ],
    ids=str,
)
def test_a_containers_quota_counts_as_the_machine(
    machine: Machine, files: dict[str, str], cores: int
) -> None:
    machine(files)
    assert device.usable_cores() == cores


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * GIB),
        ({"memory.max": str(2 * GIB), "memory.current": str(GIB // 2)}, 3 * GIB // 2),
        ({"memory.max": str(64 * GIB), "memory.current": str(GIB)}, 8 * GIB),
        ({"memory.max": "max", "memory.current": str(GIB)}, 8 * GIB),
        ({"memory.max": str(GIB), "memory.current": str(GIB + 4096)}, 0),
        ({"memory.max": str(GIB)}, 8 * GIB),
        (
            {
                "memory/memory.limit_in_bytes": str(4 * GIB),
                "memory/memory.usage_in_bytes": str(GIB),
            },
            3 * GIB,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": str(GIB),
            },
            8 * GIB,
        ),
    ],
    ids=str,
)
def test_free_memory_is_the_smaller_of_the_machines_and_the_containers(
    machine: Machine, files: dict[str, str], free: int
) -> None:
    machine(files)
    assert device.available_bytes() == free


def test_the_machine_itself_may_have_less_than_the_container_allows(machine: Machine) -> None:
    machine({"memory.max": str(8 * GIB), "memory.current": "0"}, free=GIB)
    assert device.available_bytes() == GIB
    assert device.total_bytes() == 16 * GIB


# ------------------------------------------------------------------------------ key, peak


def test_step_times_are_valid_for_a_processor_and_a_number_of_cores(machine: Machine) -> None:
    machine(cpus=range(8))
    eight = device.device_key()
    assert eight.startswith(device.cpu_name())
    machine(cpus=range(2))
    assert device.device_key() != eight
    machine(cpus=range(8))
    assert device.device_key() == eight


def test_the_peak_is_what_was_used_at_most_not_what_is_used_now() -> None:
    """64 MiB are touched and given back; the peak keeps them."""
    resident = psutil.Process().memory_info().rss
    size = max(64 << 20, peak_resident_bytes() - resident + (64 << 20))
    before = peak_resident_bytes()
    np.ones(size, np.uint8).sum()
    after = peak_resident_bytes()
    assert after >= before + (32 << 20)
    assert after <= psutil.virtual_memory().total
