"""Early exits from the command line: what cannot be gone on with, and a whole way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from random_gguf import Q4_0, write_model, write_untrained
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.errors import EdgespecError
from edgespec.models.exits.early_exit import read_exit
from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    pytest.importorskip("torch", reason="training needs torch")
    return read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "TARGET"], "is not a trained early exit"),
        (["--from", "EXIT", "--exit-layer", "3"], "cannot begin with an exit after block 2"),
        (["--from", "MISSING"], "there is no file"),
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


def test_the_command_makes_a_drafter(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.models.exits.text_writer.LENGTH", 48)
    monkeypatch.setattr("edgespec.exits.texts._PLACES", 32)
    drafter = tmp_path / "drafter.gguf"
    arguments = ["draft", "train", str(target.path), "-o", str(drafter), "--minutes", "0.06"]
    result = CliRunner().invoke(app, [*arguments, "--head-size", "128", "--json"])
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout.splitlines()[-1])
    info = read_exit(read_model_spec(drafter))
    assert info is not None and info.report["agreement"] == report["agreement"]
    shown = CliRunner().invoke(app, ["draft", "info", str(drafter)]).stdout
    assert "target.gguf" in shown and "128 tokens" in shown and "(trained)" in shown
