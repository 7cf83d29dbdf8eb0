"""`edgespec profile` and `edgespec doctor` on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgespec.bench import profiling
from edgespec.cli import doctor
from edgespec.cli.main import app
from edgespec.measure.prompts import PROMPTS

runner = CliRunner()


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    """What `edgespec profile` found, once it has: it takes as long for a text as for JSON."""
    return {}


@pytest.fixture
def profile_once(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts and few tokens instead of half a minute, and the same for every command."""
    monkeypatch.setattr(profiling, "PROMPTS", (PROMPTS[8], PROMPTS[18]))
    monkeypatch.setattr(profiling, "_SPEED_SECONDS", 0.1)
    monkeypatch.setattr(profiling, "_DEPTHS", (0, 256))
    monkeypatch.setattr(profiling, "_SIZES", (1, 2, 4))
    monkeypatch.setattr(profiling, "_REPEATS", 1)
    profile = profiling.profile

    def once(*arguments: Any, **options: Any) -> dict[str, Any]:
        if not measured:
            measured.update(profile(*arguments, **options))
        return measured

    monkeypatch.setattr(profiling, "profile", once)


SHORT = ("--ctx", "320", "--threads", "1", "--draft-max", "3")


@pytest.mark.model
@pytest.mark.usefixtures("profile_once")
def test_profile_puts_measurements_beside_predictions(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = runner.invoke(app, ["profile", "--json", "--html", str(page), *SHORT])
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    memory = document["memory"]
    for name in ("weights", "kv_cache", "logits"):
        assert memory["allocated"][name] == pytest.approx(
            memory["predicted"][name], rel=0.02, abs=8192
        )
    assert memory["measured_peak_bytes"] > memory["predicted"]["weights"]
    assert [phase["name"] for phase in memory["phases"]] == [
        "load", "step times", "prompt", "batch invariance", "answers",
    ]  # fmt: skip
    assert len(memory["samples"]) > 3
    assert [curve["depth"] for curve in document["step_ms"]] == [0, 256]
    assert all(list(curve["ms"]) == ["1", "2", "4"] for curve in document["step_ms"])
    plain, drafted = document["speed"]
    assert (plain["drafter"], drafted["drafter"]) == ("plain", "suffix")
    assert plain["acceptance_length"] == 1.0 <= drafted["acceptance_length"]
    speeds = [point["tokens_per_s"] for point in document["frontier"]]
    fitting = [speed for speed in speeds if speed is not None]
    assert speeds[0] is None, "the weights alone are no plan"
    assert fitting == sorted(fitting) and speeds[-len(fitting) :] == fitting
    assert "SmolLM2" in page.read_text() or "Smollm2" in page.read_text()


@pytest.mark.model
@pytest.mark.usefixtures("profile_once")
def test_profile_as_text_names_what_was_planned_and_measured() -> None:
    done = runner.invoke(app, ["profile", *SHORT])
    assert done.exit_code == 0, done.output
    for words in ("step times in ms", "<- largest planned", "kv cache", "measured", "suffix"):
        assert words in done.stdout


def test_a_report_without_a_folder_is_refused_before_minutes_are_spent(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "report.html"
    done = runner.invoke(app, ["profile", "--html", str(missing)])
    assert done.exit_code == 1
    assert "no folder" in str(done.exception)


def test_doctor_says_what_is_there_and_what_will_be_used() -> None:
    done = runner.invoke(app, ["doctor", "--json"])
    found = json.loads(done.stdout)
    packages = {one["name"]: one for one in found["packages"]}
    assert packages["llama-cpp-python"]["version"] == "0.3.36"
    assert found["cores"] >= 1
    assert 0 < found["available_bytes"] <= found["memory_bytes"]
    assert found["bandwidth_bytes_per_s"] > 1e8
    text = runner.invoke(app, ["doctor"]).stdout
    assert "what will be used" in text and "llama.cpp" in text


def test_doctor_says_what_a_build_with_amx_kernels_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.backends.llama.library.has_amx_kernels", lambda: True)
    text = " ".join(runner.invoke(app, ["doctor"]).stdout.split())
    assert "a build without AMX" in text and "-mno-amx-int8 -U__AVX512FP16__" in text


def test_doctor_names_the_command_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("no-such-package", "no_such_module", "nothing", "pip install no-such-package")
    monkeypatch.setattr(doctor, "_PACKAGES", (absent,))
    text = runner.invoke(app, ["doctor"]).stdout
    assert "no-such-package  missing" in text
    assert "pip install no-such-package" in text.split("missing, and how to get it")[1]


def test_a_gpu_that_llama_cpp_was_not_built_for_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(doctor, "_GPU_BUILDS", (("nvidia", str(driver), "-DGGML_CUDA=ON"),))
    text = runner.invoke(app, ["doctor"]).stdout
    assert "nvidia support" in text and 'CMAKE_ARGS="-DGGML_CUDA=ON"' in text


def test_the_built_in_prompts_are_two_of_each_task_in_halves() -> None:
    half = len(PROMPTS) // 2
    first, second = ([prompt.task for prompt in part] for part in (PROMPTS[:half], PROMPTS[half:]))
    assert first == second and len(set(first)) == 10
    assert len({prompt.text for prompt in PROMPTS}) == 20
