"""Images in llama.cpp: the same logits as libmtmd's own path, for several families of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from vision_cases import PLACES, Reference, open_backend, parts_with, prompt, read, shown
from vision_gguf import KINDS, REAL, jpeg, picture, png, write_projector, write_vision

from edgespec.backends.base import DraftTree, ImageRun
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.team import Teams
from edgespec.errors import BackendError, ContextFullError, UnsupportedError
from edgespec.memory.bytes.projector import first_buffers, projector_parts
from edgespec.models.images import MAX_SIDE, read_image
from edgespec.models.projector import Projector, read_projector


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, vision_folder: Path) -> Iterator[LlamaBackend]:
    made = open_backend(vision_folder, request.param)
    yield made
    made.close()


@pytest.fixture
def mrope(vision_folder: Path) -> Iterator[LlamaBackend]:
    made = open_backend(vision_folder, "qwen3vl", users=2, cells=512, context_size=256)
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5))])
@pytest.mark.parametrize("place", PLACES)
def test_logits_are_those_of_libmtmd(backend: LlamaBackend, count: int, place: str) -> None:
    """Where these are numbers: Pixtral's graph reads memory that nothing has written."""
    parts = parts_with(place, count)
    found = read(backend, prompt(backend, parts))
    assert np.isfinite(found).all()
    expected, _ = Reference(backend).read(parts)
    assert np.array_equal(found, expected) or not np.isfinite(expected).all()


def test_another_image_has_other_ids_and_logits(backend: LlamaBackend) -> None:
    one, other = (prompt(backend, [image, "?"]) for image in shown(2))
    runs = [next(piece for piece in each if isinstance(piece, ImageRun)) for each in (one, other)]
    assert not set(runs[0].ids) & set(runs[1].ids) and max(runs[0].ids) < 0
    again = next(p for p in prompt(backend, [shown(1)[0]]) if isinstance(p, ImageRun))
    assert again == runs[0]
    first = read(backend, one)
    backend.truncate(0)
    assert not np.array_equal(first, read(backend, other))


def test_what_stands_behind_an_image_is_taken_back(backend: LlamaBackend) -> None:
    """The cache goes back to before the last text, or to before an image that is cut.

    With sliding windows as far as their cells are still there.
    """
    image, *_ = shown(1)
    pieces = prompt(backend, ["a", image, "bcd"])
    run = next(piece for piece in pieces if isinstance(piece, ImageRun))
    expected, length = read(backend, pieces), backend.length
    if not backend.capabilities.truncate:
        assert backend.truncate(length - 1) in (0, length - 1)
        backend.truncate(0)
        assert np.array_equal(read(backend, pieces), expected)
        return
    assert backend.truncate(length - 2) == length - 2
    assert np.array_equal(
        backend.prefill(backend.tokenizer.encode("cd", add_special=False)), expected
    )
    start = next(i for i, one in enumerate(backend.tokens) if one < 0)
    assert backend.truncate(start + len(run.ids) - 1) == start
    place = pieces.index(run)
    assert np.array_equal(read(backend, pieces[place:]), expected)


def test_a_step_that_was_not_taken_leaves_nothing_before_an_image(backend: LlamaBackend) -> None:
    image, *_ = shown(1)
    before, *behind = prompt(backend, ["ab", image, "c"])
    expected = read(backend, [before, *behind])
    backend.truncate(0)
    read(backend, [before])
    backend.verify(DraftTree.chain(backend.tokenizer.encode("d", add_special=False)[:1]))
    assert np.array_equal(read(backend, behind), expected)


def test_positions_of_an_image_are_fewer_with_mrope(mrope: LlamaBackend) -> None:
    first, other = mrope.sequences
    pieces = prompt(mrope, ["a", *shown(1), "bcd"])
    expected = read(mrope, pieces)
    runs = [piece for piece in pieces if isinstance(piece, ImageRun)]
    assert [run.positions < len(run.ids) for run in runs] == [True]
    mrope.share(0, 1, mrope.length - 1)
    found = other.prefill([mrope.tokens[-1]])
    assert np.allclose(found, expected, atol=0.05)
    assert other.tokens == first.tokens


