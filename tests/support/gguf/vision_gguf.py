"""Tiny models that see, with random weights: a text model, its projector, and pictures for them."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import PIL.Image
from random_gguf import F16, F32, WIDTH, finish, write_model
from written_gguf import begun

# A picture's place in a message is what somebody's words have: templates need not know of it.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_CHAT = ("<|start|>", "<|end|>")
_PLACES = range(1, 5)
_GRID = tuple(f"<row_{row}_col_{column}>" for row in _PLACES for column in _PLACES)


class Kind(NamedTuple):
    """How one family of models sees."""

    projector: str
    arch: str
    controls: tuple[str, ...]
    size: int  # of an image's side, or the largest
    merge: int = 1
    integers: dict[str, int] = {}  # noqa: RUF012 - of a NamedTuple
    inner: int = 32
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    patch: int = 14
    deep: tuple[int, ...] = (0, 1)  # layers whose values Qwen3-VL's text model gets, too
    width: int = WIDTH  # of the text model
    weights: Any = F32  # of the projector's matrices


KINDS = {
    "gemma3": Kind("gemma3", "gemma3", ("<start_of_image>", "<end_of_image>"), 224, 4),
    "qwen2.5vl": Kind(
        "qwen2.5vl_merger",
        "qwen2vl",
        ("<|vision_start|>", "<|vision_end|>"),
        224,
        2,
        {"n_wa_pattern": 2, "spatial_merge_size": 2},
    ),
    "qwen3vl": Kind(
        "qwen3vl_merger",
        "qwen3vl",
        ("<|vision_start|>", "<|vision_end|>"),
        224,
        2,
        {"spatial_merge_size": 2},
    ),
    "idefics3": Kind(
        "idefics3",
        "llama",
        ("\n\n", "<fake_token_around_image>", "<global-img>", *_GRID),
        112,
        2,
        {"preproc_image_size": 224},
    ),
    "llava": Kind("mlp", "llama", (), 112),
    "pixtral": Kind("pixtral", "llama", ("[IMG_END]",), 224),
    "internvl": Kind("internvl", "qwen2", ("<img>", "</img>"), 112, 2, {"preproc_max_tiles": 4}),
}
# Sizes of projectors that people have; their text models are as tiny, but for their width.
REAL = {
    "gemma3-4b": KINDS["gemma3"]._replace(
        size=896, inner=1152, hidden=4304, layers=27, heads=16, width=2560, weights=F16
    ),
    "qwen3vl-2b": KINDS["qwen3vl"]._replace(
        size=768,
        inner=1024,
        hidden=4096,
        layers=24,
        heads=16,
        patch=16,
        deep=(5, 11, 17),
        width=2048,
        weights=F16,
    ),
    "smolvlm2-500m": KINDS["idefics3"]._replace(
        size=512,
        merge=4,
        integers={"preproc_image_size": 2048},
        inner=768,
        hidden=3072,
        layers=12,
        heads=12,
        patch=16,
        width=960,
        weights=F16,
    ),
}


def write_vision(folder: Path, name: str, seed: int = 7, weights: Any = F32) -> tuple[Path, Path]:
    """A text model of one of the `KINDS` that reads bytes, and its projector beside it.

    Or of one of the `REAL` sizes.
    """
    kind = KINDS.get(name) or REAL[name]
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(
        folder / f"{name}.gguf",
        kind.arch,
        weights,
        seed,
        reads_bytes=True,
        controls=(*_CHAT, *kind.controls),
        template=TEMPLATE,
        width=kind.width,
        deepstack=len(kind.deep),
    )
    return model, write_projector(folder / f"mmproj-{name}.gguf", kind, seed)


def write_projector(path: Path, kind: Kind, seed: int = 7) -> Path:
    """A projector of a kind, with random weights."""
    source = np.random.default_rng(seed)
    keys = {
        "embedding_length": kind.inner,
        "attention.head_count": kind.heads,
        "feed_forward_length": kind.hidden,
        "block_count": kind.layers,
        "projection_dim": kind.width,
        "image_size": kind.size,
        "patch_size": kind.patch,
        "projector.scale_factor": kind.merge,
        **kind.integers,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    writer = begun_clip(path, kind.projector, "vision", keys)
    writer.add_bool("clip.use_gelu", True)
    for tensor, shape in _shapes(kind).items():
        is_norm = tensor.endswith("norm.weight") or "ln" in tensor.split(".")[-2]
        is_matrix = len(shape) == 2 and "embd" not in tensor
        data = clip_values(source, tensor, shape, is_norm=is_norm)
        data = gguf.quants.quantize(data, kind.weights if is_matrix else F32)
        writer.add_tensor(tensor, data)
    finish(writer)
    return path


def begun_clip(path: Path, projector: str, sense: str, keys: dict[str, Any]) -> Any:
    """A projector's file for "vision" or "audio"."""
    writer = begun(path, "clip", {f"{sense}.{key}": value for key, value in keys.items()})
    writer.add_bool(f"clip.has_{sense}_encoder", True)
    writer.add_string("clip.projector_type", projector)
    return writer


