"""Which text is tinted."""

from __future__ import annotations

import pytest

from edgespec.cli.tint import DRAFTED, MODEL, NONE, Tint
from edgespec.decode.generation import Chunk
from edgespec.decode.stats import LARGE, SMALL

CYAN, PLAIN = "\x1b[36m", "\x1b[39m"


@pytest.mark.parametrize(
    ("color", "model", "shown"),
    [
        (MODEL, LARGE, f"{CYAN}two words{PLAIN}"),
        (MODEL, SMALL, "two words"),
        (MODEL, "", "two words"),
        (DRAFTED, LARGE, f"{CYAN}two{PLAIN} words"),
        (NONE, LARGE, "two words"),
    ],
)
def test_what_is_tinted(
    color: str, model: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    chunk = Chunk("two \x07words", (1, 2), 1, 3, model=model)
    assert Tint(color).text(chunk) == shown
    monkeypatch.setenv("NO_COLOR", "1")
    underlined = shown.replace(CYAN, "\x1b[4m").replace(PLAIN, "\x1b[24m")
    assert Tint(color).text(chunk) == underlined
    monkeypatch.setenv("TERM", "dumb")
    assert Tint(color).text(chunk) == "two words"
