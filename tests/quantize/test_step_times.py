"""Step times of files that were not written, from two small ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from random_gguf import LAYERS

from edgespec.models.gguf.reader import read_gguf
from edgespec.quantize import step_times
from edgespec.quantize.context import EvalContext
from edgespec.quantize.convert import Recipe, convert, predict
from edgespec.quantize.step_times import predicted_step_ms, step_ms


def test_blocks_are_counted_and_the_head_is_added_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0.3 ms a block, 1 ms once and 2 ms for the head: 4 blocks take 4.2 ms a token."""
    monkeypatch.setattr(step_times, "_FEW", 3)
    seen: list[tuple[int, bool]] = []

    def times(
        *paths: Path, sizes: Sequence[int], outputs: bool, **_: Any
    ) -> list[dict[int, float]]:
        blocks = read_gguf(paths[0]).integer("llama.block_count")
        seen.append((blocks, outputs))
        return [{n: n * (0.3 * blocks + 1.0 + 2.0 * outputs) for n in sizes}]

    monkeypatch.setattr(step_times, "step_ms", times)
    types = predict(source, Recipe("Q4_0")).types
    found = predicted_step_ms(source, types, "Q4_0", LAYERS, tmp_path, threads=1, sizes=(1, 4))
    assert found == pytest.approx({1: 4.2, 4: 16.8})
    assert seen == [(3, False), (1, False), (1, True)]
    assert list(tmp_path.iterdir()) == []


def test_small_files_have_the_types_of_the_whole(source: Path, tmp_path: Path) -> None:
    """Blocks keep the types they have in the whole file, under their new numbers."""
    recipe = Recipe("Q4_0", (("blk.2.ffn_down", "Q8_0"), ("token_embd", "Q5_1")))
    whole = predict(source, recipe).types
    target = tmp_path / "small.gguf"
    step_times._write(source, whole, "Q4_0", (0, 2), target, 1, None)
    types = {tensor.name: tensor.type.name for tensor in read_gguf(target).tensors}
    assert types["blk.0.ffn_down.weight"] == "Q4_0" and types["blk.1.ffn_down.weight"] == "Q8_0"
    assert types["token_embd.weight"] == "Q5_1" and "blk.2.ffn_down.weight" not in types


def test_times_are_of_the_sizes_asked_for(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    convert(source, target, "Q8_0")
    (found,) = step_ms(target, threads=1, sizes=(1, 3), depth=70, kv_type="q8_0")
    assert set(found) == {1, 3} and 0 < found[1] < 1000


def test_a_model_that_cannot_go_back_reads_its_past_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recurrent ones: without the past a step at its position would fail."""
    target = tmp_path / "small.gguf"
    convert(source, target, "Q8_0")
    monkeypatch.setattr(EvalContext, "trim", lambda *_: False)
    assert step_ms(target, threads=1, sizes=(1, 3), depth=70)[0][3] > 0
