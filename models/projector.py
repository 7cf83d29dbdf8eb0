"""The file of a projector, the part of a model that sees, and what it says about itself."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.gguf.reader import Gguf, read_gguf

_NOT_READ = ("hunyuanvl",)  # whose positions depend on how many images come before


def read_projector(path: Path) -> Gguf:
    """The metadata of a projector.

    Raises ModelNotFoundError, ModelFileError for another file, and UnsupportedError for a kind that
    is not supported.
    """
    file = read_gguf(path)
    if file.text("general.architecture") != "clip":
        raise ModelFileError(
            f"{path.name} is no projector for images",
            hint="--mmproj names the mmproj file of the model",
        )
    if file.metadata.get("clip.has_vision_encoder") is not True:
        raise UnsupportedError(f"{path.name} has no part that sees images")
    kind = projector_kind(file)
    if kind in _NOT_READ:
        raise UnsupportedError(f"projectors of the kind {kind} are not supported")
    return file


def projector_kind(file: Gguf) -> str:
    """How llama.cpp calls it, such as "gemma3"."""
    return file.text("clip.projector_type") or file.text("clip.vision.projector_type")


def projector_beside(model: Path) -> Path | None:
    """The one file `mmproj*.gguf` in the folder of a model; None without, or with several."""
    if not model.is_file() or model.name.startswith("mmproj"):
        return None
    found = [one for one in model.parent.glob("mmproj*.gguf") if one.is_file()]
    return found[0] if len(found) == 1 else None
