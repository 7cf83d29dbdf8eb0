"""`edgespec profile` on the embedded model, and of two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from switching_cases import document
from typer.testing import CliRunner

from edgespec.bench import profiling
from edgespec.cli.main import app
from edgespec.cli.profile import _fact_rows, _switch_text
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
    monkeypatch.setattr("edgespec.measure.noise._NUM_TOKENS", 16)
    profile = profiling.profile

    def once(*arguments: Any, **options: Any) -> dict[str, Any]:
        if not measured:
            measured.update(profile(*arguments, **options))
        return measured

    monkeypatch.setattr(profiling, "profile", once)


SHORT = ("--ctx", "320", "--threads", "1", "--draft-max", "3")


@pytest.mark.model
def test_a_pipe_sees_progress_and_that_others_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: Any, progress: Any) -> dict[str, Any]:
        progress("answering", 0.5)
        return {"busy_neighbours": 1.2, "complete": True}

    monkeypatch.setattr(profiling, "profile", found)
    done = runner.invoke(app, ["profile", "--json", *SHORT])
    assert "answering  50%" in done.stderr
    assert "warning: other programs kept 1.2 cores busy" in done.stderr


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
    bandwidth = document["bandwidth"]
    assert bandwidth["used_bytes_per_s"] <= bandwidth["memory_bytes_per_s"]
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
def test_profile_as_text_names_what_was_planned_and_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = runner.invoke(app, ["profile", *SHORT])
    assert done.exit_code == 0, done.output
    for words in ("step times in ms", "<- largest planned", "kv cache", "measured", "suffix"):
        assert words in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 40] == []


@pytest.mark.model
@pytest.mark.parametrize(
    ("at", "answered"), [pytest.param("learning", 0, marks=pytest.mark.long), ("answering", 1)]
)
def test_an_interrupted_profile_shows_what_it_has(
    tiny: str, monkeypatch: pytest.MonkeyPatch, at: str, answered: int
) -> None:
    """Ctrl-C before a prompt of either half: what is complete by then is told."""
    for name, value in (("_SPEED_SECONDS", 0.1), ("_DEPTHS", (0,)), ("_SIZES", (1,))):
        monkeypatch.setattr(profiling, name, value)
    monkeypatch.setattr(profiling, "PROMPTS", (*PROMPTS[8:10], *PROMPTS[18:20]))

    def raising(_event: object, _progress: object) -> Any:
        def report(what: str, part: float) -> None:
            if what.startswith(at) and part > 0.0:
                raise KeyboardInterrupt

        return report

    monkeypatch.setattr("edgespec.cli.profile.until_set", raising)
    done = runner.invoke(app, ["profile", tiny, *SHORT, "--ctx", "2048"])
    assert done.exit_code == 130, done.output
    assert "step times in ms" in done.stdout and "round like single ones" in done.stdout
    assert done.stdout.count("acceptance length") == 2 * answered


def test_the_share_of_what_memory_moves_is_told_where_it_reads_the_weights() -> None:
    measured = {"prefill": {"tokens_per_s": 100.0, "batch_size": 64}, "largest_invariant_step": 1}
    used = {"used_bytes_per_s": 9e9}
    moved = {"memory_bytes_per_s": 10e9, "ceiling_tokens_per_s": 5.0}
    whole = "9.0 GB/s of weights, 90% of what memory moves; the ceiling is 5.0 tokens/s plain"
    assert ("bandwidth", whole) in _fact_rows({**measured, "bandwidth": used | moved})
    assert ("bandwidth", "9.0 GB/s of weights") in _fact_rows({**measured, "bandwidth": used})


def test_a_report_without_a_folder_is_refused_before_minutes_are_spent(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "report.html"
    done = runner.invoke(app, ["profile", "--html", str(missing)])
    assert done.exit_code == 1
    assert "no folder" in str(done.exception)


def test_what_was_calibrated_is_shown() -> None:
    text = _switch_text(document())
    assert "large.gguf and small<b>.gguf in turns" in text
    for fact in ("1.50 nats", "5 tokens, stays of 10", "40% of the tokens", "150.0 if the small"):
        assert fact in " ".join(text.split()), fact


def test_a_small_model_that_is_always_asked() -> None:
    found = document()
    found["policy"]["down_nats"] = None
    found["policy"]["window"] = 1
    for point in found["points"]:
        point["down_nats"] = None
    found["points"][-1]["down_nats"] = -1.0
    text = " ".join(_switch_text(found).split())
    assert "the small one is asked after every token" in text and "always" in text
    assert "1 token, stays" in text and "never" in text and "-1.00" not in text
