"""`edgespec embed`: texts of arguments and of a pipe, as lines and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bert_gguf import write_random_bert
from command_line import Command

import edgespec
from edgespec.cli.options import DEFAULTS, PlanOptions
from edgespec.errors import UnsupportedError
from edgespec.memory.plan.embedding import check_options
from edgespec.models.spec import read_model_spec

TEXTS = ["the cat", "a dog sat"]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_random_bert(tmp_path / "bert.gguf")


def test_arguments_and_lines_of_a_pipe_are_texts(command: Command, bert: Path) -> None:
    expected = edgespec.embed(TEXTS, bert)
    for done in (
        command("embed", str(bert), *TEXTS),
        command("embed", str(bert), stdin="\n".join([*TEXTS, ""])),
    ):
        assert (done.status, done.err) == (0, "")
        rows = [[float(one) for one in line.split()] for line in done.out.splitlines()]
        assert np.allclose(rows, expected, atol=1e-6)


def test_the_model_is_the_first_argument_or_an_option(command: Command, bert: Path) -> None:
    """A text that is taken for a model is told so."""
    expected = command("embed", str(bert), *TEXTS).out
    assert command("embed", "-m", str(bert), *TEXTS).out == expected
    done = command("embed", *TEXTS)
    assert done.status == 1 and "the cat is no model" in done.err
    assert "hint: name a model before the texts, or with -m" in done.err
    done = command("embed")
    assert done.status == 2 and "no model: name it first, or with -m" in done.err


def test_a_server_takes_what_commands_ask_for_unless_told_otherwise(bert: Path) -> None:
    spec = read_model_spec(bert)
    check_options(spec, DEFAULTS.request())
    with pytest.raises(UnsupportedError, match="--kv-type is about writing text"):
        check_options(spec, PlanOptions({"kv_type": "q8_0"}).request())


def test_one_document(command: Command, bert: Path) -> None:
    told = json.loads(command("embed", str(bert), *TEXTS, "--json", "--pooling", "cls").out)
    assert np.allclose(told["embeddings"], edgespec.embed(TEXTS, bert, pooling="cls"), atol=1e-6)
    assert told["tokens"] == [4, 5]
    memory = told["memory"]
    assert 0 < memory["measured_peak_bytes"] and memory["components"]["weights"] > 0


def test_its_plan_has_bytes_and_how_texts_are_pooled(command: Command, bert: Path) -> None:
    """Nothing is drafted or written."""
    shown = command("plan", str(bert), "--budget", "600MiB").out
    assert "pooling" in shown and "of 600 MiB budget" in shown
    assert "drafter" not in shown and "tokens/s" not in shown
    told = json.loads(command("plan", str(bert), "--json").out)
    measured = json.loads(command("embed", str(bert), *TEXTS, "--json").out)["memory"]
    assert told["memory"]["components"] == measured["components"]
    done = command("plan", str(bert), "--kv-type", "q8_0")
    assert done.status == 1 and "is about writing text" in done.err


def test_a_long_text_is_refused_in_a_sentence(command: Command, bert: Path) -> None:
    done = command("embed", str(bert), "cat " * 100)
    assert done.status == 1 and "text 1 has 102 tokens, and at most 64 fit" in done.err
    assert "hint: split it, or ask for it to be truncated" in done.err
    cut = command("embed", str(bert), "cat " * 100, "--truncate")
    assert cut.status == 0 and len(cut.out.split()) == 64


def test_what_is_no_text_or_no_model_is_refused(command: Command, bert: Path) -> None:
    done = command("embed", str(bert), stdin=b"a\n\xff\n")
    assert done.status == 1 and "stdin" in done.err
    assert command("embed", "there-is-none.gguf", "a").status == 1
    assert command("embed", str(bert), "a", "--budget", "1MiB").status == 1
