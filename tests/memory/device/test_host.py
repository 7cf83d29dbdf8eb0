"""The device probe on machines made of files: containers, hyper-threads, affinity masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from planning_cases import held

from edgespec.memory.device import cgroups, host
from edgespec.memory.device.track import peak_resident_bytes

GIB = 1 << 30
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends a Linux machine: files by path, CPUs, siblings of CPUs, free memory."""
    root = tmp_path / "machine"
    root.mkdir()
    (root / "mountinfo").write_text(
        f"30 24 0:26 / {root}/cgroup rw - cgroup2 cgroup rw\n"
        + "".join(
            f"31 24 0:27 / {root}/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
            for name in ("memory", "cpu", "cpuacct")
        )
    )
    monkeypatch.setattr(cgroups, "_PROC", root)
    monkeypatch.setattr(host, "_CPUS", root / "cpu")
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


def test_hyper_threads_of_a_core_count_once(machine: Machine) -> None:
    machine(cpus=range(4), siblings={0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert host.usable_cores() == 2


def test_an_affinity_mask_counts_as_the_machine(machine: Machine) -> None:
    """CPUs 2 and 6 are one core and 3 is half of another one: two cores."""
    machine(cpus={2, 3, 6}, siblings={cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert host.allowed_cpus() == [2, 3, 6]
    assert host.usable_cores() == 2


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
    assert host.usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "busy"),
    [
        ({"cpu.max": "200000 100000", "cpu.stat": "usage_usec 12500000\nuser_usec 1"}, 12.5),
        ({"cpu.max": "max 100000", "cpu.stat": "usage_usec 12500000"}, None),
        ({"cpu.max": "1600000 100000", "cpu.stat": "usage_usec 12500000"}, None),
        ({"cpu.max": "200000 100000"}, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "300000",
                "cpu/cpu.cfs_period_us": "100000",
                "cpuacct/cpuacct.usage": "2500000000",
            },
            2.5,
        ),
    ],
    ids=str,
)
def test_neighbours_in_a_container_are_those_that_share_its_quota(
    machine: Machine, files: dict[str, str], busy: float | None
) -> None:
    machine(files)
    assert host.cgroup_busy_s() == busy


def test_cpus_that_may_be_kept_busy(machine: Machine) -> None:
    machine(cpus=range(4))
    assert host.granted_cpus() == 4.0
    machine({"cpu.max": "150000 100000"}, cpus=range(4))
    assert host.granted_cpus() == 1.5


# ------------------------------------------------------------------------------ memory


def test_the_machine_itself_may_have_less_than_the_container_allows(machine: Machine) -> None:
    """What groups leave is compared with a slow way in `test_cgroups`."""
    machine({"memory.max": str(8 * GIB), "memory.current": "0"}, free=GIB)
    assert host.available_bytes() == GIB
    assert host.total_bytes() == 16 * GIB


@pytest.mark.parametrize(
    ("stat", "free"),
    [
        ("active_file 368435456\nfile_dirty 90000000\nfile_writeback 10000000", 7 * GIB // 4),
        ("active_file 4096\nfile_dirty 8192", 3 * GIB // 2),
        ("inactive_file many", 3 * GIB // 2),
    ],
)
def test_cached_files_are_free_once_they_are_written(
    machine: Machine, stat: str, free: int
) -> None:
    """Of 2 GiB half a GiB is used, and of that a quarter GiB are such pages, or none."""
    files = {"memory.max": str(2 * GIB), "memory.current": str(GIB // 2), "memory.stat": stat}
    machine(files)
    assert host.available_bytes() == free


# ------------------------------------------------------------------------------ instruction sets


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretends a /proc/cpuinfo on Linux."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    read = cgroups.read_text

    def pretend(text: str) -> None:
        monkeypatch.setattr(
            host, "read_text", lambda path: text if path.name == "cpuinfo" else read(path)
        )

    return pretend


@pytest.mark.parametrize(
    ("line", "features"),
    [
        ("flags\t\t: fpu sse2 avx avx2 fma", {"avx2"}),
        ("flags\t\t: fpu avx2 avx512f avx512bw", {"avx2", "avx512"}),
        ("flags\t\t: fpu sse2 avx", set()),
        ("Features\t: fp asimd evtstrm aes", {"neon"}),
        ("Features\t: fp asimd asimddp i8mm", {"neon", "dotprod", "i8mm"}),
        ("vmx flags\t: avx2", set()),
        ("", set()),
    ],
)
def test_instruction_sets_are_those_of_the_first_processor(
    cpuinfo: Callable[[str], None], line: str, features: set[str]
) -> None:
    cpuinfo(f"processor\t: 0\nmodel name\t: Any\n{line}\n\nprocessor\t: 1\nflags: fpu\n")
    assert host.cpu_features() == sorted(features)


# ------------------------------------------------------------------------------ key, peak


def test_step_times_are_valid_for_a_processor_and_a_number_of_cores(machine: Machine) -> None:
    machine(cpus=range(8))
    eight = host.device_key()
    assert eight.startswith(host.cpu_name())
    machine(cpus=range(2))
    assert host.device_key() != eight
    machine(cpus=range(8))
    assert host.device_key() == eight


def test_the_peak_is_what_was_used_at_most_not_what_is_used_now() -> None:
    """64 MiB are touched and given back; the peak keeps them."""
    resident = psutil.Process().memory_info().rss
    size = max(64 << 20, peak_resident_bytes() - resident + (64 << 20))
    before = peak_resident_bytes()
    with held(size):
        pass
    after = peak_resident_bytes()
    assert after >= before + (32 << 20)
    assert after <= psutil.virtual_memory().total


# ------------------------------------------------------------------------------ llama.cpp


def test_another_build_of_the_same_version_is_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiler flags change step times and rounding, though not always the size of a library."""
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    build = host.llama_build.__wrapped__
    (tmp_path / "libllama.so").write_bytes(b"x" * 9)
    (tmp_path / "libggml-cpu.so").write_bytes(b"x" * 1_000_000)
    before = build()
    assert before == build()
    (tmp_path / "libggml-cpu.so").write_bytes(b"x" * 500_000 + b"y" * 500_000)
    flags = build()
    (tmp_path / "libggml-cuda.so").write_bytes(b"")
    assert len({before, flags, build()}) == 3
