"""GGUF files of hybrid models, where some layers attend and others keep a state, and of heads.

`write_hybrid` fills one with random weights: what it writes means nothing, but llama.cpp runs the
real graph of its architecture. `write_hollow` writes the shape of a real model and no data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from random_gguf import Q8_0
from written_gguf import Keys, Tensors, write_hollow_file, write_random


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; layers whose number is not in `attends` recur."""

    arch: str
    layers: int = 4
    width: int = 64
    hidden: int = 128
    vocabulary: int = 258
    heads: int = 2
    kv_heads: int = 1
    head: int = 32
    state: int = 32  # values of a recurrent head's key
    state_heads: int = 2
    groups: int = 2  # of them, with keys of their own
    kernel: int = 4  # of the convolution
    interval: int = 2  # every layer of that number attends
    predicting: int = 0  # layers behind the others that predict one token more
    experts: int = 4  # where an architecture has some,
    used: int = 2  # and those that a token goes to

    @property
    def inner(self) -> int:
        """Values of all recurrent heads."""
        return self.state * self.state_heads

    def attends(self, layer: int) -> bool:
        """Whether a layer attends."""
        return (layer + 1) % self.interval == 0 or layer >= self.layers


def feed_forward(shape: Shape) -> Tensors:
    return {
        "ffn_gate.weight": ((shape.hidden, shape.width), "normal"),
        "ffn_up.weight": ((shape.hidden, shape.width), "normal"),
        "ffn_down.weight": ((shape.width, shape.hidden), "normal"),
    }


def attention(shape: Shape, *, gated: bool = False, norms: bool = True) -> Tensors:
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    made: Tensors = {
        "attn_q.weight": ((queries * (2 if gated else 1), shape.width), "normal"),
        "attn_k.weight": ((keys, shape.width), "normal"),
        "attn_v.weight": ((keys, shape.width), "normal"),
        "attn_output.weight": ((shape.width, queries), "normal"),
    }
    if norms:
        made |= {f"attn_{one}_norm.weight": ((shape.head,), "ones") for one in "qk"}
    return made


def _recurrent_keys(shape: Shape) -> Keys:
    return {
        "ssm.conv_kernel": shape.kernel,
        "ssm.inner_size": shape.inner,
        "ssm.state_size": shape.state,
        "ssm.time_step_rank": shape.state_heads,
        "ssm.group_count": shape.groups,
    }


