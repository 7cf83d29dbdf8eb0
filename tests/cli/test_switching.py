"""Two models on the command line: who wrote what is seen, and what makes no sense is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.cli.profile import _switch_text
from edgespec.cli.render import models_text
from edgespec.cli.tint import DRAFTED, MODEL, NONE, Tint
from edgespec.decode.generation import Chunk, Result, Span
from edgespec.decode.stats import Counters
from edgespec.decode.writers import LARGE, SMALL
from edgespec.errors import UnsupportedError
from edgespec.memory.report.profile_page import render_switching
from edgespec.models.embedded import embedded_model

CYAN, PLAIN = "\x1b[36m", "\x1b[39m"


def document() -> dict[str, Any]:
    """What calibrating a pair found."""
    ends = ({"large_share": 0.0, "quality": 0.0}, {"large_share": 1.0, "quality": 1.0})
    points = [
        {"agreement": 0.8 + 0.2 * end["quality"], "tokens_per_s": 200.0 - 80.0 * end["quality"],
         "up_nats": 1.5, "down_nats": 0.5, **end}
        for end in ends
    ]  # fmt: skip
    return {
        "large": "large.gguf",
        "small": "small<b>.gguf",
        "policy": {"up_nats": 1.5, "down_nats": 0.5, "window": 5, "min_stay": 10},
        "expected": {**points[0], "large_share": 0.4, "quality": 0.6, "agreement": 0.92},
        "expected_where_it_pays": points[1],
        "alone": {SMALL: points[0], LARGE: points[1]},
        "lossless": {"drafting_tokens_per_s": 150.0},
        "points": points,
    }


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
    chunk = Chunk("two \x07words", (1, 2), 1, 3, model=model)
    assert Tint(color).text(chunk) == shown
    monkeypatch.setenv("NO_COLOR", "1")
    underlined = shown.replace(CYAN, "\x1b[4m").replace(PLAIN, "\x1b[24m")
    assert Tint(color).text(chunk) == underlined


def test_counts_of_both_models_in_one_line() -> None:
    spans = (Span(SMALL, 0, 6), Span(LARGE, 6, 8))
    result = Result("text", tuple(range(8)), "stop", Counters(switches=1), spans)
    assert models_text(result) == (
        "2 tokens by the large model (25%), 6 by the small one, 1 switch"
    )


def test_what_was_calibrated_is_shown() -> None:
    text = _switch_text(document())
    assert "large.gguf and small<b>.gguf in turns" in text
    for fact in ("1.50 nats", "5 tokens, stays of 10", "40% of the tokens", "150.0 if the small"):
        assert fact in " ".join(text.split()), fact


def test_a_small_model_that_is_always_asked() -> None:
    found = document()
    found["policy"]["down_nats"] = None
    found["policy"]["window"] = 1
    for point in found["points"]:
        point["down_nats"] = None
    found["points"][-1]["down_nats"] = -1.0
    text = " ".join(_switch_text(found).split())
    assert "the small one is asked after every token" in text and "always" in text
    assert "1 token, stays" in text and "never" in text and "-1.00" not in text


def test_the_page_of_a_pair() -> None:
    page = render_switching(document())
    assert "<svg" in page and "Quality against speed" in page
    assert "small&lt;b&gt;.gguf" in page and "small<b>" not in page


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
