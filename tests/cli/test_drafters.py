"""Draft models and remembered texts on the command line, with the embedded model."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, run

from edgespec.models.embedded import embedded_model

QUESTION = "Say the word blue ten times: blue blue blue blue"
SHORT = ("--max-tokens", "12", "--ctx", "256", "--threads", "1", "--json")

pytestmark = pytest.mark.model


def report_of(command: Command, *arguments: str, model: str = "") -> dict[str, Any]:
    file = model or str(embedded_model())
    done = command("run", file, QUESTION, *SHORT, *arguments)
    assert (done.status, done.err) == (0, "")
    return done.document


def test_a_draft_model_is_planned_priced_and_lossless(
    here: Command, measured: str, tiny: str
) -> None:
    """The model drafts for itself: it cannot be wrong, and can hardly pay."""
    exact = ("--exact", "--draft-max", "7")
    alone = partial(run, cache=measured)  # whose peak is that of a process
    report = report_of(alone, "--draft-model", tiny, *exact, model=tiny)
    plain = report_of(here, "--drafter", "none", *exact, model=tiny)
    assert report["token_ids"] == plain["token_ids"]
    assert report["plan"]["drafter"]["value"] == "suffix,model"
    memory = report["memory"]
    assert memory["components"]["draft_kv_cache"] == memory["components"]["kv_cache"]
    assert memory["measured_peak_bytes"] <= memory["predicted_peak_bytes"]
    sources = report["drafted_by"]
    assert set(sources) <= {"suffix", "model"}
    assert sum(sources.values()) == report["drafted_tokens"]
    assert report["accepted_by"].get("model", 0) == sources.get("model", 0)


def test_a_run_says_what_each_drafter_wrote(here: Command) -> None:
    arguments = (str(embedded_model()), QUESTION, *SHORT[:-1], "--drafter", "suffix")
    done = here("run", *arguments)
    assert re.search(r"\), drafts accepted: suffix \d+ of \d+, first token", done.err)


def test_what_is_remembered_is_shown_and_cleared(
    command: Command, cache_folder: Path, measured_cache: Path
) -> None:
    # Steps are timed already; chats of other tests may have kept their caches beside.
    shutil.copytree(measured_cache, cache_folder, ignore=shutil.ignore_patterns("prefixes"))
    assert "nothing is remembered" in command("remembered").err
    first = report_of(command, "--remember")
    (kept,) = json.loads(command("remembered", "--json").out)
    assert kept["model"] == embedded_model().name
    # Prompts are kept as well: whoever asks the same again has its answer drafted.
    assert kept["tokens"] == first["prompt_tokens"] + len(first["token_ids"])
    report_of(command)  # without the option nothing is added
    assert json.loads(command("remembered", "--json").out) == [kept]
    again = report_of(command, "--remember")
    assert again["token_ids"] == first["token_ids"]
    assert "1 model" in command("remembered", "--clear").err
    assert json.loads(command("remembered", "--json").out) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--drafter", "model"), "needs a draft model"),
        (
            ("--drafter", "suffix", "--draft-model", str(embedded_model())),
            "is not used by --drafter suffix",
        ),
        (("--draft-model", "nowhere.gguf"), "there is no file"),
    ],
)
def test_what_cannot_be(command: Command, options: tuple[str, ...], sentence: str) -> None:
    done = command("run", "hello there", *options)
    assert (done.status, done.out) == (1, "")
    assert sentence in done.err and "hint:" in done.err
