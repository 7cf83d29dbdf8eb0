"""The device probe on machines made of files: containers, hyper-threads, affinity masks."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from planning_cases import held

from edgespec.memory.device import accelerators, host, llama_binary
from edgespec.memory.device.track import peak_resident_bytes

GIB = 1 << 30
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretends a Linux machine: files by path, CPUs, siblings of CPUs, free memory."""
    root = tmp_path / "machine"
    root.mkdir()
    monkeypatch.setattr(host, "_CGROUP", root / "cgroup")
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


# ------------------------------------------------------------------------------ cores


def test_cores_without_any_limit(machine: Machine) -> None:
    machine()
    assert host.usable_cores() == 8


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
    assert host.available_bytes() == free


def test_the_machine_itself_may_have_less_than_the_container_allows(machine: Machine) -> None:
    machine({"memory.max": str(8 * GIB), "memory.current": "0"}, free=GIB)
    assert host.available_bytes() == GIB
    assert host.total_bytes() == 16 * GIB


@pytest.mark.parametrize(
    ("stat", "free"),
    [
        ("anon 100\ninactive_file 268435456\nactive_file 1000", 7 * GIB // 4),
        ("inactive_file 0", 3 * GIB // 2),
        ("inactive_file", 3 * GIB // 2),
        ("inactive_file many", 3 * GIB // 2),
        ("", 3 * GIB // 2),
    ],
)
def test_cached_files_that_nobody_used_lately_are_free(
    machine: Machine, stat: str, free: int
) -> None:
    """Of 2 GiB half a GiB is used, and of that a quarter GiB are such pages."""
    files = {"memory.max": str(2 * GIB), "memory.current": str(GIB // 2), "memory.stat": stat}
    machine(files)
    assert host.available_bytes() == free


def test_the_older_accounting_counts_nested_groups(machine: Machine) -> None:
    """cgroup v1: `total_inactive_file` includes the groups below, `inactive_file` does not."""
    machine(
        {
            "memory/memory.limit_in_bytes": str(4 * GIB),
            "memory/memory.usage_in_bytes": str(3 * GIB),
            "memory/memory.stat": f"inactive_file 4096\ntotal_inactive_file {GIB}",
        }
    )
    assert host.available_bytes() == 2 * GIB


# ------------------------------------------------------------------------------ instruction sets


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Pretends a /proc/cpuinfo on Linux."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    read = host._read

    def pretend(text: str) -> None:
        monkeypatch.setattr(
            host, "_read", lambda path: text if path.name == "cpuinfo" else read(path)
        )
        host.cpu_features.cache_clear()

    host.cpu_features.cache_clear()
    yield pretend
    host.cpu_features.cache_clear()


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
    assert host.cpu_features() == features


@pytest.mark.parametrize(
    ("system", "processor", "features"),
    [
        ("Darwin", "arm64", {"neon", "dotprod"}),
        ("Darwin", "x86_64", {"avx2"}),
        ("Windows", "ARM64", {"neon", "dotprod"}),
    ],
)
def test_instruction_sets_of_other_systems(
    cpuinfo: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    processor: str,
    features: set[str],
) -> None:
    cpuinfo("flags: avx2 avx512f")
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    assert host.cpu_features() == features


# ------------------------------------------------------------------------------ GPUs


def test_a_library_that_does_not_load_shows_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "_ggml", lambda: None)
    assert (accelerators.accelerators(), accelerators.gpu_kinds()) == ((), ())
    monkeypatch.undo()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp.llama_cpp", raising=False)
    fresh = functools.cache(llama_binary._libraries.__wrapped__)
    monkeypatch.setattr(llama_binary, "_libraries", fresh)
    assert accelerators._asked_once.__wrapped__() is None


class Registry:
    """ggml's device registry with a processor, a GPU and one that is part of the processor."""

    devices = ((0, b"CPU", 0, 0), (1, b"CUDA0", 5 * GIB, 6 * GIB), (2, b"Vulkan0", GIB, 8 * GIB))

    def ggml_backend_reg_count(self) -> int:
        return 4

    def ggml_backend_reg_get(self, number: int) -> int:
        return number

    def ggml_backend_reg_name(self, number: int) -> bytes:
        return (b"Vulkan", b"CUDA", b"BLAS", b"CPU")[number]

    def ggml_backend_dev_count(self) -> int:
        return len(self.devices)

    def ggml_backend_dev_get(self, number: int) -> int:
        return number

    def ggml_backend_dev_type(self, number: int) -> int:
        return self.devices[number][0]

    def ggml_backend_dev_name(self, number: int) -> bytes:
        return self.devices[number][1]

    def ggml_backend_dev_description(self, number: int) -> bytes:
        return b"Some \xff GPU"

    def ggml_backend_dev_memory(self, number: int, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = self.devices[number][2:]


@pytest.mark.parametrize("unified", [False, True])
def test_gpus_are_those_of_the_registry(monkeypatch: pytest.MonkeyPatch, unified: bool) -> None:
    """The processor is none; an integrated one shares memory, any one does on such a machine."""
    monkeypatch.setattr(host, "has_unified_memory", lambda: unified)
    monkeypatch.setattr(accelerators, "_ggml", Registry)
    found = accelerators.accelerators()
    assert [gpu.name for gpu in found] == ["CUDA0", "Vulkan0"]
    assert [gpu.shares_memory for gpu in found] == [unified, True]
    assert [(gpu.free_bytes, gpu.total_bytes) for gpu in found] == [
        (5 * GIB, 6 * GIB),
        (GIB, 8 * GIB),
    ]
    assert found[0].description == "Some \ufffd GPU"
    assert accelerators.gpu_kinds() == ("cuda", "vulkan")


PROGRAM = """
import ctypes
from edgespec.memory.device.accelerators import accelerators
assert accelerators() == ()
from edgespec.backends.llama.library import ggml_function, library
lib = library()

class Device(ctypes.Structure):
    # struct ggml_backend_device: of its functions the first four are asked for here
    _fields_ = [("functions", ctypes.c_void_p * 16), ("reg", ctypes.c_void_p)]

pointer, size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
texts = ctypes.CFUNCTYPE(pointer, pointer)
name, description = map(ctypes.create_string_buffer, (b"RPC0", b"another machine's"))

def memory(_device, free, total):
    free[0], total[0] = 5 << 30, 6 << 30

functions = [
    texts(lambda _: ctypes.addressof(name)),
    texts(lambda _: ctypes.addressof(description)),
    ctypes.CFUNCTYPE(None, pointer, size, size)(memory),
    ctypes.CFUNCTYPE(ctypes.c_int, pointer)(lambda _: 1),
]
device = Device()
for place, function in enumerate(functions):
    device.functions[place] = ctypes.cast(function, pointer)
register = lib._lib["ggml_backend_device_register"]
register.argtypes, register.restype = [pointer], None
register(ctypes.addressof(device))
(found,) = accelerators()
assert (found.name, found.description) == ("RPC0", "another machine's")
assert (found.free_bytes, found.total_bytes, found.shares_memory) == (5 << 30, 6 << 30, False)
ggml_function("ggml_nbytes", ctypes.c_size_t, pointer)
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libggml" in line or "/libllama" in line}
print(*sorted(files), sep="\\n")
import os
os._exit(0)  # the registry would go on with a device that is gone
"""


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["the wheel's", "LLAMA_CPP_LIB_PATH"])
def test_there_is_one_registry_with_all_that_was_registered(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is llama.cpp's own: none of its libraries is there twice, and a late device is seen."""
    folder = llama_binary.library_folder()
    assert folder is not None
    if elsewhere:
        shutil.copytree(folder, tmp_path / "llama")
        folder = tmp_path / "llama"
        monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(folder))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    files = [Path(line) for line in done.stdout.split()]
    names = [file.name.partition(".so")[0] for file in files]
    assert sorted(names) == ["libggml", "libggml-base", "libggml-cpu", "libllama"]
    assert {file.parent.resolve() for file in files} == {folder.resolve()}


@pytest.mark.parametrize(
    ("system", "processor", "board", "unified"),
    [
        ("Darwin", "arm64", "", True),
        ("Darwin", "x86_64", "", False),
        ("Linux", "aarch64", "NVIDIA Jetson Orin Nano Developer Kit", True),
        ("Linux", "aarch64", "Raspberry Pi 5", False),
        ("Linux", "x86_64", "", False),
    ],
)
def test_unified_memory_is_that_of_apple_silicon_and_jetson(
    monkeypatch: pytest.MonkeyPatch, system: str, processor: str, board: str, unified: bool
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr(host, "_read", lambda path: board if path.name == "model" else "")
    assert host.has_unified_memory() is unified


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
