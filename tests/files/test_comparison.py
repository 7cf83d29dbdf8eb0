"""Files against each other: size, loss and speed."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from quantize_cases import run
from random_gguf import F32, write_model
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.files import comparison
from edgespec.models.spec import read_model_spec
from edgespec.quantize.step_times import step_ms
from edgespec.setup.stored import stored_kv_losses


def test_comparing(source: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    run("type", source, small, "Q4_0")
    result = run("compare", source, small, "--json")
    report = json.loads(result.stdout)
    assert [row["file"] for row in report["rows"]] == ["random.gguf", "small.gguf"]
    kl = report["rows"][1]["quality"]["kl"]
    assert 0 < kl["low"] <= kl["value"] <= kl["high"]
    assert all(set(row["step_ms"]) >= {"1", "4", "8"} for row in report["rows"])
    shown = run("compare", source, small).stdout
    assert re.search(r"small\.gguf +117 KiB +\d\.\d{4} \[", shown)


def test_files_that_were_compared_before_an_interruption_are_told(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C would end it at once; here the second file comes after the first one."""
    cancel = threading.Event()
    monkeypatch.setattr("edgespec.cli.quantize.cancel_on_interrupt", lambda: cancel)

    def measured(*arguments: Any, **options: Any) -> list[dict[int, float]]:
        cancel.set()
        return step_ms(*arguments, **options)

    monkeypatch.setattr(comparison, "step_ms", measured)
    done = CliRunner().invoke(app, ["quantize", "compare", str(source), str(source), "--json"])
    assert done.exit_code == 130
    assert "interrupted: this is what was measured until then" in done.stderr
    report = json.loads(done.stdout)
    assert not report["complete"] and len(report["rows"]) == 1


def test_cache_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What smaller caches lose is kept for the planner; keys and values may have two types."""
    source = write_model(tmp_path / "bytes.gguf", "llama", F32, reads_bytes=True)
    monkeypatch.setattr(comparison, "_KV_DEPTH", 32)
    monkeypatch.setattr(comparison, "_KV_TYPES", ("q8_0", "q4_0", "q8_0/q4_0"))
    report = json.loads(run("compare", source, "--kv", "--json").stdout)
    assert [row["kv_type"] for row in report["kv_rows"]] == ["f16", "q8_0", "q4_0", "q8_0/q4_0"]
    losses = [row["quality"]["kl"]["value"] for row in report["kv_rows"][1:]]
    assert 0 < losses[0] < losses[2] < losses[1]
    stored = stored_kv_losses(read_model_spec(source))
    assert stored == dict(zip(("q8_0", "q4_0", "q8_0/q4_0"), losses, strict=True))


def test_cache_types_that_were_measured_before_an_interruption_are_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All losses were measured before anything was told or kept, which takes minutes."""
    source = write_model(tmp_path / "bytes.gguf", "llama", F32, reads_bytes=True)
    monkeypatch.setattr(comparison, "_KV_DEPTH", 32)
    monkeypatch.setattr(comparison, "_KV_TYPES", ("q8_0", "q4_0"))
    cancel = threading.Event()
    monkeypatch.setattr("edgespec.cli.quantize.cancel_on_interrupt", lambda: cancel)

    def measured(*arguments: Any, kv_type: str, **options: Any) -> list[dict[int, float]]:
        if kv_type == "q8_0":
            cancel.set()
        return step_ms(*arguments, kv_type=kv_type, **options)

    monkeypatch.setattr(comparison, "step_ms", measured)
    asked = ["quantize", "compare", str(source), "--kv", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 130
    assert "interrupted: this is what was measured until then" in done.stderr
    report = json.loads(done.stdout)
    assert not report["complete"]
    assert [row["kv_type"] for row in report["kv_rows"]] == ["f16", "q8_0"]
    assert set(stored_kv_losses(read_model_spec(source))) == {"q8_0"}