def _qwen35(shape: Shape) -> tuple[Keys, Tensors]:
    """Gated delta nets, and attention with a gate."""
    keys = _recurrent_keys(shape) | {
        "rope.dimension_sections": [shape.head // 8] * 4,
        "full_attention_interval": shape.interval,
    }
    if shape.predicting:
        keys["nextn_predict_layers"] = shape.predicting
    tensors: Tensors = {"output_norm.weight": ((shape.width,), "ones")}
    for layer in range(shape.layers + shape.predicting):
        attends = shape.attends(layer)
        parts = attention(shape, gated=True) if attends else _delta_net(shape)
        parts |= feed_forward(shape) | {
            "attn_norm.weight": ((shape.width,), "ones"),
            "post_attention_norm.weight": ((shape.width,), "ones"),
        }
        parts |= _prediction(shape) if layer >= shape.layers else {}
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return keys, tensors


def _prediction(shape: Shape) -> Tensors:
    """What a layer that predicts one token more has besides."""
    names = ("enorm", "hnorm", "shared_head_norm")
    made: Tensors = {f"nextn.{name}.weight": ((shape.width,), "ones") for name in names}
    return made | {"nextn.eh_proj.weight": ((shape.width, 2 * shape.width), "normal")}


def _delta_net(shape: Shape) -> Tensors:
    channels = shape.inner + 2 * shape.groups * shape.state
    return {
        "attn_qkv.weight": ((channels, shape.width), "normal"),
        "attn_gate.weight": ((shape.inner, shape.width), "normal"),
        "ssm_conv1d.weight": ((channels, shape.kernel), "normal"),
        "ssm_dt.bias": ((shape.state_heads,), "ones"),
        "ssm_a": ((shape.state_heads,), "decay"),
        "ssm_beta.weight": ((shape.state_heads, shape.width), "normal"),
        "ssm_alpha.weight": ((shape.state_heads, shape.width), "normal"),
        "ssm_norm.weight": ((shape.state,), "ones"),
        "ssm_out.weight": ((shape.width, shape.inner), "normal"),
    }


def _lfm2(shape: Shape) -> tuple[Keys, Tensors]:
    """Short convolutions, and attention."""
    layers = range(shape.layers)
    keys = {
        "attention.head_count_kv": [shape.kv_heads * shape.attends(layer) for layer in layers],
        "shortconv.l_cache": shape.kernel - 1,
    }
    tensors: Tensors = {"token_embd_norm.weight": ((shape.width,), "ones")}
    for layer in layers:
        parts = attention(shape) if shape.attends(layer) else _short_convolution(shape)
        parts |= feed_forward(shape) | {
            "attn_norm.weight": ((shape.width,), "ones"),
            "ffn_norm.weight": ((shape.width,), "ones"),
        }
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return keys, tensors


def _short_convolution(shape: Shape) -> Tensors:
    return {
        "shortconv.conv.weight": ((shape.width, shape.kernel - 1), "normal"),
        "shortconv.in_proj.weight": ((3 * shape.width, shape.width), "normal"),
        "shortconv.out_proj.weight": ((shape.width, shape.width), "normal"),
    }


def _nemotron_h(shape: Shape) -> tuple[Keys, Tensors]:
    """Mamba 2, feed-forward, and attention without positions at the end: one part a layer."""
    kinds = [("ssm", "ffn")[layer % 2] for layer in range(shape.layers - 1)] + ["attn"]
    keys = _recurrent_keys(shape) | {
        "attention.head_count_kv": [shape.kv_heads * (kind == "attn") for kind in kinds],
        "feed_forward_length": [shape.hidden * (kind == "ffn") for kind in kinds],
        "attention.layer_norm_epsilon": 1e-6,
    }
    made = {
        "ssm": _mamba2(shape),
        "attn": attention(shape, norms=False),
        "ffn": {name: feed_forward(shape)[name] for name in ("ffn_up.weight", "ffn_down.weight")},
    }
    tensors: Tensors = {"output_norm.weight": ((shape.width,), "ones")}
    for layer, kind in enumerate(kinds):
        parts = made[kind] | {"attn_norm.weight": ((shape.width,), "ones")}
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return keys, tensors


def _mamba2(shape: Shape) -> Tensors:
    mixed = shape.inner + 2 * shape.groups * shape.state
    return {
        "ssm_in.weight": ((mixed + shape.inner + shape.state_heads, shape.width), "normal"),
        "ssm_conv1d.weight": ((mixed, shape.kernel), "normal"),
        "ssm_conv1d.bias": ((mixed,), "zeros"),
        "ssm_dt.bias": ((shape.state_heads,), "ones"),
        "ssm_a": ((shape.state_heads, 1), "decay"),
        "ssm_d": ((shape.state_heads, 1), "ones"),
        "ssm_norm.weight": ((shape.groups, shape.inner // shape.groups), "ones"),
        "ssm_out.weight": ((shape.width, shape.inner), "normal"),
    }


def _mamba(shape: Shape) -> tuple[Keys, Tensors]:
    """Mamba 1 in all layers, which keeps a state and has nothing besides."""
    inner, state, rank = 2 * shape.width, shape.state // 4, shape.width // 16
    keys = _recurrent_keys(shape) | {
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "feed_forward_length": 0,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    tensors: Tensors = {"output_norm.weight": ((shape.width,), "ones")}
    for layer in range(shape.layers):
        parts: Tensors = {
            "attn_norm.weight": ((shape.width,), "ones"),
            "ssm_in.weight": ((2 * inner, shape.width), "normal"),
            "ssm_conv1d.weight": ((inner, shape.kernel), "normal"),
            "ssm_conv1d.bias": ((inner,), "zeros"),
            "ssm_x.weight": ((rank + 2 * state, inner), "normal"),
            "ssm_dt.weight": ((inner, rank), "normal"),
            "ssm_dt.bias": ((inner,), "zeros"),
            "ssm_a": ((inner, state), "decay"),
            "ssm_d": ((inner,), "ones"),
            "ssm_out.weight": ((shape.width, inner), "normal"),
        }
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return keys, tensors


def _glm4moe(shape: Shape) -> tuple[Keys, Tensors]:
    """Attention in all layers, and experts in all but the first."""
    width = shape.width
    keys: Keys = _expert_keys(shape) | {
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": shape.predicting,
    }
    tensors: Tensors = {"output_norm.weight": ((width,), "ones")}
    for layer in range(shape.layers + shape.predicting):
        parts: Tensors = attention(shape) | {
            "attn_norm.weight": ((width,), "ones"),
            "post_attention_norm.weight": ((width,), "ones"),
        }
        parts |= _experts(shape) if layer else feed_forward(shape)
        parts |= _prediction(shape) if layer >= shape.layers else {}
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return keys, tensors


def _experts(shape: Shape) -> Tensors:
    count, width, inner = shape.experts, shape.width, shape.hidden // 2
    return {
        "ffn_gate_inp.weight": ((count, width), "normal"),
        "exp_probs_b.bias": ((count,), "zeros"),
        "ffn_gate_exps.weight": ((count, inner, width), "normal"),
        "ffn_up_exps.weight": ((count, inner, width), "normal"),
        "ffn_down_exps.weight": ((count, width, inner), "normal"),
        "ffn_gate_shexp.weight": ((inner, width), "normal"),
        "ffn_up_shexp.weight": ((inner, width), "normal"),
        "ffn_down_shexp.weight": ((width, inner), "normal"),
    }


def _qwen35moe(shape: Shape) -> tuple[Keys, Tensors]:
    """Qwen 3.5 with experts, and one that all tokens share, behind a gate."""
    keys, tensors = _qwen35(shape)
    keys |= _expert_keys(shape) | {"expert_shared_feed_forward_length": shape.hidden // 2}
    layers = range(shape.layers + shape.predicting)
    tensors = _with_experts(tensors, shape, layers, "exp_probs_b")
    gates = (f"blk.{layer}.ffn_gate_inp_shexp.weight" for layer in layers)
    return keys, tensors | {name: ((shape.width,), "normal") for name in gates}


def _with_experts(tensors: Tensors, shape: Shape, layers: Iterable[int], without: str) -> Tensors:
    """The tensors with experts in some layers; `without` those that a name begins with."""
    experts = _experts(shape)
    left_out = tuple(without.split())
    made = {name: one for name, one in experts.items() if not name.startswith(left_out)}
    for layer in layers:
        dense = {f"blk.{layer}.{name}" for name in feed_forward(shape)}
        tensors = {name: one for name, one in tensors.items() if name not in dense}
        tensors |= {f"blk.{layer}.{name}": part for name, part in made.items()}
    return tensors


def _expert_keys(shape: Shape) -> Keys:
    return {
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "expert_feed_forward_length": shape.hidden // 2,
    }


def _lfm2moe(shape: Shape) -> tuple[Keys, Tensors]:
    """LFM 2 with experts in all layers but the first."""
    keys, tensors = _lfm2(shape)
    keys |= _expert_keys(shape) | {"leading_dense_block_count": 1, "expert_gating_func": 2}
    shared = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
    return keys, _with_experts(tensors, shape, range(1, shape.layers), shared)


def _nemotron_h_moe(shape: Shape) -> tuple[Keys, Tensors]:
    """Nemotron H with experts in place of what feeds forward, and a shared one, without gates."""
    keys, tensors = _nemotron_h(shape)
    keys |= _expert_keys(shape) | {
        "expert_shared_feed_forward_length": shape.hidden // 2,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    feeding = [layer for layer, hidden in enumerate(keys["feed_forward_length"]) if hidden]
    return keys, _with_experts(tensors, shape, feeding, "ffn_gate_exps ffn_gate_shexp")


def _qwen3moe(shape: Shape) -> tuple[Keys, Tensors]:
    """Attention and experts in all layers."""
    tensors: Tensors = {"output_norm.weight": ((shape.width,), "ones")}
    for layer in range(shape.layers):
        parts = attention(shape) | {
            "attn_norm.weight": ((shape.width,), "ones"),
            "ffn_norm.weight": ((shape.width,), "ones"),
        }
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    without = "exp_probs_b ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
    return _expert_keys(shape), _with_experts(tensors, shape, range(shape.layers), without)


def _grovemoe(shape: Shape) -> tuple[Keys, Tensors]:
    """Qwen 3 with experts of which two share another one."""
    keys, tensors = _qwen3moe(shape)
    inner = shape.hidden // 2
    sizes = {"gate": (inner, shape.width), "up": (inner, shape.width), "down": (shape.width, inner)}
    for layer in range(shape.layers):
        for name, size in sizes.items():
            shared = f"blk.{layer}.ffn_{name}_chexps.weight"
            tensors[shared] = ((shape.experts // 2, *size), "normal")
    more = {"expert_chunk_feed_forward_length": inner, "experts_per_group": 2}
    return keys | more | {"expert_group_scale": 0.05}, tensors


def _gpt_oss(shape: Shape) -> tuple[Keys, Tensors]:
    """Attention with sinks, and experts with biases, in all layers."""
    width, inner = shape.width, shape.hidden // 2
    _, tensors = _qwen3moe(shape)
    left_out = ("attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.weight")
    tensors = {name: one for name, one in tensors.items() if not name.endswith(left_out)}
    for layer in range(shape.layers):
        parts: Tensors = {
            "post_attention_norm.weight": ((width,), "ones"),
            "attn_sinks.weight": ((shape.heads,), "zeros"),
            "attn_output.bias": ((width,), "zeros"),
            "ffn_gate_inp.bias": ((shape.experts,), "zeros"),
            "ffn_gate_exps.bias": ((shape.experts, inner), "zeros"),
            "ffn_up_exps.bias": ((shape.experts, inner), "zeros"),
            "ffn_down_exps.bias": ((shape.experts, width), "zeros"),
        }
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return _expert_keys(shape) | {"attention.sliding_window": 128}, tensors


def _dense(shape: Shape) -> tuple[Keys, Tensors]:
    """Attention in all layers, and nothing besides."""
    tensors: Tensors = {"output_norm.weight": ((shape.width,), "ones")}
    for layer in range(shape.layers):
        parts = attention(shape, norms=shape.arch == "qwen3") | feed_forward(shape)
        parts |= {f"{one}_norm.weight": ((shape.width,), "ones") for one in ("attn", "ffn")}
        tensors |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return {}, tensors


HYBRIDS = ("qwen35", "lfm2", "nemotron_h", "qwen35moe", "lfm2moe", "nemotron_h_moe")
_ARCHITECTURES = {
    "llama": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen35": _qwen35,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "mamba": _mamba,
    "glm4moe": _glm4moe,
    "qwen35moe": _qwen35moe,
    "lfm2moe": _lfm2moe,
    "nemotron_h_moe": _nemotron_h_moe,
    "qwen3moe": _qwen3moe,
    "grovemoe": _grovemoe,
    "gpt-oss": _gpt_oss,
    "qwen3next": _qwen35,  # its metadata; the tensors have other names
}


def described(shape: Shape) -> tuple[Keys, Tensors]:
    """Keys and tensors of a file."""
    keys, tensors = _ARCHITECTURES[shape.arch](shape)
    return usual_keys(shape) | keys, tensors | tables(shape)


def usual_keys(shape: Shape) -> Keys:
    """What files of all architectures say."""
    return {
        "context_length": 32_768,
        "embedding_length": shape.width,
        "feed_forward_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head,
        "rope.freq_base": 10_000.0,
        "vocab_size": shape.vocabulary,
        "block_count": shape.layers + shape.predicting,
    }


def tables(shape: Shape) -> Tensors:
    """Embeddings, and the last product."""
    table = (shape.vocabulary, shape.width)
    return {"token_embd.weight": (table, "normal"), "output.weight": (table, "sharp")}


def write_hybrid(
    path: Path, shape: Shape, kind: Any = Q8_0, *, seed: int = 5, say: float = 1.0, part: str = ""
) -> Path:
    """Random weights, and a vocabulary of bytes.

    With a `say` below 1 blocks have that part of their usual say in what comes next, and a head
    looks at the last token alone: the less they have, the more often it is right. A `part` of the
    file is its "head", or its "trunk" without one.
    """
    keys, tensors = described(shape)
    if part == "trunk":
        del keys["nextn_predict_layers"]
        keys["block_count"] -= shape.predicting
    behind = tuple(f"blk.{shape.layers + i}." for i in range(shape.predicting))

    def is_left_out(name: str) -> bool:
        is_head = name.startswith(behind)
        return is_head if part == "trunk" else part == "head" and "blk." in name and not is_head

    return write_random(path, shape.arch, keys, tensors, kind, seed, say, is_left_out=is_left_out)


def write_hollow(path: Path, shape: Shape, kind: str = "Q4_0") -> Path:
    """A whole file but for the data, which reads as zeros and takes no room on the disk."""
    return write_hollow_file(path, shape.arch, *described(shape), kind)
