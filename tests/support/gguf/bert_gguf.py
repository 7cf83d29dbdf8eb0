"""GGUF files of BERT encoders: of given weights, or small ones of random weights for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from random_gguf import finish

WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT = 64, 128, 2, 2, 64
WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "sun", "##s", "!", ".", "rain", "moon"]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
MEAN, CLS, LAST, RANK = 1, 2, 3, 4  # values of llama_pooling_type
# What a checkpoint of a BERT calls its tensors, and what GGUF does; {} is the number of a layer.
_LAYER_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}


def gguf_name(name: str) -> str | None:
    """GGUF's name of a checkpoint's tensor; None for one that is not in GGUF."""
    stem, _, end = name.rpartition(".")
    if name.startswith("encoder.layer."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{_LAYER_NAMES[rest]}.{end}"
    return f"{_NAMES[stem]}.{end}" if stem in _NAMES else None


def write_bert(
    path: Path,
    weights: Mapping[str, NDArray[np.float32]],
    tokens: Sequence[str],
    *,
    heads: int,
    context: int,
    epsilon: float = 1e-12,
    pooling: int = MEAN,
    kind: Any = gguf.GGMLQuantizationType.F16,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """A BERT of weights by GGUF's names; matrices of layers are of type `kind`, the rest is F32.

    `more` are other strings or lists of them for the header.
    """
    writer = gguf.GGUFWriter(path, "bert")
    layers = sum(name.endswith("ffn_up.weight") for name in weights)
    hidden, width = weights["blk.0.ffn_up.weight"].shape
    writer.add_name("bert")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(epsilon)
    writer.add_causal_attention(False)
    writer.add_uint32("bert.pooling_type", pooling)
    writer.add_token_type_count(len(weights["token_types.weight"]))
    for key, value in (more or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_array
        add(key, value)
    specials = [len(one) > 2 and one[0] == "[" and one[-1] == "]" for one in tokens]
    shown = [
        token if special else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token, special in zip(tokens, specials, strict=True)
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(shown)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if special else normal for special in specials])
    writer.add_uint32("tokenizer.ggml.cls_token_id", tokens.index("[CLS]"))
    writer.add_uint32("tokenizer.ggml.bos_token_id", tokens.index("[CLS]"))
    writer.add_uint32("tokenizer.ggml.seperator_token_id", tokens.index("[SEP]"))
    writer.add_uint32("tokenizer.ggml.unknown_token_id", tokens.index("[UNK]"))
    writer.add_uint32("tokenizer.ggml.padding_token_id", tokens.index("[PAD]"))
    for name, values in weights.items():
        is_matrix = name.startswith("blk.") and values.ndim == 2
        raw = kind if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, raw), raw_dtype=raw)
    finish(writer)
    return path


def random_weights(seed: int = 5, labels: int = 0) -> dict[str, NDArray[np.float32]]:
    """Of a small BERT; with `labels` it has a head that gives as many scores."""
    source = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return source.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)

    found = {
        "token_embd.weight": normal(len(TOKENS), WIDTH),
        "position_embd.weight": normal(CONTEXT, WIDTH),
        "token_types.weight": normal(2, WIDTH),
    }
    norms = ["token_embd_norm"]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norms += [f"{block}.attn_output_norm", f"{block}.layer_output_norm"]
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH, WIDTH),
            ("attn_v", WIDTH, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_up", HIDDEN, WIDTH),
            ("ffn_down", WIDTH, HIDDEN),
        ):
            found[f"{block}.{name}.weight"] = 2 * normal(rows, columns)
            found[f"{block}.{name}.bias"] = normal(rows)
    for name in norms:
        found[f"{name}.weight"] = source.uniform(0.5, 1.5, WIDTH).astype(np.float32)
        found[f"{name}.bias"] = normal(WIDTH)
    if labels:
        found["cls.output.weight"] = normal(labels, WIDTH)
        found["cls.output.bias"] = normal(labels)
    return found


def write_random_bert(
    path: Path, *, seed: int = 5, pooling: int = MEAN, more: Mapping[str, Any] | None = None
) -> Path:
    """A small BERT of random weights, which ranks where its pooling is RANK."""
    weights = random_weights(seed, labels=1 if pooling == RANK else 0)
    f32 = gguf.GGMLQuantizationType.F32
    sizes = {"heads": HEADS, "context": CONTEXT}
    return write_bert(path, weights, TOKENS, **sizes, pooling=pooling, kind=f32, more=more)


def reference(weights: Mapping[str, NDArray[np.float32]], ids: Sequence[int]) -> Any:
    """The states of one text [n, width] in plain numpy, as the paper has them: BERT, post-norm."""

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-12)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["token_embd.weight"][list(ids)] + weights["position_embd.weight"][: len(ids)]
    x = norm(x + weights["token_types.weight"][0], "token_embd_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        q, k, v = (
            linear(x, f"{block}.attn_{one}").reshape(len(ids), HEADS, -1).swapaxes(0, 1)
            for one in "qkv"
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        mixed = mixed.swapaxes(0, 1).reshape(len(ids), -1)
        x = norm(x + linear(mixed, f"{block}.attn_output"), f"{block}.attn_output_norm")
        hidden = linear(x, f"{block}.ffn_up")
        hidden = 0.5 * hidden * (1 + np.vectorize(_erf)(hidden / np.sqrt(2)))
        x = norm(x + linear(hidden, f"{block}.ffn_down"), f"{block}.layer_output_norm")
    return x


def _erf(value: float) -> float:
    from math import erf

    return erf(value)
