"""The fastest type of a model, within a loss."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from quantize_cases import run

from edgespec.errors import EdgespecError
from edgespec.files import tuning
from edgespec.models.spec import read_model_spec
from edgespec.quantize.convert import Recipe


@pytest.mark.long
def test_tuning(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "tuned.gguf"
    arguments = ("tune", source, target, "--types", "Q4_0,Q8_0", "--max-kl", 0.2, "--json")
    report = json.loads(run(*arguments).stdout)
    chosen = next(row for row in report["rows"][1:] if row["type"] == report["type"])
    assert chosen["kl"] <= 0.2 and report["type"].startswith(read_model_spec(target).file_type)
    tried = [row["type"] for row in report["rows"]]
    assert tried == ["F32", "Q4_0", "Q4_0, head Q4_0", "Q8_0"]
    heads = [row["bytes"] for row in report["rows"][1:3]]
    assert heads[1] < heads[0]
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["tuned.gguf"]


def test_a_machine_that_slows_down_makes_no_candidate_slow(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take the same; the second one is timed when everything takes half as long again."""
    paces = iter([2.0, 2.0, 4.0])

    def times(_path: Path, _types: Any, kind: str, *_: Any, **__: Any) -> dict[int, float]:
        return {1: 10.0 if kind == "Q4_0" else 15.0, 32: 90.0}

    monkeypatch.setattr(tuning, "predicted_step_ms", times)
    monkeypatch.setattr(tuning, "pace", lambda *_, **__: nullcontext(lambda: next(paces)))
    monkeypatch.setattr(tuning, "_recipes", lambda _, types, *__: {k: Recipe(k) for k in types})
    report = json.loads(run("tune", source, "--types", "Q4_0,Q8_0", "--json").stdout)
    first, second = (row["step_ms"]["1"] for row in report["rows"][1:])
    assert first == second == pytest.approx(10.0)


@pytest.mark.long
def test_types_that_need_a_matrix_are_tuned_too(source: Path) -> None:
    report = json.loads(run("tune", source, "--types", "IQ3_S", "--max-kl", 99, "--json").stdout)
    assert report["type"].startswith("IQ3_S")


@pytest.mark.long
def test_no_type_is_good_enough(source: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match=r"loses at most 0\.0000") as caught:
        run("tune", source, "--types", "Q4_0", "--max-kl", 0)
    assert "--max-kl" in caught.value.hint and tuning.CANDIDATES
