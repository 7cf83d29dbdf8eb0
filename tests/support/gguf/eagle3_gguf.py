"""EAGLE-3 heads in files of their own, for targets that `hybrid_gguf` has written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hybrid_gguf import Shape, attention, feed_forward, usual_keys
from random_gguf import Q8_0, finish, floats
from written_gguf import add_tensor, add_vocabulary, begun

from edgespec.models.spec import read_model_spec

LAYERS = (1, 2, 3)  # of a target with four


@dataclass(frozen=True)
class Head:
    """How a head is made; `ids` are the tokens of its own vocabulary, None being the target's."""

    layers: tuple[int, ...] = LAYERS
    width: int | None = None  # of its rows; the target's unless it has tables of its own
    ids: tuple[int, ...] | None = None
    has_table: bool = False
    has_output: bool = True
    norms_before_fc: bool = False
    keeps_normed: bool = True  # else what it adds grows with what it knows
    heads: int = 2
    kv_heads: int = 2
    head: int = 32
    hidden: int = 128

    def shape(self, target: Shape) -> Shape:
        """Its own block, for a target."""
        sizes = self.hidden, target.vocabulary, self.heads, self.kv_heads, self.head
        return Shape("llama", 1, self.width or target.width, *sizes)


def _shapes(target: Shape, made: Head) -> dict[str, tuple[int, ...]]:
    """Attention reads an embedding and a state of the target."""
    shape, read = made.shape(target), len(made.layers) * target.width
    width, tokens = shape.width, target.vocabulary if made.ids is None else len(made.ids)
    block = attention(replace(shape, width=2 * width), norms=False) | feed_forward(shape)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, read),
        "output_norm.weight": (width,),
    }
    shapes |= {f"blk.0.{name}": size for name, (size, _) in block.items()}
    shapes["blk.0.attn_output.weight"] = (width, made.heads * made.head)
    shapes |= {
        f"blk.0.{name}.weight": (width,) for name in ("attn_norm", "attn_norm_2", "ffn_norm")
    }
    if made.norms_before_fc:
        shapes["enc.output_norm.weight"] = (read,)
    if made.has_table:
        shapes["token_embd.weight"] = (target.vocabulary, width)
    if made.has_output:
        shapes["output.weight"] = (tokens, width)
    return shapes


def _keys(target: Shape, made: Head) -> dict[str, Any]:
    return usual_keys(made.shape(target)) | {
        "target_layers": list(made.layers),
        "target_hidden_size": target.width,
        "norm_before_residual": made.keeps_normed,
        "norm_before_fc": made.norms_before_fc,
    }


def write_eagle(
    path: Path, target: Path, shape: Shape, made: Head, kind: Any = Q8_0, *, knows: bool = False
) -> Path:
    """Random weights; one that `knows` is right where its target looks at the last token alone.

    It then attends to tokens like the one it is fed, and shows them to the target's own head.
    """
    source, spec = np.random.default_rng(7), read_model_spec(target)
    ids = range(shape.vocabulary) if made.ids is None else made.ids
    writer = begun(path, "eagle3", _keys(shape, made))
    add_vocabulary(writer, shape.vocabulary)
    if made.ids is not None:
        writer.add_tensor("d2t", np.array(made.ids, np.int64))
    for name, size in _shapes(shape, made).items():
        data = np.ones(size) if len(size) == 1 else source.normal(0.0, size[-1] ** -0.5, size)
        if name in ("token_embd.weight", "output.weight"):  # the target's, in a wider row or not
            rows = floats(spec, name)
            rows = rows[list(ids)] if name == "output.weight" else rows
            data = np.pad(rows, ((0, 0), (0, size[1] - shape.width)))
        elif knows:
            data = _knowing(name, data)
        add_tensor(writer, name, data, kind)
    finish(writer)
    return path


def _knowing(name: str, data: Any) -> Any:
    if "attn_q." in name or "attn_k." in name:
        return 3.0 * np.eye(*data.shape)
    if "attn_v." in name:
        return np.eye(*data.shape)
    if "attn_output." in name:
        return 50.0 * np.eye(*data.shape)
    return data
