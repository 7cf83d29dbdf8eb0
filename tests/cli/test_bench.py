"""`edgespec bench`: its options, and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_cases import document
from typer.testing import CliRunner

from edgespec.cli.bench import bench_text
from edgespec.cli.main import app

runner = CliRunner()


def test_an_unknown_drafter_is_misuse() -> None:
    done = runner.invoke(app, ["bench", "--drafter", "plain", "--drafter", "suffix,magic"])
    assert done.exit_code == 2
    assert "magic" in done.output


def test_the_ceiling_comes_first_and_every_task_has_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = bench_text(document())
    assert text.index("ceiling  443.6 tokens/s plain: 40.0 GB/s over 86 MiB") < text.index("code")
    assert "plain    100.0 tokens/s, 23% of the ceiling" in text
    assert "summarization  100.0  180.0  1.80x  [1.75, 1.85]  1.00    0.25 s  2 of 2" in text
    assert "overall        100.0  140.0  1.40x  [1.35, 1.45]  1.50    0.25 s  1 of 2" in text
    assert "60 of 80 by suffix, 0 of 10 by recycling" in text
    assert "1 answers part from the first drafter's, 0 of them where" in text.replace("\n", " ")
    assert text.endswith("memory  peak 270 MiB, planned 280 MiB")


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = bench_text(document())
    assert [line for line in text.splitlines() if len(line) > columns] == []
    assert "1.80x" in text and "1.40x" in text
    assert "J a token: plain 0.42, suffix,recycling" in text


def test_what_the_answers_do_not_tell_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one token have no ratio, and few prompts no interval."""
    monkeypatch.setenv("COLUMNS", "100")
    unknown = {"ratio": None, "ratio_low": None, "ratio_high": None, "end_to_end_ratio": None}
    found = document()
    found["variants"][1]["overall"].update(unknown)
    found["variants"][1]["tasks"]["code"].update(unknown)
    found["variants"][1]["tasks"]["summarization"]["ratio_low"] = None
    text = bench_text(found)
    assert "code           100.0  110.0  -      -    " in text
    assert "summarization  100.0  180.0  1.80x  -    " in text


def test_one_variant_alone_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    alone = document(variants=document()["variants"][:1])
    assert "plain, tokens/s" in bench_text(alone)


@pytest.mark.model
def test_bench_of_two_settings_and_drafters(tiny: str, measured: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Say blue ten times: blue blue blue blue blue", "Count: 1 2 3 4 1 2 3 4 1 2 3 4 1")
    lines = [{"category": f"task {i % 2}", "turns": [text]} for i, text in enumerate(texts)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "edgespec.cli.main", "bench", tiny, "--json", "-n", "12"),
            *("--prompts", str(prompts), "--repeats", "2", "--threads", "1", "--ctx", "256"),
            *("--drafter", "plain", "--drafter", "suffix", "--exact"),
            *("--draft-max", "3", "--draft-max", "7"),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "EDGESPEC_CACHE": measured, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = [one["name"] for one in found["variants"]]
    assert names == ["plain --draft-max 3", "suffix --draft-max 3",
                     "plain --draft-max 7", "suffix --draft-max 7"]  # fmt: skip
    for one in found["variants"]:
        assert set(one["tasks"]) == {"task 0", "task 1"}
        assert one["overall"]["prompts"] == one["overall"]["identical"] == 2
        assert one["overall"]["ratio_low"] is None, "two prompts have no interval"
    assert found["variants"][0]["overall"]["ratio"] == 1.0
    assert found["variants"][0]["overall"]["acceptance_length"] == 1.0
    assert [load["settings"] for load in found["loads"]] == ["--draft-max 3", "--draft-max 7"]
    for load in found["loads"]:
        memory = load["memory"]
        assert 0 < memory["measured_peak_bytes"] < 1.1 * memory["predicted_peak_bytes"]
    assert len(found["answers"]) == 4 * 2 * 2
