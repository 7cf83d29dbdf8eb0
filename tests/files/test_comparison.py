"""Files against each other: size, loss and speed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import run
from tiny_folder import TinyModel, write_folder

from edgespec.errors import EdgespecError
from edgespec.files import comparison
from edgespec.models.spec import read_model_spec
from edgespec.setup.stored import stored_kv_losses


def test_comparing(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small, page = tmp_path / "small.gguf", tmp_path / "page.html"
    run("type", source, small, "Q4_0")
    result = run("compare", source, small, "--html", page, "--json")
    report = json.loads(result.stdout)
    assert [row["file"] for row in report["rows"]] == ["random.gguf", "small.gguf"]
    kl = report["rows"][1]["quality"]["kl"]
    assert 0 < kl["low"] <= kl["value"] <= kl["high"]
    assert all(set(row["step_ms"]) >= {"1", "4", "8"} for row in report["rows"])
    text = page.read_text()
    assert (
        text.count("<svg") == 2 and "small.gguf" in text and "http://" not in text.split("<svg")[0]
    )
    shown = run("compare", source, small).stdout
    assert re.search(r"small\.gguf +117 KiB +\d\.\d{4} \[", shown)


def test_cache_types(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What smaller caches lose is kept for the planner."""
    monkeypatch.setattr(comparison, "_KV_DEPTH", 32)
    monkeypatch.setattr(comparison, "_KV_LENGTH", 96)
    report = json.loads(run("compare", source, "--kv", "--json").stdout)
    assert [row["kv_type"] for row in report["kv_rows"]] == ["f16", "q8_0", "q4_0"]
    losses = [row["quality"]["kl"]["value"] for row in report["kv_rows"][1:]]
    assert 0 < losses[0] < losses[1]
    stored = stored_kv_losses(read_model_spec(source))
    assert stored == dict(zip(("q8_0", "q4_0"), losses, strict=True))


def test_onnx_folders_are_compared_on_a_text(tmp_path: Path) -> None:
    """Rounding the head to multiples of 0.1 costs something; the folder itself loses nothing."""
    for name in ("onnx", "onnxruntime", "tokenizers"):
        pytest.importorskip(name)
    same, coarse = TinyModel(), TinyModel()
    coarse.weights["head"] = np.round(coarse.weights["head"], 1)
    folders = [
        write_folder(tmp_path / name, tiny)
        for name, tiny in (("source", same), ("again", same), ("coarse", coarse))
    ]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(["The cat sat on the mat, and so did the dog." * 4] * 4))
    result = run("compare", *folders, "--data", text, "--json")
    rows = json.loads(result.stdout)["rows"]
    losses = [row["quality"]["kl"]["value"] for row in rows[1:]]
    assert abs(losses[0]) < 1e-6 < 1e-4 < losses[1]
    with pytest.raises(EdgespecError, match="writes no text") as caught:
        run("compare", *folders)
    assert "--data" in caught.value.hint