def clip_values(source: Any, tensor: str, shape: tuple[int, ...], *, is_norm: bool) -> Any:
    """Random ones, such that what is seen or heard changes what is written."""
    values = source.normal(0.0, max(1, shape[-1]) ** -0.5, shape)
    if is_norm:
        values = source.uniform(0.5, 1.5, shape)
    if tensor.startswith("mm.") and len(shape) == 2:
        values *= 4
    return values.astype(np.float32)


def _shapes(kind: Kind) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as numpy has them, of all tensors of a projector."""
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (kind.inner, 3, kind.patch, kind.patch)
    }
    patches = (kind.size // kind.patch) ** 2
    is_qwen3, is_qwen = kind.projector == "qwen3vl_merger", "qwen" in kind.projector
    if is_qwen:
        shapes["v.patch_embd.weight.1"] = shapes["v.patch_embd.weight"]
    if kind.projector in ("mlp", "internvl"):
        shapes["v.class_embd"] = (kind.inner,)
        patches += 1
    if kind.projector in ("gemma3", "idefics3", "mlp", "internvl", "qwen3vl_merger"):
        shapes["v.position_embd.weight"] = (patches, kind.inner)
        if kind.projector != "mlp":
            shapes["v.patch_embd.bias"] = (kind.inner,)
    shapes |= {f"v.post_ln.{part}": (kind.inner,) for part in ("weight", "bias")}
    for layer in range(kind.layers):
        block = f"v.blk.{layer}."
        for tensor, rows, columns in (
            *(
                (("attn_qkv", 3 * kind.inner, kind.inner),)
                if is_qwen3
                else tuple((f"attn_{one}", kind.inner, kind.inner) for one in "qkv")
            ),
            ("attn_out", kind.inner, kind.inner),
            ("ffn_up", kind.hidden, kind.inner),
            ("ffn_down", kind.inner, kind.hidden),
            *(
                (("ffn_gate", kind.hidden, kind.inner),)
                if kind.projector == "qwen2.5vl_merger"
                else ()
            ),
        ):
            shapes[f"{block}{tensor}.weight"] = (rows, columns)
            shapes[f"{block}{tensor}.bias"] = (rows,)
        for part in ("weight", "bias"):
            shapes |= {f"{block}{norm}.{part}": (kind.inner,) for norm in ("ln1", "ln2")}
    return shapes | _projection(kind)


def _projection(kind: Kind) -> dict[str, tuple[int, ...]]:
    merged = kind.inner * kind.merge**2
    if kind.projector == "gemma3":
        return {
            "mm.input_projection.weight": (kind.inner, kind.width),
            "mm.soft_emb_norm.weight": (kind.inner,),
        }
    if kind.projector == "idefics3":
        return {"mm.model.fc.weight": (kind.width, merged)}
    if kind.projector == "internvl":
        return {
            **{f"mm.model.mlp.0.{part}": (merged,) for part in ("weight", "bias")},
            **_linear("mm.model.mlp.1", kind.width, merged),
            **_linear("mm.model.mlp.3", kind.width, kind.width),
        }
    if kind.projector == "pixtral":
        both = _linear("mm.1", kind.width, kind.inner) | _linear("mm.2", kind.width, kind.width)
        return both | {"v.token_embd.img_break": (kind.width,)}
    if kind.projector == "mlp":
        return _linear("mm.0", kind.width, kind.inner) | _linear("mm.2", kind.width, kind.width)
    found = _linear("mm.0", merged, merged) | _linear("mm.2", kind.width, merged)
    if kind.projector == "qwen3vl_merger":
        for layer in kind.deep:
            found |= {f"v.deepstack.{layer}.norm.{part}": (merged,) for part in ("weight", "bias")}
            found |= _linear(f"v.deepstack.{layer}.fc1", merged, merged)
            found |= _linear(f"v.deepstack.{layer}.fc2", kind.width, merged)
    return found


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


# -- pictures ------------------------------------------------------------------------------


def picture(seed: int, width: int = 96, height: int = 64) -> Any:
    """Coloured stripes and noise, [height, width, 3] of bytes, another one for each seed."""
    source = np.random.default_rng(seed)
    stripes = np.sin(np.arange(width) / source.uniform(2, 9))[None, :, None]
    values = (
        128 + 90 * stripes * source.uniform(-1, 1, 3) + source.normal(0, 20, (height, width, 3))
    )
    return values.clip(0, 255).astype(np.uint8)


def png(pixels: Any) -> bytes:
    """A PNG file of [height, width, 3] of bytes."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    return png_of(width, height, zlib.compress(rows))


