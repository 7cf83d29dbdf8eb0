"""The file of a projector, the part of a model that sees or hears, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.gguf.reader import Gguf, read_gguf
from edgespec.models.hub.choice import PROJECTOR, is_model, read_name

_NOT_READ = ("hunyuanvl",)  # whose positions depend on how many images come before
# Whose images see all of themselves (`llama.cpp: mtmd_decode_use_non_causal`).
_SEES_ITSELF = ("gemma3", "gemma4v", "gemma4uv", "deepseek4v")
# Most tokens of an image where its size is not fixed, and of the one that libmtmd makes its buffers
# for when it is loaded, whatever an image may have; 0 is one of the most that it may have
# (`llama.cpp: tools/mtmd/clip.cpp`).
_TOKENS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"), (4096, 46**2)),
    **dict.fromkeys(("ling3vl", "glm4v"), (4096, 46**2)),
    **{"pixtral": (1024, 256), "gemma4v": (1120, 256), "gemma4uv": (1120, 256), "lfm2": (256, 0)},
    **{"kimivl": (1024, 256), "kimik25": (4096, 0), "minimax_m3": (576, 256)},
    **{"muse-glimmer": (4096, 1024), "youtuvl": (62500, 256)},
}
_BETWEEN = 8
# Positions that an encoder of the kind of Whisper has for the 30 seconds it hears at once, and most
# tokens that a projector makes of them without stacking.
_POSITIONS, _HEARD = 1500, 750
# Bytes of a value that is multiplied with weights of a type (`ggml-cpu: type_traits_cpu`), which is
# one of Q8_K for others; Q8_0's are fewer.
_REWRITTEN, _BLOCKS = {"F32": 0.0, "F16": 2.0, "BF16": 2.0}, 292 / 256
_MERGES = {"gemma3": 4, **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger"), 2)}  # by default
_TYPE = re.compile(r"[-_.](ud-)?(i?q\d\w*|tq\d\w*|mxfp4\w*|bf16|fp?16|fp?32)(?=$|[-.])")
_NO_NAMES = ("", PROJECTOR, "model")


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
    sees: bool = True
    hears: bool = False

    @property
    def path(self) -> Path:
        """Its file."""
        return self.file.path

    @property
    def weight_bytes(self) -> int:
        """All of it."""
        return sum(tensor.data_bytes for tensor in self.file.tensors)

    @property
    def modalities(self) -> dict[str, bool]:
        """What it takes, by the names of the interfaces."""
        return {"vision": self.sees, "audio": self.hears}

    def fits(self, width: int) -> bool:
        """Whether it may be of a model whose embeddings have this width."""
        own = (one.dims for one in self.file.tensors if not one.name.startswith(("v.blk", "a.blk")))
        return any(width in dims for dims in own)

    @property
    def is_causal(self) -> bool:
        """Whether tokens of an image see those before them alone."""
        return self.kind not in _SEES_ITSELF

    def tokens(self, most: int | None) -> int:
        """Of the largest image that is encoded at once, where at most `most` are allowed."""
        fixed = max(1, self.image_size // self.patch_size // self.merge) ** 2
        limit, _ = _TOKENS.get(self.kind, (None, 0))
        return fixed if limit is None else min(limit, most or limit)

    def cells(self, most: int | None) -> int:
        """A ceiling of the cells that an image takes, with what stands between its pieces."""
        return self.pieces * (self.tokens(most) + _BETWEEN) + _BETWEEN

    def sound_cells(self, seconds: float) -> int:
        """A ceiling of the cells that a sound takes."""
        stack = self.file.integer("clip.audio.projector.stack_factor", 0)
        of_piece = -(-_POSITIONS // stack) if stack else _HEARD
        return (int(seconds // 30) + 1) * (of_piece + _BETWEEN)

    def patches(self, most: int | None) -> int:
        """Of the same image."""
        return self.patches_of(self.tokens(most))

    def patches_of(self, tokens: int) -> int:
        """Of an image of so many tokens, or positions of a sound."""
        return tokens * self.merge**2 if self.sees else _POSITIONS

    def first_patches(self, most: int | None) -> int:
        """Of the image that libmtmd makes its buffers for when it is loaded."""
        _, first = _TOKENS.get(self.kind, (None, 0))
        return first * self.merge**2 if first and self.sees else self.patches(most)

    @property
    def output(self) -> int:
        """Values of a token's embedding, with those of layers that the text model gets, too."""
        names = (one.name for one in self.file.tensors if one.name.startswith("v.deepstack."))
        deep = {name.split(".")[2] for name in names}
        part = "vision" if self.sees else "audio"
        return (1 + len(deep)) * self.file.integer(f"clip.{part}.projection_dim", self.width)

    @property
    def rewritten_bytes(self) -> int:
        """Of a patch's values in the type that weights are multiplied with, at most."""
        own = (one for one in self.file.tensors if one.name.startswith(("v.blk.", "a.blk.")))
        sizes = (int(_REWRITTEN.get(one.type.name, _BLOCKS) * one.dims[0]) for one in own)
        return max(sizes, default=0)


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
    sees, hears = (
        file.metadata.get(f"clip.has_{one}_encoder") is True for one in ("vision", "audio")
    )
    if not sees and not hears:
        raise UnsupportedError(f"{path.name} has no part that sees images or hears sounds")
    if hears and _ends_the_process(file):
        hears = False
        if not sees:
            raise UnsupportedError(
                f"{path.name} has sizes for sounds that llama.cpp cannot compute"
            )
    part = "vision" if sees else "audio"
    kind = file.text("clip.projector_type") or file.text(f"clip.{part}.projector_type")
    if kind in _NOT_READ:
        raise UnsupportedError(f"projectors of the kind {kind} are not supported")

    def value(name: str, default: int | None = None) -> int:
        return file.integer(f"clip.{part}.{name}", default)

    width, hidden = value("embedding_length"), value("feed_forward_length")
    if not sees:
        return Projector(
            file, kind, 1, 1, 1, width, hidden, 0, windows=False, sees=False, hears=True
        )
    merge = value("spatial_merge_size", value("projector.scale_factor", _MERGES.get(kind, 1)))
    sizes = value("image_size"), value("patch_size"), merge
    if min(sizes) < 1 or max(sizes) > 1 << 16:
        raise ModelFileError(f"{path.name} is damaged: its images have no size")
    windows = "clip.vision.n_wa_pattern" in file.metadata
    pieces = 1
    if kind == "internvl":
        pieces += min(value("preproc_max_tiles", 12), 64)
    elif kind == "idefics3":
        pieces += min(-(-value("preproc_image_size", sizes[0]) // sizes[0]), 16) ** 2
    return Projector(file, kind, *sizes, width, hidden, pieces, windows, hears=hears)


def _ends_the_process(file: Gguf) -> bool:
    """Whether llama.cpp counts a sound's tokens other than it makes them, and aborts.

    It rounds the rows that it joins by a mask, as if their values were a power of two: Ultravox's
    1280 values in 8 rows come out as counted, and 1024 do not (`clip_n_output_tokens` and
    `build_stack` of clip.cpp).
    """
    stack = file.integer("clip.audio.projector.stack_factor", 0)
    if stack < 2:
        return False
    width = file.integer("clip.audio.embedding_length")
    joined = width * stack
    made = ((_POSITIONS * width + joined - 1) & ~(joined - 1)) // joined
    return made != -(-2 * _POSITIONS // stack) // 2


def projector_beside(model: Path) -> Path | None:
    """The projector in the folder of a model, by the names of both; None where that says nothing.

    Of several types of one projector the smallest file is taken.
    """
    files = [one for one in model.parent.glob("*.gguf") if one.is_file()]
    found = [one for one in files if is_projector(one.name)]
    name, names = _name(model), {one: _name(one) for one in found}
    begins = {one: name.startswith(its) or its.startswith(name) for one, its in names.items()}
    own = [one for one in found if names[one] and begins[one]]
    if not own:
        is_alone = sum(is_model(one.name) for one in files) < 2
        own = [one for one in found if is_alone or not names[one]]
        own = own if len({names[one] for one in own}) == 1 else []
    return min(own, key=lambda one: (-len(names[one]), one.stat().st_size, one.name), default=None)


def is_projector(name: str) -> bool:
    """Whether a file is called as projectors are."""
    return PROJECTOR in name.lower()


def _name(path: Path) -> str:
    """What a file is called, without its type.

    >>> _name(Path("mmproj-Tiny_VL-2B-Q8_0.gguf")), _name(Path("mmproj-model-f16.gguf"))
    ('tiny-vl-2b', '')
    """
    text = _TYPE.sub("", read_name(path.name).prefix.lower())
    return "-".join(word for word in re.split("[-_. ]+", text) if word not in _NO_NAMES)
