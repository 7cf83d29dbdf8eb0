"""DFlash heads in files of their own, for targets that `hybrid_gguf` has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hybrid_gguf import Shape, attention, feed_forward, usual_keys
from random_gguf import Q8_0, finish, floats
from written_gguf import add_tensor, add_vocabulary, begun

from edgespec.models.spec import read_model_spec


@dataclass(frozen=True)
class DFlash:
    """How a head is made; `ids` are the tokens of its own vocabulary, None being the target's."""

    reads: tuple[int, ...] = (1, 3)
    layers: int = 2
    ids: tuple[int, ...] | None = None
    has_tables: bool = False
    block: int = 5
    is_causal: bool | None = False  # None: its file does not say
    heads: int = 2
    kv_heads: int = 2
    head: int = 32
    hidden: int = 128

    def shape(self, target: Shape) -> Shape:
        """Its own blocks, for a target."""
        sizes = self.hidden, target.vocabulary, self.heads, self.kv_heads, self.head
        return Shape("qwen3", self.layers, target.width, *sizes)


def _shapes(target: Shape, made: DFlash) -> dict[str, tuple[int, ...]]:
    width, shape = target.width, made.shape(target)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(made.reads) * width),
        "enc.output_norm.weight": (width,),
        "output_norm.weight": (width,),
    }
    block = {name: size for name, (size, _) in (attention(shape) | feed_forward(shape)).items()}
    block |= {f"{name}_norm.weight": (width,) for name in ("attn", "ffn")}
    for layer in range(made.layers):
        shapes |= {f"blk.{layer}.{name}": size for name, size in block.items()}
    if made.has_tables:
        shapes["token_embd.weight"] = (target.vocabulary, width)
    if made.has_tables or made.ids is not None:
        tokens = target.vocabulary if made.ids is None else len(made.ids)
        shapes["output.weight"] = (tokens, width)
    return shapes


def _keys(target: Shape, made: DFlash) -> dict[str, Any]:
    said = {} if made.is_causal is None else {"attention.causal": made.is_causal}
    return usual_keys(made.shape(target)) | {
        "target_layers": list(made.reads),
        "block_size": made.block,
        **said,
    }


def write_dflash(
    path: Path, target: Path, shape: Shape, made: DFlash, kind: Any = Q8_0, *, knows: bool = False
) -> Path:
    """Random weights; one that `knows` is right where its target looks at the last token alone.

    Its first mask then looks at that token, since a mask turns away from masks and what the target
    has read is nothing to it, and shows it to the target's own head.
    """
    source, spec = np.random.default_rng(11), read_model_spec(target)
    writer = begun(path, "dflash", _keys(shape, made))
    add_vocabulary(writer, shape.vocabulary)
    writer.add_mask_token_id(shape.vocabulary - 2)
    if made.ids is not None:
        writer.add_tensor("d2t", np.array(made.ids, np.int64))
    for name, size in _shapes(shape, made).items():
        data = np.ones(size) if len(size) == 1 else source.normal(0.0, size[-1] ** -0.5, size)
        if name in ("token_embd.weight", "output.weight"):
            data = floats(spec, name)
            if name == "output.weight" and made.ids is not None:
                data = data[list(made.ids)]
        elif knows:
            data = _knowing(name, data)
        elif name.endswith("attn_output.weight"):
            data = 30.0 * data  # what it looks at matters more than what it is,
        elif name.endswith("attn_q_norm.weight"):
            data = 2.0 * data  # and that is a few places
        add_tensor(writer, name, data, kind)
    finish(writer)
    return path


def _knowing(name: str, data: Any) -> Any:
    if "fc." in name or "ffn_down." in name or ".1.attn_output." in name:
        return 0.0 * data
    if "attn_q." in name:
        return -np.eye(*data.shape)
    if "attn_k." in name or "attn_v." in name:
        return np.eye(*data.shape)
    if "attn_output." in name:
        return 2000.0 * np.eye(*data.shape)
    return 4.0 * data if "attn_q_norm." in name else data
