"""The file of a projector, the part of a model that sees, and what it says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.gguf.reader import Gguf, read_gguf

_NOT_READ = ("hunyuanvl",)  # whose positions depend on how many images come before
# Whose images see all of themselves (`llama.cpp: mtmd_decode_use_non_causal`).
_SEES_ITSELF = ("gemma3", "gemma4v", "gemma4uv", "deepseek4v")
# Most tokens of an image where its size is not fixed (`llama.cpp: tools/mtmd/clip.cpp`).
_MOST_TOKENS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"), 4096),
    **{"pixtral": 1024, "gemma4v": 1120, "gemma4uv": 1120, "lfm2": 256, "kimivl": 1024},
}
_BETWEEN = 8
_MERGES = {"gemma3": 4, **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger"), 2)}  # by default


@dataclass(frozen=True, slots=True)
class Projector:
    """A projector; sizes are in values, of one image and its patches."""

    file: Gguf
    kind: str  # as llama.cpp calls it, such as "gemma3"
    image_size: int
    patch_size: int
    merge: int  # patches of a token, by each side
    width: int
    hidden: int
    pieces: int  # of an image, of which each is encoded by itself
    windows: bool  # whether some layers look at windows, by a mask over all pairs of patches

    @property
    def path(self) -> Path:
        """Its file."""
        return self.file.path

    @property
    def weight_bytes(self) -> int:
        """All of it."""
        return sum(tensor.data_bytes for tensor in self.file.tensors)

    @property
    def is_causal(self) -> bool:
        """Whether tokens of an image see those before them alone."""
        return self.kind not in _SEES_ITSELF

    def tokens(self, most: int | None) -> int:
        """Of the largest image that is encoded at once, where at most `most` are allowed."""
        fixed = max(1, self.image_size // self.patch_size // self.merge) ** 2
        limit = _MOST_TOKENS.get(self.kind)
        return fixed if limit is None else min(limit, most or limit)

    def cells(self, most: int | None) -> int:
        """A ceiling of the cells that an image takes, with what stands between its pieces."""
        return self.pieces * (self.tokens(most) + _BETWEEN) + _BETWEEN

    def patches(self, most: int | None) -> int:
        """Of the same image."""
        return self.tokens(most) * self.merge**2


@cache
def read_projector(path: Path) -> Projector:
    """What a projector's file says.

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
    kind = file.text("clip.projector_type") or file.text("clip.vision.projector_type")
    if kind in _NOT_READ:
        raise UnsupportedError(f"projectors of the kind {kind} are not supported")

    def value(name: str, default: int | None = None) -> int:
        return file.integer(f"clip.vision.{name}", default)

    merge = value("spatial_merge_size", value("projector.scale_factor", _MERGES.get(kind, 1)))
    sizes = value("image_size"), value("patch_size"), merge
    if min(sizes) < 1 or max(sizes) > 1 << 16:
        raise ModelFileError(f"{path.name} is damaged: its images have no size")
    windows = "clip.vision.n_wa_pattern" in file.metadata
    width, hidden = value("embedding_length"), value("feed_forward_length")
    pieces = 1
    if kind == "internvl":
        pieces += min(value("preproc_max_tiles", 12), 64)
    elif kind == "idefics3":
        pieces += min(-(-value("preproc_image_size", sizes[0]) // sizes[0]), 16) ** 2
    return Projector(file, kind, *sizes, width, hidden, pieces, windows)


def projector_beside(model: Path) -> Path | None:
    """The one file `mmproj*.gguf` in the folder of a model; None without, or with several."""
    found = [one for one in model.parent.glob("mmproj*.gguf") if one.is_file()]
    return found[0] if len(found) == 1 else None
