"""Energy counters of made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.memory.device import energy
from edgespec.memory.device.energy import (
    EnergyMeter,
    Source,
    energy_meter,
    find_source,
    measured_energy,
)

RAPL = "class/powercap/intel-rapl:"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def zone(number: str, name: str, microjoules: int, limit: int = 1000) -> dict[str, str]:
    return {
        f"{RAPL}{number}/name": name,
        f"{RAPL}{number}/energy_uj": str(microjoules),
        f"{RAPL}{number}/max_energy_range_uj": str(limit),
    }


def found(root: Path) -> Source:
    source = find_source(root)
    assert isinstance(source, Source), source
    return source


def test_packages_and_their_memory_are_counted_and_cores_are_not_counted_twice(
    tmp_path: Path,
) -> None:
    write(tmp_path, zone("0", "package-0", 1) | zone("0:0", "core", 2) | zone("0:1", "dram", 4))
    write(tmp_path, zone("1", "package-1", 8))
    assert found(tmp_path).name == "RAPL: package-0 + dram + package-1"
    assert sum(found(tmp_path).read()) == pytest.approx(13e-6)


def test_the_platform_counts_everything(tmp_path: Path) -> None:
    write(tmp_path, zone("0", "package-0", 1) | zone("1", "psys", 20))
    assert found(tmp_path).name == "RAPL: psys"


def test_a_counter_that_begins_again_is_followed(tmp_path: Path) -> None:
    write(tmp_path, zone("0", "package-0", 900, 1000) | zone("1", "package-1", 10, 1000))
    meter = EnergyMeter(found(tmp_path))
    write(tmp_path, zone("0", "package-0", 50, 1000) | zone("1", "package-1", 15, 1000))
    assert meter.joules() == pytest.approx(155e-6)
    assert meter.joules() == pytest.approx(155e-6)


def test_power_is_summed_up_over_time(tmp_path: Path) -> None:
    now = [0.0]
    battery = "class/power_supply/BAT0/"
    write(
        tmp_path,
        {f"{battery}type": "Battery", f"{battery}status": "Discharging"}
        | {f"{battery}voltage_now": "12000000", f"{battery}current_now": "-500000"},
    )
    source = found(tmp_path)
    assert source.name == "battery: BAT0"
    meter = EnergyMeter(source, clock=lambda: now[0])
    now[0] = 2.0
    assert meter.joules() == pytest.approx(12.0)
    write(tmp_path, {f"{battery}current_now": "-1500000"})
    now[0] = 3.0
    assert meter.joules() == pytest.approx(24.0)


def test_a_battery_that_is_charged_says_nothing(tmp_path: Path) -> None:
    battery = "class/power_supply/BAT0/"
    write(
        tmp_path,
        {f"{battery}type": "Battery", f"{battery}status": "Charging", f"{battery}power_now": "1"},
    )
    assert find_source(tmp_path) == energy.find_source(tmp_path / "nothing")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {f"{RAPL}0/name": "package-0"},
        {f"{RAPL}0/name": "package-0", f"{RAPL}0/energy_uj": "many"},
        {f"{RAPL}0/name": "", f"{RAPL}0/energy_uj": "5"},
        {"class/hwmon/hwmon0/name": "ina3221", "class/hwmon/hwmon0/in1_label": "VDD_IN"},
        {"class/hwmon/hwmon0/name": "amdgpu", "class/hwmon/hwmon0/power1_average": ""},
        {"class/powercap": "no folder"},
    ],
    ids=str,
)
def test_a_machine_that_counts_nothing_says_so(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    assert "no energy counter" in str(find_source(tmp_path))
    with energy_meter(tmp_path) as (meter, missing):
        assert meter is None
        assert missing is not None


def test_a_counter_that_only_root_may_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux has made RAPL so since 2020 (CVE-2020-8694)."""
    write(tmp_path, zone("0", "package-0", 900))
    read = Path.read_text

    def refuse(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    text = str(find_source(tmp_path))
    assert text.startswith("this user may not read")
    assert f"sudo chmod a+r {tmp_path}" in text


def test_a_counter_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    write(tmp_path, zone("0", "package-0", 900))
    meter = EnergyMeter(found(tmp_path))
    os.remove(tmp_path / f"{RAPL}0/energy_uj")
    assert meter.joules() == 0.0


def test_work_is_measured_beside_idle_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, zone("0", "package-0", 0, 10**9))
    monkeypatch.setattr(energy, "SYS", tmp_path)
    monkeypatch.setattr(energy, "_IDLE_S", 0.01)
    with measured_energy() as taken:
        write(tmp_path, zone("0", "package-0", 6_000_000, 10**9))
    document = taken.as_json(tokens=4)
    assert document["energy_source"] == "RAPL: package-0"
    assert document["energy_j"] == pytest.approx(6.0)
    assert document["j_per_token"] == pytest.approx(1.5)
    assert document["idle_w"] == 0.0, "the counter stood still"
    assert taken.as_json(tokens=0)["j_per_token"] is None


def test_idle_power_is_what_the_counter_took_while_nothing_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 J in 0.5 s."""
    write(tmp_path, zone("0", "package-0", 0, 10**9))
    now = [0.0]

    def wait(_seconds: float) -> None:
        now[0] += 0.5
        write(tmp_path, zone("0", "package-0", 3_000_000, 10**9))

    monkeypatch.setattr(energy, "sleep", wait)
    meter = EnergyMeter(found(tmp_path), clock=lambda: now[0])
    meter.measure_idle()
    assert meter.idle_w == pytest.approx(6.0)
