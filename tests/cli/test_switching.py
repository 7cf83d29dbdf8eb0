"""Two models on the command line: who wrote what is seen, and what makes no sense is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.decode.generation import LARGE, SMALL
from edgespec.errors import UnsupportedError
from edgespec.models.embedded import embedded_model


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--large-share", "0.4"],
        ["profile", "--switch", "x.gguf", "--large-share", "0.4", "--quality", "0.9"],
        ["run", "hello there", "--color", "rainbow"],
    ],
)
def test_misuse(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_check_of_two_models_is_refused() -> None:
    done = CliRunner().invoke(
        app, ["run", "hello there", "--check", "--switch", str(embedded_model())]
    )
    assert isinstance(done.exception, UnsupportedError)
    assert "two models write" in str(done.exception)


@pytest.mark.model
def test_a_model_in_turns_with_itself() -> None:
    from edgespec.models.embedded import embedded_model

    itself = str(embedded_model())
    arguments = ["run", "Name a colour.", "--switch", itself, "--ctx", "256", "-n", "20", "--json"]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    switching = report["switching"]
    written = sum(span["end"] - span["start"] for span in switching["spans"])
    assert written == len(report["token_ids"]) > 5
    assert {span["model"] for span in switching["spans"]} <= {LARGE, SMALL}
    assert "not calibrated" in report["plan"]["switch"]["reason"]
    memory = report["memory"]
    assert memory["components"]["switch_kv_cache"] == memory["components"]["kv_cache"]
    assert memory["allocated_bytes"]["switch_kv_cache"] == memory["allocated_bytes"]["kv_cache"]
    assert memory["measured_peak_bytes"] > 0
