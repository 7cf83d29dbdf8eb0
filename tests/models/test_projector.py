"""What a projector's file says, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_gguf import WIDTH
from vision_gguf import KINDS

from edgespec.errors import ModelFileError, ModelNotFoundError, UnsupportedError
from edgespec.models.projector import projector_beside, read_projector


@pytest.mark.parametrize(
    ("name", "tokens", "first", "pieces", "is_causal"),
    [
        ("gemma3", 16, 0, 1, False),
        ("qwen2.5vl", 4096, 2116, 1, True),
        ("qwen3vl", 4096, 2116, 1, True),
        ("idefics3", 16, 0, 5, True),
        ("llava", 64, 0, 1, True),
        ("pixtral", 1024, 256, 1, True),
        ("internvl", 16, 0, 5, True),
    ],
)
def test_sizes_of_images(
    vision_folder: Path, name: str, tokens: int, first: int, pieces: int, is_causal: bool
) -> None:
    found = read_projector(vision_folder / f"mmproj-{name}.gguf")
    assert (found.tokens(None), found.pieces, found.is_causal) == (tokens, pieces, is_causal)
    assert found.tokens(100) == (tokens if tokens < 100 else 100)
    assert found.patches(None) == tokens * KINDS[name].merge ** 2
    assert found.first_patches(8) == (first or found.tokens(8)) * KINDS[name].merge ** 2
    assert found.output == WIDTH * (3 if name == "qwen3vl" else 1)
    assert found.weight_bytes < found.path.stat().st_size


def test_other_files_are_refused(vision_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is no projector for images") as problem:
        read_projector(vision_folder / "llava.gguf")
    assert "--mmproj" in problem.value.hint
    with pytest.raises(ModelNotFoundError):
        read_projector(tmp_path / "mmproj.gguf")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ModelFileError):
        read_projector(tmp_path / "text")


def test_kinds_that_are_not_read(vision_folder: Path, tmp_path: Path) -> None:
    data = (vision_folder / "mmproj-qwen2.5vl.gguf").read_bytes()
    for kind in ("hunyuanvl",):
        changed = tmp_path / f"{kind}.gguf"
        old = b"qwen2.5vl_merger"
        text = kind.encode()
        head, _, tail = data.partition(len(old).to_bytes(8, "little") + old)
        changed.write_bytes(head + len(text).to_bytes(8, "little") + text + tail)
        with pytest.raises((UnsupportedError, ModelFileError)):
            read_projector(changed)


BESIDE = [  # the files of a folder, a model, and its projector
    ("model.gguf", "model.gguf", None),
    ("model.gguf mmproj-F16.gguf", "model.gguf", "mmproj-F16.gguf"),
    ("model.gguf mmproj-F32.gguf mmproj-BF16.gguf", "model.gguf", "mmproj-BF16.gguf"),
    ("a-Q4_K_M.gguf mmproj-of-another-f16.gguf", "a-Q4_K_M.gguf", "mmproj-of-another-f16.gguf"),
    ("a.gguf b.gguf mmproj-c.gguf", "a.gguf", None),
    ("a.gguf b.gguf mmproj-model-f16.gguf", "a.gguf", "mmproj-model-f16.gguf"),
    ("a.gguf mmproj-b.gguf mmproj-c.gguf", "a.gguf", None),
    (
        "gemma-3-4b-it-Q4_0.gguf Qwen3-VL-2B-UD-Q4_K_XL.gguf mmproj-gemma-3-4b-it-f16.gguf "
        "Qwen3-VL-2B.mmproj-Q8_0.gguf",
        "Qwen3-VL-2B-UD-Q4_K_XL.gguf",
        "Qwen3-VL-2B.mmproj-Q8_0.gguf",
    ),
    (
        "big-Q8_0-00001-of-00002.gguf c.gguf mmproj-big.gguf",
        "big-Q8_0-00001-of-00002.gguf",
        "mmproj-big.gguf",
    ),
]


@pytest.mark.parametrize(("files", "model", "expected"), BESIDE)
def test_the_one_beside_a_model_is_found(
    tmp_path: Path, files: str, model: str, expected: str | None
) -> None:
    for name in files.split():
        (tmp_path / name).write_bytes(bytes(9 if "F32" in name else 5))
    found = projector_beside(tmp_path / model)
    assert (found and found.name) == expected


def test_a_projector_fits_models_of_its_width(vision_folder: Path) -> None:
    for name in KINDS:
        found = read_projector(vision_folder / f"mmproj-{name}.gguf")
        assert found.fits(WIDTH) and not found.fits(WIDTH + 10)
