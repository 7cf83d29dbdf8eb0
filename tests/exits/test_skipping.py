"""Drafters made by leaving out blocks: the file, the search, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_gguf import Q4_0, Q8_0, VOCABULARY, write_model
from typer.testing import CliRunner

import edgespec
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.skipping import SkippingBackend
from edgespec.backends.tree import DraftTree
from edgespec.cli.draft import _listed
from edgespec.cli.main import app
from edgespec.errors import UnsupportedError
from edgespec.exits.skipping import AnsweredPrompt, BlockTrial, Skipping, build_skipping, search
from edgespec.models.exits.early_exit import read_exit
from edgespec.models.exits.writer import write_pruned
from edgespec.models.onnx.weights import raw_rows
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.draft_loading import open_draft_model

SETTINGS = LlamaSettings(context_size=256, batch_size=16, max_nodes=8, max_leaves=1)
EVERYTHING = np.arange(VOCABULARY, dtype=np.int32)
TEXT = [3, 200, 7, 101, 55, 8]


@pytest.fixture(params=[("llama", Q4_0), ("qwen2", Q8_0)], ids=["llama", "qwen2"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "target.gguf", *request.param))


def pruned(target: ModelSpec, path: Path, blocks: Sequence[int], ids: Any = EVERYTHING) -> Any:
    write_pruned(target, path, blocks=blocks, token_ids=ids, report={"skipped": [1]})
    return read_model_spec(path)


# ---------------------------------------------------------------------------------- the file


def test_blocks_are_the_targets_bytes_under_new_numbers(target: ModelSpec, tmp_path: Path) -> None:
    drafter = pruned(target, tmp_path / "skip.gguf", [0, 2, 3], EVERYTHING[::2])
    info = read_exit(drafter)
    assert info is not None and info.blocks == (0, 2, 3)
    assert (drafter.num_layers, drafter.vocab_size) == (3, len(EVERYTHING[::2]))
    check_pair(target, drafter)
    for name in drafter.tensors:
        parts = name.split(".")
        old = name
        if parts[0] == "blk":
            old = ".".join(["blk", str(info.blocks[int(parts[1])]), *parts[2:]])
        expected = raw_rows(target.path, target.tensors[old])
        if name in ("token_embd.weight", "output.weight"):
            expected = expected[::2]
        assert np.array_equal(raw_rows(drafter.path, drafter.tensors[name]), expected), name
    assert len(drafter.tensors) == len(target.tensors) * 3 // 4 + 1


@pytest.mark.parametrize("skipped", [{1}, {2}, {1, 2}])
def test_what_is_tried_is_what_is_written(
    target: ModelSpec, tmp_path: Path, skipped: set[int]
) -> None:
    blocks = [block for block in range(4) if block not in skipped]
    written = open_draft_model(pruned(target, tmp_path / "s.gguf", blocks), target, SETTINGS)
    tried = SkippingBackend(target.path, SETTINGS)
    whole = tried.verify(DraftTree.chain(TEXT)).copy()
    tried.truncate(0)
    tried.skipped = skipped
    for backend in (written, tried):
        backend.prefill(TEXT)
    ours, theirs = (backend.verify(DraftTree.chain(TEXT)) for backend in (tried, written))
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()
    assert np.abs(ours - whole).max() > 0.1 * np.abs(whole).max()
    written.close()
    tried.close()


# -------------------------------------------------------------------------------- the search


class Table:
    """Scores by rule: each block has a worth, and two cannot be missed together."""

    num_blocks = 6

    def __init__(self, interrupt_at: int = 10**9) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._interrupt_at = interrupt_at

    def score(self, _texts: Sequence[AnsweredPrompt], skipped: Sequence[int]) -> Skipping:
        if len(self.asked) == self._interrupt_at:
            raise KeyboardInterrupt
        skipped = tuple(sorted(skipped))
        self.asked.append(skipped)
        agreement = 0.9 - sum({1: 0.05, 2: 0.1, 3: 0.2, 4: 0.3}[block] for block in skipped)
        if {1, 2} <= set(skipped):
            agreement = 0.0
        speed = agreement * len(skipped)
        kept = self.num_blocks - len(skipped)
        return Skipping(skipped, kept, 8, agreement, (agreement,), 1 + agreement, 1.0, speed)

    def candidates(self, skipped: Sequence[int]) -> list[int]:
        return [block for block in (1, 2, 3, 4) if block not in skipped]

    def settle(self, skipped: Sequence[int]) -> None:
        pass


def found(table: Table, seconds: float = 1e9) -> list[tuple[int, ...]]:
    return [skipping.skipped for skipping in search(table, [], seconds)]  # type: ignore[arg-type]


def test_each_step_leaves_out_the_block_that_is_missed_least() -> None:
    assert found(Table())[:3] == [(1,), (1, 3), (1, 3, 4)]


def test_interrupted_it_keeps_what_was_found() -> None:
    assert found(Table(interrupt_at=7)) == [(1,)]
    assert found(Table(interrupt_at=2)) == []


def test_time_ends_it() -> None:
    assert found(Table(), seconds=1e-9) == []


# ------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("skip", ["auto", "2"])
def test_the_command_writes_a_drafter(
    tmp_path: Path, skip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_model(tmp_path / "target.gguf", "llama", Q4_0)

    def texts(
        spec: ModelSpec, _progress: Any
    ) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt], list[float]]:
        """Prompts in ids: this model's vocabulary has no words."""
        with edgespec.load(spec.path, backend="llamacpp", context_size=256) as engine:
            made = [
                AnsweredPrompt([n, 7, 9], engine.generate([n, 7, 9], max_tokens=8).token_ids)
                for n in range(4)
            ]
        return made[:2], made[2:], [float("inf"), *[1.0] * 8]

    monkeypatch.setattr("edgespec.exits.skipping._texts", texts)
    output = tmp_path / "skip.gguf"
    command = ["draft", "build", str(target), "-o", str(output), "--skip", skip, "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.exception
    report = json.loads(done.stdout)
    assert report["result"]["skipped"] == report["skipped"]
    info = read_exit(read_model_spec(output))
    assert info is not None and set(info.blocks) == set(range(4)) - set(report["skipped"])
    assert json.dumps(info.report) == json.dumps(report)
    shown = CliRunner().invoke(app, ["draft", "info", str(output)])
    assert f"{len(info.blocks)} of the blocks, {_listed(info.blocks)}" in shown.stdout
    assert "(written)" in shown.stdout
    if skip == "2":
        assert info.blocks == (0, 1, 3)


def test_nothing_found_in_time_is_said(
    target: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = AnsweredPrompt([3, 7], [4, 5])
    curve = [float("inf"), *[1.0] * 8]
    monkeypatch.setattr("edgespec.exits.skipping._texts", lambda *_: ([text], [text], curve))
    with pytest.raises(UnsupportedError, match="no block could be left out"):
        build_skipping(target, tmp_path / "skip.gguf", minutes=1e-9)
    assert not (tmp_path / "skip.gguf").exists()


def test_a_model_that_hides_its_blocks_is_refused(
    target: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out without effect would look like the best of drafters."""
    monkeypatch.setattr("edgespec.backends.llama.skipping._RESULT", b"unheard of")
    trial = BlockTrial(target, EVERYTHING, [float("inf"), *[1.0] * 8])
    with pytest.raises(UnsupportedError, match="models cannot be left out"):
        trial.score([AnsweredPrompt([3, 7], [4, 5])], (1,))
    trial.close()


@pytest.mark.parametrize("skip", ["0", "3", "9", "1-3"])
def test_the_first_and_the_last_block_stay(tmp_path: Path, skip: str) -> None:
    target = write_model(tmp_path / "target.gguf", "llama", Q4_0)
    done = CliRunner().invoke(app, ["draft", "build", str(target), "--skip", skip])
    assert isinstance(done.exception, UnsupportedError)
    assert "use blocks from 1 to 2" in str(done.exception.hint)
