"""`edgespec draft`: what is asked for, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_gguf import Q4_0, write_model, write_untrained
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.models.embedded import embedded_drafter_path
from edgespec.models.spec import read_model_spec


def test_info_of_another_model_is_a_sentence(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", Q4_0)
    result = CliRunner().invoke(app, ["draft", "info", str(path)])
    assert isinstance(result.exception, UnsupportedError)
    assert "no drafter that edgespec made" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "eagle3", "--exit-layer", "2"], "--exit-layer 2 is for early exits"),
        (["--kind", "eagle3", "--from", "EXIT"], "exit.gguf is not a trained head"),
        (["--kind", "eagle3", "--head-size", "9999"], "--head-size 9999 is not possible"),
    ],
)
def test_what_cannot_be_a_head_is_said(tmp_path: Path, options: list[str], words: str) -> None:
    target = read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))
    files = {"EXIT": str(write_untrained(target, tmp_path / "exit.gguf", 2).path)}
    arguments = ["draft", "train", str(target.path), "-o", str(tmp_path / "new.gguf")]
    result = CliRunner().invoke(app, [*arguments, *(files.get(part, part) for part in options)])
    assert isinstance(result.exception, EdgespecError), result.exception
    assert words in str(result.exception) and result.exception.hint


def test_what_plans_make_of_a_trained_drafter_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = read_model_spec(write_model(tmp_path / "target.gguf", "llama", Q4_0))
    path = write_untrained(target, tmp_path / "exit.gguf", 2).path
    monkeypatch.setattr("edgespec.exits.training.train_drafter", lambda *_, **__: {})
    arguments = ["draft", "train", str(target.path), "-o", str(path), "--kind", "exit", "--json"]
    assert "early_exit" in CliRunner().invoke(app, arguments).stderr


def test_a_kind_that_there_is_not_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["draft", "train", "--kind", "medusa"])
    assert result.exit_code == 2 and "exit, eagle3" in result.output


def test_what_the_shipped_head_promises_is_told() -> None:
    """Of four drafts, measured with answers to people's prompts."""
    path = embedded_drafter_path()
    assert path is not None
    shown = CliRunner().invoke(app, ["draft", "info", str(path)]).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    start = lines.index("drafts in every round of answers to prompts tokens/round")
    assert [line.split()[0] for line in lines[start + 1 :]] == ["1", "2", "4"]
