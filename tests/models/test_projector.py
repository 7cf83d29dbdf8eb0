"""What a projector's file says, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from vision_gguf import KINDS

from edgespec.errors import ModelFileError, ModelNotFoundError, UnsupportedError
from edgespec.models.projector import projector_beside, read_projector


@pytest.mark.parametrize(
    ("name", "tokens", "pieces", "is_causal"),
    [
        ("gemma3", 16, 1, False),
        ("qwen2.5vl", 4096, 1, True),
        ("qwen3vl", 4096, 1, True),
        ("idefics3", 16, 5, True),
        ("llava", 64, 1, True),
        ("pixtral", 1024, 1, True),
        ("internvl", 16, 5, True),
    ],
)
def test_sizes_of_images(
    vision_folder: Path, name: str, tokens: int, pieces: int, is_causal: bool
) -> None:
    found = read_projector(vision_folder / f"mmproj-{name}.gguf")
    assert (found.tokens(None), found.pieces, found.is_causal) == (tokens, pieces, is_causal)
    assert found.tokens(100) == (tokens if tokens < 100 else 100)
    assert found.patches(None) == tokens * KINDS[name].merge ** 2
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


def test_the_one_beside_a_model_is_found(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    assert projector_beside(model) is None
    (tmp_path / "mmproj-F16.gguf").touch()
    assert projector_beside(model) == tmp_path / "mmproj-F16.gguf"
    (tmp_path / "mmproj-F32.gguf").touch()
    assert projector_beside(model) is None
