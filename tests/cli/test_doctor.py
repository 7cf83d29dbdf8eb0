"""`edgespec doctor`: what is there, and the command for what is missing."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import pytest
from command_line import Command
from typer.testing import CliRunner

from edgespec.cli import doctor
from edgespec.cli.main import app
from edgespec.memory.device.llama_binary import PACKAGE, TESTED, is_tested
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve


def test_doctor_says_what_is_there_and_what_will_be_used() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(done.stdout)
    packages = {one["name"]: one for one in found["packages"]}
    assert packages["llama-cpp-python"]["version"] == "0.3.36"
    assert found["cores"] >= 1
    assert 0 < found["available_bytes"] <= found["memory_bytes"]
    assert found["bandwidth_bytes_per_s"] > 1e8
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "what will be used" in text and "llama.cpp" in text


def test_doctor_names_the_command_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("no-such-package", "no_such_module", "nothing", "pip install no-such-package")
    monkeypatch.setattr(doctor, "_PACKAGES", (absent,))
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "no-such-package  missing" in text
    assert "pip install no-such-package" in text.split("missing, and how to get it")[1]


def test_a_gpu_that_llama_cpp_was_not_built_for_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(doctor, "_GPU_BUILDS", (("nvidia", str(driver), "-DGGML_CUDA=ON"),))
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "nvidia support" in text and 'CMAKE_ARGS="-DGGML_CUDA=ON"' in text


@pytest.mark.parametrize(
    ("version", "is_in"),
    [("0.3.36", True), ("0.3.36+cu124", True), ("0.3.35", False), ("0.3.37", False), ("", False)],
)
def test_the_range_that_was_tested(version: str, is_in: bool) -> None:
    assert is_tested(version) == is_in
    assert not is_tested("0.4.0")


def test_the_package_asks_for_what_was_tested() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{PACKAGE}"' in project and PACKAGE.endswith(f"=={TESTED}")


def test_doctor_says_what_another_llama_cpp_turns_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_version", lambda: "0.9.1")
    monkeypatch.setattr(
        "edgespec.backends.llama.kernels.attach", lambda: "its structures are other ones"
    )
    monkeypatch.setattr("edgespec.backends.llama.hidden_rows.missing_rows", lambda _: True)
    text = " ".join(CliRunner().invoke(app, ["doctor"]).stdout.split())
    assert f"llama-cpp-python 0.9.1 is not tested, {TESTED} is" in text
    assert "off edgespec's kernels: its structures are other ones" in text
    assert "off heads that draft (this llama.cpp hides what they read)" in text


def test_a_report_names_nobody(
    say: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "ada lovelace"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("EDGESPEC_CACHE", str(home / "cache"))
    monkeypatch.setenv("EDGESPEC_API_KEY", "private key")
    monkeypatch.setattr(getpass, "getuser", lambda: "lovelace")
    monkeypatch.setattr(platform, "node", lambda: "engine.example.org")
    curve = CostCurve([float("inf"), 1.0, 2.0])
    cache.store("curves", "a device | beef | engine", curve.as_json())
    status, out, _ = say("doctor", "--report", str(tmp_path / "report.json"))
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert (status, out) == (0, "")
    found = json.loads(text)
    assert "EDGESPEC_API_KEY" in found["variables"]
    assert found["step_times_ms"] == {"a device | beef | HOST": [None, 1.0, 2.0]}
    assert found["cache"] == "~/cache" and found["packages"]
    for secret in ("lovelace", "private key", "engine", str(tmp_path)):
        assert secret not in text


@pytest.mark.parametrize(
    "path",
    ["/home/ada/x.so", "/Users/ada/x.so", r"C:\Users\ada\x.so", json.dumps(r"C:\Users\ada\x.so")],
)
def test_folders_of_other_users_are_not_told(path: str) -> None:
    assert "ada" not in doctor.without_names(path) and "x.so" in doctor.without_names(path)


def test_a_report_that_cannot_be_written_is_a_sentence(say: Command, tmp_path: Path) -> None:
    status, _, err = say("doctor", "--report", str(tmp_path / "no" / "report"))
    assert status == 1 and f"cannot write {tmp_path / 'no' / 'report'}: No such file" in err
