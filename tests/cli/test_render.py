"""What is printed of answers, and warnings."""

from __future__ import annotations

import warnings

import pytest

from edgespec import DraftModelWarning
from edgespec.cli.render import models_text, show_warnings
from edgespec.decode.generation import Result, Span
from edgespec.decode.stats import Counters
from edgespec.decode.writers import LARGE, SMALL


def test_counts_of_both_models_in_one_line() -> None:
    spans = (Span(SMALL, 0, 6), Span(LARGE, 6, 8))
    result = Result("text", tuple(range(8)), "stop", Counters(switches=1), spans)
    assert models_text(result) == (
        "2 tokens by the large model (25%), 6 by the small one, 1 switch"
    )


def test_a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(str(message)))
    show_warnings()
    warnings.showwarning(DraftModelWarning("it failed"), DraftModelWarning, "model.py", 1)
    warnings.showwarning(UserWarning("another"), UserWarning, "other.py", 1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err, others) == ("", "warning: it failed\n", ["another"])
