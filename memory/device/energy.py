"""Joules that this machine takes, from the counters that Linux shows.

What is counted differs by machine: a whole board (INA sensors of a Jetson, a battery), or only the
processor and its memory (RAPL). The name of the counter says which, and stands beside each figure.
Graphics cards of their own are in none of them.

Sources: Linux, Documentation/power/powercap/powercap.rst, Documentation/hwmon/sysfs-interface.rst,
Documentation/ABI/testing/sysfs-class-power.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from threading import Event, Lock, Thread
from time import perf_counter, sleep
from typing import Any, NamedTuple

from edgespec.memory.device.cgroups import read_text

SYS = Path("/sys")
# Rails that together are what a board takes, as NVIDIA's developer guides name them: one, if it is
# there, or else all of a set.
_BOARD_RAILS = (
    ("VDD_IN",),  # Orin Nano, Orin NX, Xavier NX, TX2
    ("POM_5V_IN",),  # Nano
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
)
_POWER_EVERY_S = 0.05  # sensors of watts are averages over 1 ms to 100 ms
_IDLE_S = 0.5


class Source(NamedTuple):
    """Where energy or power is read.

    Attributes:
        name: of the counter, and what it counts.
        files: of each reading, whose numbers are multiplied: volts and amperes.
        unit: joules or watts of such a product.
        limits: joules at which each counter begins again, 0 where it does not; empty for power.
    """

    name: str
    files: Sequence[tuple[Path, ...]]
    unit: float
    limits: Sequence[float] = ()

    def read(self) -> list[float]:
        """Joules or watts of each reading.

        Raises OSError or ValueError where a file has no number.
        """
        return [
            self.unit * abs(prod(float(file.read_text()) for file in files)) for files in self.files
        ]


class EnergyMeter:
    """Joules since it was begun, for as long as it is open (a context manager).

    Power is looked at every `every_s`.
    """

    def __init__(
        self,
        source: Source,
        clock: Callable[[], float] = perf_counter,
        every_s: float = _POWER_EVERY_S,
    ) -> None:
        self.source = source
        # Each minute, as a RAPL counter of 32 bits of 61 uJ is full after 22 of them at 200 W.
        self._every_s = 60.0 if source.limits else every_s
        self.idle_w: float | None = None
        self._clock = clock
        self._lock = Lock()
        self._total = 0.0
        self._last, self._last_s = source.read(), clock()
        self._closed = Event()
        self._sampler = Thread(target=self._sample, name="energy", daemon=True)

    def __enter__(self) -> EnergyMeter:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._sampler.join()

    def measure_idle(self) -> None:
        """Note the power while this process waits, which takes half a second."""
        before, began = self.joules(), self._clock()
        sleep(_IDLE_S)
        self.idle_w = (self.joules() - before) / max(1e-9, self._clock() - began)

    def joules(self) -> float:
        """Of everything that the counter counts, this process or not."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            now, now_s = self.source.read(), self._clock()
            if self.source.limits:
                pairs = zip(now, self._last, self.source.limits, strict=True)
                self._total += sum(
                    (value - last) % limit if limit else max(0.0, value - last)
                    for value, last, limit in pairs
                )
            else:
                self._total += (sum(now) + sum(self._last)) / 2 * (now_s - self._last_s)
            self._last, self._last_s = now, now_s
        return self._total

    def _sample(self) -> None:
        while not self._closed.wait(self._every_s):
            self.joules()


@dataclass(slots=True)
class Energy:
    """What a piece of work took; all None without a counter, and `missing` says why."""

    source: str | None = None
    missing: str | None = None
    idle_w: float | None = None
    joules: float | None = None

    def as_json(self, tokens: int) -> dict[str, Any]:
        """With the energy of each token (J), the machine's idle power included."""
        each = self.joules / tokens if self.joules is not None and tokens else None
        return {
            "energy_source": self.source,
            "energy_missing": self.missing,
            "idle_w": self.idle_w,
            "energy_j": self.joules,
            "j_per_token": each,
        }


@contextlib.contextmanager
def measured_energy(*, idle: bool = True) -> Iterator[Energy]:
    """Yield what the work of this block takes, filled in behind it.

    Idle power is measured first, which takes half a second where there is a counter.
    """
    with energy_meter() as (meter, missing):
        energy = Energy(missing=missing)
        if meter is None:
            yield energy
            return
        if idle:
            meter.measure_idle()
        before = meter.joules()
        try:
            yield energy
        finally:
            energy.source, energy.idle_w = meter.source.name, meter.idle_w
            energy.joules = meter.joules() - before


