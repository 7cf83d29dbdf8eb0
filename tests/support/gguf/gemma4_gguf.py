"""GGUF files of Gemma 4, and of the assistants that draft for it and look into its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hybrid_gguf import Shape, tables, usual_keys
from random_gguf import Q8_0, floats
from written_gguf import Keys, Tensors, write_hollow_file, write_random

from edgespec.models.spec import read_model_spec

WINDOW = 64
GEMMA4 = Shape("gemma4", interval=2)
ASSISTANT = Shape("gemma4-assistant", layers=2, width=96, interval=2)


@dataclass(frozen=True)
class Heads:
    """Of layers that slide, which have their own; and what else a size of the model has."""

    length: int = 64
    kv_heads: int = 1
    window: int = WINDOW
    per_layer: int = 0  # values of a token's own input to each layer
    shared: int = 0  # last layers that look into the caches of others
    inner: int = 0  # values within each of the experts, where a model has some


TINY = Heads()


def _keys(shape: Shape, heads: Heads) -> Keys:
    slides = [not shape.attends(layer) for layer in range(shape.layers)]
    return usual_keys(shape) | {
        "attention.head_count_kv": [heads.kv_heads if one else shape.kv_heads for one in slides],
        "attention.sliding_window": heads.window,
        "attention.sliding_window_pattern": slides,
        "attention.key_length_swa": heads.length,
        "attention.value_length_swa": heads.length,
        "attention.shared_kv_layers": heads.shared,
        "rope.dimension_count_swa": heads.length,
        "rope.freq_base_swa": 10_000.0,
    }


def _blocks(shape: Shape, heads: Heads, *, keeps: bool) -> Tensors:
    """Of all layers; those that keep what they attend to have keys and values."""
    made: Tensors = {"output_norm.weight": ((shape.width,), "ones")}
    norms = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
    for layer in range(shape.layers):
        slides = not shape.attends(layer)
        length = heads.length if slides else shape.head
        queries = shape.heads * length
        parts: Tensors = {f"{name}.weight": ((shape.width,), "ones") for name in norms} | {
            "attn_q.weight": ((queries, shape.width), "normal"),
            "attn_output.weight": ((shape.width, queries), "normal"),
            "attn_q_norm.weight": ((length,), "ones"),
            "ffn_gate.weight": ((shape.hidden, shape.width), "normal"),
            "ffn_up.weight": ((shape.hidden, shape.width), "normal"),
            "ffn_down.weight": ((shape.width, shape.hidden), "normal"),
            "layer_output_scale.weight": ((1,), "ones"),
        }
        if keeps:
            keys = length * (heads.kv_heads if slides else shape.kv_heads)
            parts |= {f"attn_{one}.weight": ((keys, shape.width), "normal") for one in "kv"}
            parts["attn_k_norm.weight"] = ((length,), "ones")
        if keeps and heads.per_layer:
            parts |= {
                "inp_gate.weight": ((heads.per_layer, shape.width), "normal"),
                "proj.weight": ((shape.width, heads.per_layer), "normal"),
                "post_norm.weight": ((shape.width,), "ones"),
            }
        made |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return made | {"rope_freqs.weight": ((shape.head // 2,), "ones")}


def _gemma4(shape: Shape, heads: Heads) -> tuple[Keys, Tensors]:
    keys, tensors = _keys(shape, heads), _blocks(shape, heads, keeps=True) | tables(shape)
    keys["embedding_length_per_layer_input"] = heads.per_layer
    if heads.per_layer:
        inputs = heads.per_layer * shape.layers
        tensors |= {
            "per_layer_token_embd.weight": ((shape.vocabulary, inputs), "normal"),
            "per_layer_model_proj.weight": ((inputs, shape.width), "normal"),
            "per_layer_proj_norm.weight": ((heads.per_layer,), "ones"),
        }
    if heads.inner:
        keys |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.used,
            "expert_feed_forward_length": heads.inner,
        }
        for layer in range(shape.layers):
            parts = _experts(shape, heads.inner)
            tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return keys, tensors


def _experts(shape: Shape, inner: int) -> Tensors:
    """Beside what feeds forward; the first two of their products are one."""
    count, width = shape.experts, shape.width
    norms = ("pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight")
    return {
        "ffn_gate_inp.weight": ((count, width), "normal"),
        "ffn_gate_inp.scale": ((width,), "ones"),
        **{name: ((width,), "ones") for name in norms},
        "ffn_gate_up_exps.weight": ((count, 2 * inner, width), "normal"),
        "ffn_down_exps.weight": ((count, width, inner), "normal"),
        "ffn_down_exps.scale": ((count,), "ones"),
    }


def _assistant(shape: Shape, heads: Heads, width: int) -> tuple[Keys, Tensors]:
    keys = _keys(shape, heads) | {
        "embedding_length_out": width,
        "nextn_predict_layers": shape.layers,
    }
    tensors = _blocks(shape, heads, keeps=False) | {
        "token_embd.weight": ((shape.vocabulary, shape.width), "sharp"),
        "nextn.pre_projection.weight": ((shape.width, 2 * width), "normal"),
        "nextn.post_projection.weight": ((width, shape.width), "normal"),
    }
    return keys, tensors


def write_gemma4(
    path: Path, shape: Shape = GEMMA4, kind: Any = Q8_0, heads: Heads = TINY, say: float = 1.0
) -> Path:
    """Random weights, with a `say` as of `write_hybrid`."""
    keys, tensors = _gemma4(shape, heads)
    known = _quiet(tensors, say)
    return write_random(path, shape.arch, keys, tensors, kind, 5, say, known=known)


def _quiet(tensors: Tensors, say: float) -> dict[str, Any]:
    """Norms of what blocks add, which undo that their products are small."""
    return {name: np.full(size, say) for name, (size, _) in tensors.items() if ".post_" in name}


def write_assistant(
    path: Path,
    target: Path,
    shape: Shape = ASSISTANT,
    kind: Any = Q8_0,
    heads: Heads = TINY,
    say: float = 1.0,
) -> Path:
    """Random weights, for that model.

    With a `say` below 1 it knows what comes next where its target looks at the last token alone: it
    shows that one's embedding to the target's own head.
    """
    spec = read_model_spec(target)
    keys, tensors = _assistant(shape, heads, spec.embedding_size)
    known = _quiet(tensors, say)
    if say < 1.0:
        more = shape.width - spec.embedding_size
        known |= {
            "token_embd.weight": np.pad(floats(spec, "output.weight"), ((0, 0), (0, more))),
            "nextn.pre_projection.weight": np.eye(shape.width, 2 * spec.embedding_size),
        }
    return write_random(path, shape.arch, keys, tensors, kind, 7, say, known=known)


def write_hollow_gemma4(path: Path, shape: Shape, heads: Heads) -> Path:
    """A whole file but for the data."""
    return write_hollow_file(path, shape.arch, *_gemma4(shape, heads), "Q4_0")