def test_another_user_begins_between_the_parts_of_an_image(vision_folder: Path) -> None:
    """With the text before it, which both have in common."""
    sizes = {"users": 2, "cells": 512, "context_size": 256, "batch_size": 8}
    with closing(open_backend(vision_folder, "qwen3vl", **sizes)) as made:
        before, run, behind = pieces = prompt(made, ["ab", *shown(1), "cd"])
        assert isinstance(run, ImageRun)
        expected = read(made, pieces)
        made.truncate(0)
        read(made, [before])
        start, parts = made.length, made.read_image_parts(run, None)
        assert next(parts) is None
        made.share(0, 1, start)
        assert [*parts]
        assert np.allclose(read(made, [behind]), expected, atol=0.05)


def test_an_image_that_does_not_fit_changes_nothing(vision_folder: Path) -> None:
    with_little_room = open_backend(vision_folder, "llava", context_size=66)
    pieces = prompt(with_little_room, ["abc", *shown(1), "d"])
    before = with_little_room.prefill(pieces[0]).copy()  # type: ignore[arg-type]
    with pytest.raises(ContextFullError, match="64 more tokens"):
        with_little_room.read_image(pieces[1])  # type: ignore[arg-type]
    assert with_little_room.length == 3
    with_little_room.truncate(2)
    assert np.allclose(with_little_room.prefill([pieces[0][2]]), before, atol=0.05)  # type: ignore[index]
    with_little_room.close()


def test_an_image_that_sees_itself_needs_a_step(vision_folder: Path) -> None:
    small = open_backend(vision_folder, "gemma3", batch_size=8)
    run = next(one for one in small.image_pieces(shown(1)[0]) if isinstance(one, ImageRun))
    with pytest.raises(UnsupportedError, match="16 tokens is read at once, and a step has 8"):
        small.read_image(run)
    small.close()


def test_an_image_in_pieces_is_the_same(vision_folder: Path) -> None:
    whole, cut = (open_backend(vision_folder, "llava", batch_size=size) for size in (64, 24))
    found = [read(one, prompt(one, ["a", *shown(1), "b"])) for one in (whole, cut)]
    assert np.allclose(found[0], found[1], atol=0.05)
    whole.close()
    cut.close()


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (3, 500), (1, MAX_SIDE)])
def test_odd_shapes_are_read(backend: LlamaBackend, size: tuple[int, int]) -> None:
    """Or refused before anything is computed: idefics3 makes slices with no height of some."""
    image = read_image(png(picture(3, *size)))
    try:
        pieces = prompt(backend, [image, "?"])
    except UnsupportedError as problem:
        assert f"{size[0]} x {size[1]} pixels cannot be prepared" in str(problem)
        return
    if sum(len(one) if isinstance(one, list) else len(one.ids) for one in pieces) < 500:
        assert np.isfinite(read(backend, pieces)).all()


def test_another_models_projector_is_refused(vision_folder: Path, tmp_path: Path) -> None:
    write_vision(tmp_path, "qwen2.5vl")
    (tmp_path / "mmproj-qwen2.5vl.gguf").unlink()
    (tmp_path / "mmproj-qwen2.5vl.gguf").symlink_to(vision_folder / "mmproj-qwen3vl.gguf")
    with pytest.raises(BackendError, match="mismatch between text model"):
        open_backend(tmp_path, "qwen2.5vl")