@contextlib.contextmanager
def energy_meter(
    system: Path | None = None, every_s: float = _POWER_EVERY_S
) -> Iterator[tuple[EnergyMeter | None, str | None]]:
    """Yield a running meter of this machine, or None and a sentence why there is none."""
    found = find_source(system or SYS)
    if isinstance(found, str):
        yield None, found
        return
    with EnergyMeter(found, every_s=every_s) as meter:
        yield meter, None


def find_source(system: Path = SYS) -> Source | str:
    """The counter that counts most of this machine, or a sentence why there is none."""
    locked: list[Path] = []
    for source in chain(_boards(system), _rapl(system), _sensors(system), _batteries(system)):
        try:
            source.read()
        except PermissionError as problem:
            locked.append(Path(problem.filename))
        except (OSError, ValueError):
            continue
        else:
            return source
    if locked:
        return (
            f"this user may not read the energy counter {locked[0]}; "
            f"sudo chmod a+r {locked[0]} allows it until the next start"
        )
    return "this machine shows no energy counter (powercap, hwmon, or a battery in use)"


# -- kinds of counters -------------------------------------------------------------------------


def _boards(system: Path) -> Iterator[Source]:
    """INA sensors of a board: volts and amperes by rail; old kernels have their power in iio."""
    rails: dict[str, tuple[Path, ...]] = {}
    unit = 1e-6
    for chip in sorted(system.glob("class/hwmon/hwmon*")):
        if read_text(chip / "name").startswith("ina"):
            for label in chip.glob("in[0-9]_label"):
                number = label.name[2]
                pair = chip / f"in{number}_input", chip / f"curr{number}_input"
                rails[read_text(label)] = pair
    if not rails:
        unit = 1e-3
        for label in system.glob("bus/i2c/drivers/ina3221x/*/iio:device*/rail_name_[0-9]"):
            rails[read_text(label)] = (label.with_name(f"in_power{label.name[-1]}_input"),)
    for names in _BOARD_RAILS:
        if all(name in rails for name in names):
            yield Source(f"board: {' + '.join(names)}", [rails[name] for name in names], unit)


def _rapl(system: Path) -> Iterator[Source]:
    """Intel's and AMD's counters: the platform's if there is one, else packages and their DRAM."""
    zones = sorted(system.glob("class/powercap/intel-rapl:*"))
    names = {zone: read_text(zone / "name") for zone in zones}
    for kinds in (("psys",), ("package", "dram")):
        chosen = [zone for zone in zones if names[zone].startswith(kinds)]
        if chosen:
            files = [(zone / "energy_uj",) for zone in chosen]
            ranges = [read_text(zone / "max_energy_range_uj") for zone in chosen]
            limits = [int(text) * 1e-6 if text.isdecimal() else 0.0 for text in ranges]
            yield Source(f"RAPL: {' + '.join(names[zone] for zone in chosen)}", files, 1e-6, limits)


def _sensors(system: Path) -> Iterator[Source]:
    """Counters of sockets (amd_energy), or the power of a processor with graphics (amdgpu)."""
    for chip in sorted(system.glob("class/hwmon/hwmon*")):
        sockets = [
            (label.with_name(label.name.replace("label", "input")),)
            for label in sorted(chip.glob("energy*_label"))
            if read_text(label).startswith("Esocket")
        ]
        if sockets:
            yield Source(f"hwmon: {len(sockets)} sockets", sockets, 1e-6, [0.0] * len(sockets))
        if read_text(chip / "name") == "amdgpu":
            for name in ("power1_average", "power1_input"):
                yield Source("hwmon: amdgpu", [(chip / name,)], 1e-6)


def _batteries(system: Path) -> Iterator[Source]:
    """What flows out of a battery in use: all of the machine, its screen included."""
    for supply in sorted(system.glob("class/power_supply/*")):
        if (read_text(supply / "type"), read_text(supply / "status")) == ("Battery", "Discharging"):
            name = f"battery: {supply.name}"
            yield Source(name, [(supply / "power_now",)], 1e-6)
            yield Source(name, [(supply / "voltage_now", supply / "current_now")], 1e-12)


def is_on_battery() -> bool:
    """Whether the machine has a battery and nothing charges it."""
    import psutil

    look = getattr(psutil, "sensors_battery", lambda: None)  # not on every system
    battery = look()
    return battery is not None and battery.power_plugged is False
