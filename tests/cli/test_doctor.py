"""`edgespec doctor`: what is there, and the command for what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec.cli import doctor
from edgespec.cli.main import app


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