def test_embeddings_are_kept(mrope: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = prompt(mrope, [*shown(1), "a"])
    expected = read(mrope, pieces)
    mrope.truncate(0)
    assert mrope._context.vision is not None
    monkeypatch.setattr(mrope._context.vision, "_encoded", None)
    assert np.array_equal(read(mrope, pieces), expected)


def test_steps_leave_threads_to_what_encodes(
    mrope: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams = Teams(4, lambda _: (0.0, 0.0, 0.0), lambda: 0)
    monkeypatch.setattr("edgespec.backends.llama.vision.TEAMS", teams)
    seen, vision = [], mrope._context.vision
    assert vision is not None
    encode = vision._lib.mtmd_encode_chunk

    def watched(*given: Any) -> int:
        seen.append(teams.enter(4))
        teams.leave()
        return int(encode(*given))

    monkeypatch.setattr(vision._lib, "mtmd_encode_chunk", watched)
    read(mrope, prompt(mrope, [*shown(1), "a"]))
    assert seen == [2] and teams.enter(4) == 4


def planned(projector: Projector, most: int | None = None) -> dict[str, int]:
    return {one.name: one.nbytes for one in projector_parts(projector, most, on_gpu=False)}


def projector_of(backend: LlamaBackend) -> Path:
    path = backend.settings.projector
    assert path is not None
    return path


@pytest.mark.parametrize("most", [8, None])
def test_buffers_are_planned(backend: LlamaBackend, most: int | None) -> None:
    """Without a load, to the byte; larger ones of larger images are a ceiling."""
    projector = read_projector(projector_of(backend))
    parts, before = planned(projector, most), backend.memory_bytes()
    names = "projector", "projector_compute"
    assert [parts[name] for name in names] == [before[name] for name in names]
    assert before["projector"] == projector.weight_bytes and before["projector_work"] == 0
    read(backend, prompt(backend, [*shown(3), "?"]))
    after = backend.memory_bytes()
    assert all(parts[name] >= size for name, size in after.items() if name in parts)


def test_what_libmtmd_cannot_be_asked_is_estimated(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.backends.llama.simulator._INIT", "gone")
    projector = read_projector(projector_of(backend))

    def refuse(*_: Any, **__: Any) -> None:
        raise BackendError("there is no such function")

    monkeypatch.setattr("edgespec.memory.bytes.projector.simulated_projector", refuse)
    found = backend.memory_bytes()["projector_compute"]
    assert planned(projector)["projector_compute"] >= found


# As `clip_model_loader::warmup` of llama.cpp 0.3.36 lays buffers out for images of these sizes.
LAID_OUT = [  # name, and MiB at first and for images of so many patches
    ("qwen3vl-2b", 322.49, 8464, {16384: 624.25}),
    ("gemma3-4b", 121.25, 4096, {}),
    ("smolvlm2-500m", 21.0, 1024, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "first", "patches", "larger"), LAID_OUT)
def test_buffers_of_real_sizes_are_within_one_percent(
    tmp_path: Path,
    name: str,
    first: float,
    patches: int,
    larger: dict[int, float],
) -> None:
    """Of a projector with fewer layers, which take turns in the same buffers."""
    kind = REAL[name]._replace(layers=4, deep=(0, 1, 2))
    projector = read_projector(write_projector(tmp_path / "mmproj.gguf", kind))
    buffers = first_buffers(projector, None, on_gpu=False)
    assert (round(buffers.nbytes / 2**20, 2), buffers.patches) == (first, patches)
    for count, expected in larger.items():
        further = buffers.further_bytes(projector, count, on_gpu=True)
        assert (buffers.nbytes + further) / 2**20 == pytest.approx(expected, rel=0.01)


def test_an_image_for_a_model_that_is_closed_is_refused(vision_folder: Path) -> None:
    backend = open_backend(vision_folder, "llava")
    backend.close()
    with pytest.raises(UnsupportedError, match="the model is closed"):
        backend.image_pieces(shown(1)[0])


def test_photos_are_turned_upright(vision_folder: Path) -> None:
    """As a viewer shows them; the pixels of the file are the same."""
    backend = open_backend(vision_folder, "llava")
    vision = backend._context.vision
    assert vision is not None

    def pixels(data: bytes) -> Any:
        image = read_image(data)
        bitmap = vision._bitmap(image)
        found = vision._lib.mtmd_bitmap_get_data(bitmap)
        copy = np.ctypeslib.as_array(found, (image.height, image.width, 3)).copy()
        vision._lib.mtmd_bitmap_free(bitmap)
        return copy

    for turn in range(1, 9):
        shown = PIL.Image.fromarray(pixels(jpeg(40, 24)))
        shown.getexif()[0x0112] = turn
        expected = np.asarray(PIL.ImageOps.exif_transpose(shown))
        assert np.array_equal(pixels(jpeg(40, 24, turn=turn)), expected), turn
    assert np.isfinite(read(backend, prompt(backend, [read_image(jpeg(turn=6)), "?"]))).all()
    backend.close()