def png_of(width: int, height: int, data: bytes) -> bytes:
    """A PNG file that says it has this size, whatever its data are."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", head), chunk(b"IDAT", data), chunk(b"IEND", b""))
    )


def bmp(pixels: Any) -> bytes:
    """A BMP file of [height, width, 3] of bytes."""
    height, width, _ = pixels.shape
    pad = b"\0" * (-3 * width % 4)
    data = b"".join(row[:, ::-1].tobytes() + pad for row in pixels[::-1])
    head = struct.pack("<2sIHHI", b"BM", 54 + len(data), 0, 0, 54)
    head += struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(data), 0, 0, 0, 0)
    return head + data


def jpeg(width: int = 16, height: int = 8, *, progressive: bool = False, turn: int = 1) -> bytes:
    """A JPEG file; `turn` is how EXIF says that it is shown, as phones write it: 6 on its side."""
    made, about = io.BytesIO(), PIL.Image.Exif()
    if turn != 1:
        about[0x0112] = turn
    image = PIL.Image.fromarray(picture(5, width, height))
    image.save(made, "JPEG", progressive=progressive, exif=about)
    return made.getvalue()


def images(count: int, first: int = 1) -> list[bytes]:
    """PNG files, each another picture of another shape."""
    shapes = ((96, 64), (64, 96), (80, 80), (200, 40), (40, 120))
    return [png(picture(first + i, *shapes[(first + i) % len(shapes)])) for i in range(count)]


_WORDS = (b"\0\0", b"\xff\xff", b"\x7f\xff", b"\x00\x01", b"\x80\x00")


def mutated(data: bytes, source: random.Random) -> bytes:
    """The same with some bytes changed, left out, repeated or put in; more of them at the front."""
    made = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        most = source.choice((32, 128, len(made)))
        place = source.randrange(max(1, min(most, len(made))))
        match source.randrange(6):
            case 0:
                made[place : place + 1] = bytes([source.randrange(256)])
            case 1:
                made[place : place + 2] = source.choice(_WORDS)
            case 2:
                made[place : place + 4] = struct.pack(
                    source.choice("<>") + "I", source.choice((0, 1, 4096, 1 << 16, (1 << 32) - 1))
                )
            case 3:
                del made[place : place + source.choice((1, 4, 100))]
            case 4:
                made[place:place] = made[place : place + source.choice((1, 4, 100))]
            case _:
                del made[max(1, place) :]
    return bytes(made)
