"""Heads from the command line: made, gone on with, and refused where they are another model's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from eagle_cases import trainer_of, write
from eagle_driver import EagleDriver
from random_gguf import F32, WIDTH, write_model
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.errors import UnsupportedError
from edgespec.models.exits.eagle import HeadInfo, layers_read, read_head
from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", F32))


def test_a_head_of_another_model_is_not_gone_on_with(target: ModelSpec, tmp_path: Path) -> None:
    head = write(trainer_of(target, tmp_path), target, tmp_path / "head.gguf")
    other = write_model(tmp_path / "other.gguf", "llama", F32, seed=6)
    arguments = ["draft", "train", str(other), "-o", str(tmp_path / "new.gguf"), "--kind", "eagle3"]
    result = CliRunner().invoke(app, [*arguments, "--from", str(head.file.path)])
    assert isinstance(result.exception, UnsupportedError)
    assert "is a head of target.gguf, not of other.gguf" in str(result.exception)


def test_the_command_makes_a_head_and_goes_on(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.exits.text_writer.LENGTH", 48)
    monkeypatch.setattr("edgespec.exits.texts._PLACES", 32)
    path = tmp_path / "head.gguf"
    arguments = ["draft", "train", str(target.path), "-o", str(path), "--kind", "eagle3"]
    info: HeadInfo | None = None
    for minutes in ("0.05", "0.06"):
        result = CliRunner().invoke(
            app, [*arguments, "--minutes", minutes, "--head-size", "128", "--json"]
        )
        assert result.exit_code == 0, result.exception
        report = json.loads(result.stdout.splitlines()[-1])
        info = read_head(path)
        assert info is not None and info.report["agreement"] == report["agreement"]
        assert len(info.token_ids) == report["head_size"] >= 128
    assert info is not None and info.layers == layers_read(target.num_layers)
    with EagleDriver(target.path, path, info.layers, WIDTH) as driver:
        rows = driver.fused(driver.states([1, 2, 3]))
        logits, _ = driver.drafted([2, 3, 4], rows, 0)
    assert np.isfinite(logits[:, info.token_ids]).all()
    shown = CliRunner().invoke(app, ["draft", "info", str(path)]).stdout
    assert "target.gguf" in shown and "inputs of the layers 2, 2, 1" in shown
    assert "tokens/round" in shown
