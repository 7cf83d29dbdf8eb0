"""`edgespec draft train`: a whole way to an exit and to a head, and what cannot be gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from eagle_cases import trainer_of, write
from eagle_driver import EagleDriver
from random_gguf import F32, Q4_0, WIDTH, write_model, write_untrained
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.exits.files import read_head
from edgespec.exits.target import layers_read
from edgespec.models.early_exit import read_exit
from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.exits.texts.LENGTH", 48)
    monkeypatch.setattr("edgespec.exits.texts._PLACES", 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "TARGET"], "is not a trained early exit"),
        (["--from", "EXIT", "--exit-layer", "3"], "cannot begin with an exit after block 2"),
        (["--from", "MISSING"], "there is no file"),
        (["--exit-layer", "9"], "--exit-layer 9 is not possible"),
    ],
)
def test_what_cannot_be_trained_further_is_said(
    tmp_path: Path, options: list[str], words: str
) -> None:
    target = read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))
    files = {"TARGET": str(target.path), "MISSING": str(tmp_path / "none.gguf")}
    files["EXIT"] = str(write_untrained(target, tmp_path / "exit.gguf", 2).path)
    arguments = ["draft", "train", str(target.path), "-o", str(tmp_path / "new.gguf")]
    result = CliRunner().invoke(app, [*arguments, *(files.get(part, part) for part in options)])
    assert isinstance(result.exception, EdgespecError)
    assert words in str(result.exception) and result.exception.hint


def test_a_head_of_another_model_is_not_gone_on_with(target: ModelSpec, tmp_path: Path) -> None:
    head = write(trainer_of(target, tmp_path), tmp_path / "head.gguf")
    other = write_model(tmp_path / "other.gguf", "llama", F32, seed=6)
    arguments = ["draft", "train", str(other), "-o", str(tmp_path / "new.gguf"), "--kind", "eagle3"]
    result = CliRunner().invoke(app, [*arguments, "--from", str(head.file.path)])
    assert isinstance(result.exception, UnsupportedError)
    assert "is a head of target.gguf, not of other.gguf" in str(result.exception)


@pytest.mark.usefixtures("little")
def test_the_command_makes_an_exit(llama_or_qwen2: ModelSpec, tmp_path: Path) -> None:
    """Where llama.cpp hands out a model's states, and where torch computes them."""
    pytest.importorskip("torch", reason="training needs torch")
    drafter = tmp_path / "drafter.gguf"
    arguments = ["draft", "train", str(llama_or_qwen2.path), "-o", str(drafter)]
    options = ["--minutes", "0.06", "--exit-layer", "2", "--head-size", "128", "--json"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout.splitlines()[-1])
    info = read_exit(read_model_spec(drafter))
    assert info is not None and info.report["agreement"] == report["agreement"]
    shown = CliRunner().invoke(app, ["draft", "info", str(drafter)]).stdout
    assert "target.gguf" in shown and "128 tokens" in shown and "after block 2" in shown
    assert "tokens/round" in shown


@pytest.mark.usefixtures("little")
def test_the_command_makes_a_head_and_goes_on(target: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "head.gguf"
    arguments = ["draft", "train", str(target.path), "-o", str(path), "--kind", "eagle3"]
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
