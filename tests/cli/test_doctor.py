"""`edgespec doctor`: what is there, and the command for what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec.cli import doctor
from edgespec.cli.main import app
from edgespec.memory.device.llama_binary import PACKAGE, TESTED, is_tested


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
    monkeypatch.setattr("edgespec.memory.device.llama_binary.package_version", lambda: "0.9.1")
    monkeypatch.setattr(
        "edgespec.backends.llama.kernels.refusal_of_kernels",
        lambda: "its structures are other ones",
    )
    monkeypatch.setattr("edgespec.backends.llama.hidden_rows.missing_rows", lambda _: True)
    text = " ".join(CliRunner().invoke(app, ["doctor"]).stdout.split())
    assert f"llama-cpp-python 0.9.1 is not tested, {TESTED} is" in text
    assert "off edgespec's kernels: its structures are other ones" in text
    assert "off heads that draft (this llama.cpp hides what they read)" in text
