"""What is decided on machines that nobody here has, by what their systems say of themselves.

The descriptions are those of the devices' own Linux and macOS, cut to what is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from edgespec.memory.device import cgroups, host
from edgespec.memory.device.energy import Source, find_source

A76 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop "
    "asimddp"
)
ALDER_LAKE = "fpu sse4_2 avx f16c rdrand bmi1 avx2 bmi2 fma avx_vnni vnmi"
ORIN_RAILS = {
    "class/hwmon/hwmon1/name": "ina3221",
    "class/hwmon/hwmon1/in1_label": "VDD_IN",
    "class/hwmon/hwmon1/in1_input": "5080",
    "class/hwmon/hwmon1/curr1_input": "968",
    "class/hwmon/hwmon1/in2_label": "VDD_CPU_GPU_CV",
    "class/hwmon/hwmon1/in2_input": "5072",
    "class/hwmon/hwmon1/curr2_input": "152",
}
AGX_RAILS = {
    f"class/hwmon/hwmon{chip}/{name}": text
    for chip, rails in ((1, ("VDD_GPU_SOC", "VDD_CPU_CV")), (2, ("NC", "VIN_SYS_5V0")))
    for number, rail in enumerate(rails, 1)
    for name, text in (
        ("name", "ina3221"),
        (f"in{number}_label", rail),
        (f"in{number}_input", "19000"),
        (f"curr{number}_input", "100"),
    )
}
NANO_RAILS = {
    "bus/i2c/drivers/ina3221x/6-0040/iio:device0/rail_name_0": "POM_5V_IN",
    "bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input": "2350",
}
INTEL_RAPL = {
    "class/powercap/intel-rapl:0/name": "package-0",
    "class/powercap/intel-rapl:0/energy_uj": "12345678",
    "class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850",
    "class/powercap/intel-rapl:0:0/name": "core",
    "class/powercap/intel-rapl:0:0/energy_uj": "2345678",
    "class/powercap/intel-rapl:0:0/max_energy_range_uj": "262143328850",
}
DECK = {
    "class/hwmon/hwmon4/name": "amdgpu",
    "class/hwmon/hwmon4/power1_average": "9100000",
    "class/hwmon/hwmon4/power1_label": "PPT",
}


@dataclass(frozen=True)
class Board:
    """A machine, and what is to be read out of it."""

    name: str
    cores: int
    features: set[str]
    energy: str | None = None
    watts: float | None = None
    unified: bool = False
    shown: str = ""  # as which processor; "" for its name
    cpus: int = 4
    model_name: str = ""
    flags: str = ""
    tree: str = ""  # compatible, of the device tree
    capacities: tuple[int, ...] = ()
    hyper_threads: int = 0  # so many first CPUs are pairs
    performance: str = ""  # CPUs, of Intel's two kinds
    sys: dict[str, str] = field(default_factory=dict)
    sysctl: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


ARM_NAME = "ARMv8 Processor rev 1 (v8l)"
BOARDS = (
    Board(
        "Raspberry Pi 5 Model B Rev 1.0",
        4,
        {"neon", "dotprod"},
        flags=A76,
        tree="raspberrypi,5-model-b\0brcm,bcm2712",
    ),
    Board(
        "Orange Pi 5",
        4,
        {"neon", "dotprod"},
        cpus=8,
        flags=A76,
        tree="rockchip,rk3588s-orangepi-5\0rockchip,rk3588",
        capacities=(414, 414, 414, 414, 1024, 1024, 1024, 1024),
    ),
    Board(
        "NVIDIA Jetson Nano Developer Kit",
        4,
        {"neon"},
        "board: POM_5V_IN",
        2.35,
        unified=True,
        model_name=ARM_NAME,
        flags="fp asimd evtstrm aes pmull sha1 sha2 crc32",
        tree="nvidia,p3450-0000\0nvidia,jetson-nano\0nvidia,tegra210",
        sys=NANO_RAILS,
    ),
    Board(
        "NVIDIA Orin Nano Developer Kit",
        6,
        {"neon", "dotprod"},
        "board: VDD_IN",
        5.080 * 0.968,
        unified=True,
        cpus=6,
        model_name=ARM_NAME,
        flags=f"{A76} uscat ilrcpc flagm paca pacg",
        tree="nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234",
        sys=ORIN_RAILS,
    ),
    Board(
        "NVIDIA Jetson AGX Orin Developer Kit",
        12,
        {"neon", "dotprod"},
        "board: VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0",
        5.7,
        unified=True,
        cpus=12,
        model_name=ARM_NAME,
        flags=f"{A76} uscat ilrcpc flagm paca pacg",
        tree="nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234",
        sys=AGX_RAILS,
    ),
    Board(
        "laptop with four performance and eight efficiency cores",
        4,
        {"avx2"},
        "RAPL: package-0",
        shown="12th Gen Intel(R) Core(TM) i7-1260P",
        cpus=16,
        model_name="12th Gen Intel(R) Core(TM) i7-1260P",
        flags=ALDER_LAKE,
        hyper_threads=8,
        performance="0-7",
        sys=INTEL_RAPL,
    ),
    Board(
        "Steam Deck",
        4,
        {"avx2"},
        "hwmon: amdgpu",
        9.1,
        shown="AMD Custom APU 0405",
        cpus=8,
        model_name="AMD Custom APU 0405",
        flags="fpu sse4_2 fma avx f16c avx2 bmi1 bmi2 sha_ni",
        hyper_threads=8,
        sys=DECK,
    ),
    Board(
        "Apple M1",
        4,
        {"neon", "dotprod"},
        unified=True,
        cpus=8,
        sysctl={
            "machdep.cpu.brand_string": b"Apple M1\0",
            "hw.perflevel0.physicalcpu": b"\4\0\0\0",
            "hw.optional.arm.FEAT_I8MM": b"\0\0\0\0",
        },
    ),
)


@pytest.fixture
def board(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Board]:
    """Pretends to be one of the machines."""
    board: Board = request.param
    word = "Features" if "asimd" in board.flags else "flags"
    name = f"model name\t: {board.model_name}\n" if board.model_name else ""
    cpuinfo = "\n".join(
        f"processor\t: {cpu}\n{name}{word}\t: {board.flags}\n" for cpu in range(board.cpus)
    )
    files = {f"sys/{path}": text for path, text in board.sys.items()}
    for cpu, capacity in enumerate(board.capacities):
        files[f"cpu/cpu{cpu}/cpu_capacity"] = str(capacity)
    for cpu in range(board.hyper_threads):
        pair = cpu // 2 * 2
        files[f"cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{pair}-{pair + 1}"
    files |= {"performance": board.performance} if board.performance else {}
    if board.tree:
        files |= {"tree/model": f"{board.name}\0", "tree/compatible": board.tree}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    read = cgroups.read_text
    system = "Darwin" if board.sysctl else "Linux"
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: "arm64" if board.sysctl else "")
    monkeypatch.setattr(host, "_sysctl", lambda name: board.sysctl.get(name, b""))
    monkeypatch.setattr(host, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(host, "_PERFORMANCE_CPUS", tmp_path / "performance")
    monkeypatch.setattr(host, "_DEVICE_TREE", tmp_path / "tree")
    monkeypatch.setattr(
        host,
        "read_text",
        lambda path: ("" if board.sysctl else cpuinfo) if path.name == "cpuinfo" else read(path),
    )
    monkeypatch.setattr(cgroups, "quota", lambda: (float("inf"), None))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(board.cpus)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: board.cpus)
    host.cpu_name.cache_clear()
    yield board
    host.cpu_name.cache_clear()


@pytest.mark.parametrize("board", BOARDS, indirect=True, ids=str)
def test_a_board_is_known_by_what_it_says(board: Board, tmp_path: Path) -> None:
    assert host.cpu_name() == (board.shown or board.name)
    assert host.usable_cores() == board.cores
    assert host.cpu_features() == sorted(() if board.sysctl else board.features)
    assert host.has_unified_memory() == board.unified
    source = find_source(tmp_path / "sys")
    if board.energy is None:
        assert isinstance(source, str)
        return
    assert isinstance(source, Source)
    assert source.name == board.energy
    if board.watts is not None:
        assert sum(source.read()) == pytest.approx(board.watts)


@pytest.mark.parametrize("board", BOARDS[1:2], indirect=True, ids=str)
def test_slow_cores_alone_are_all_used(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert host.usable_cores() == 3


@pytest.mark.parametrize(
    ("capacities", "cores"),
    [((1024, 1024, 900, 900), 4), ((1024, 200, 200, 200), 1), ((1024, 400, 400, 400), 4)],
)
@pytest.mark.parametrize("board", BOARDS[1:2], indirect=True, ids=str)
def test_as_many_cores_as_the_slowest_of_them_is_worth(
    board: Board,
    tmp_path: Path,
    capacities: tuple[int, ...],
    cores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cpu, capacity in enumerate(capacities):
        (tmp_path / f"cpu/cpu{cpu}/cpu_capacity").write_text(str(capacity))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert host.usable_cores() == cores
