"""Tensors of every type, put together: the file of a recipe, without the quantizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import DoesNotFitError
from edgespec.quantize.context import EvalContext
from edgespec.quantize.convert import convert
from edgespec.quantize.pieces import Pieces, recipe_of
from edgespec.quantize.texts import CountedText


def test_a_mixture_of_pieces_is_the_file_of_its_recipe(
    source: Path, pieces: Pieces, texts: list[CountedText], tmp_path: Path
) -> None:
    types = pieces.source_types()
    for number, name in enumerate(types):
        types[name] = ("Q4_0", "Q5_0", "Q8_0")[number % 3]
    target = tmp_path / "mixed.gguf"
    convert(source, target, recipe_of(types, None, ""))
    with EvalContext(pieces.paths(types), context_size=64, batch_size=64, threads=1) as context:
        ours = [rows.copy() for _, rows in context.score(texts[0].tokens)]
    with EvalContext(target, context_size=64, batch_size=64, threads=1) as context:
        theirs = [rows.copy() for _, rows in context.score(texts[0].tokens)]
    np.testing.assert_array_equal(ours[0], theirs[0])
    sizes = {c.tensor.name: dict(zip(c.types, c.sizes, strict=True)) for c in pieces.choices}
    size = pieces.fixed_bytes + sum(sizes[name][kind] for name, kind in types.items())
    assert 0 <= size - target.stat().st_size <= 512


def test_pieces_are_made_once(pieces: Pieces) -> None:
    pieces.make(1, lambda what, _part: pytest.fail(what))


def test_room_on_the_disk_is_asked_for_what_is_missing(
    source: Path, pieces: Pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    pieces.require_disk(900)
    new = Pieces(source, tmp_path / "not" / "there", allowed=("Q4_0",))
    with pytest.raises(DoesNotFitError, match="0 MiB free"):
        new.require_disk()
    assert not (tmp_path / "not").exists()
