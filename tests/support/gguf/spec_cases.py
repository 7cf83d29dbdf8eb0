"""Metadata of small models, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_gguf import finish

from edgespec.models.spec import ModelSpec, read_model_spec

GLOBAL = ("general.", "tokenizer.", "split.", "adapter.", "imatrix.")
Q8_0 = gguf.GGMLQuantizationType.Q8_0

# A two-layer model: embedding 64, 4 heads of 16, 2 of them for keys and values.
DENSE: dict[str, Any] = {
    "general.name": "tiny",
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
# Rows of 64 values: F32 takes 256 bytes, Q8_0 takes 68.
LAYER_TENSORS = {
    "attn_norm.weight": (1, None),
    "attn_q.weight": (64, Q8_0),
    "attn_k.weight": (32, Q8_0),
    "ffn_up.weight": (96, Q8_0),
    "ffn_norm.weight": (1, None),
}


def add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_tensor(writer: Any, name: str, num_rows: int, kind: Any) -> None:
    if kind is None:
        writer.add_tensor(name, np.zeros((num_rows, 64), np.float32))
    else:
        writer.add_tensor(name, np.zeros((num_rows, 68), np.uint8), raw_dtype=kind)


def write_model(path: Path, arch: str = "llama", /, **changes: Any) -> Path:
    """Writes DENSE with `changes`; None drops a key, and a tensor of 0 rows is left out.

    Keys are of the architecture unless they begin with a word of GLOBAL; `__` stands for a dot.
    """
    tokens = changes.pop("tokens", ["<s>", "</s>", "a"])
    tensors = {"token_embd.weight": (3, Q8_0), "output_norm.weight": (1, None)}
    values = {**DENSE, **{key.replace("__", "."): value for key, value in changes.items()}}
    for index in range(min(values["block_count"] or 0, 64)):
        tensors |= {f"blk.{index}.{name}": entry for name, entry in LAYER_TENSORS.items()}
    tensors |= values.pop("tensors", {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if value is not None:
            add(writer, key if key.startswith(GLOBAL) else f"{arch}.{key}", value)
    if tokens:
        writer.add_token_list(tokens)
    for name, (num_rows, kind) in tensors.items():
        if num_rows:
            add_tensor(writer, name, num_rows, kind)
    finish(writer)
    return path


def read(folder: Path, arch: str = "llama", /, **changes: Any) -> ModelSpec:
    return read_model_spec(write_model(folder / "model.gguf", arch, **changes))


SSM = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16, "ssm__group_count": 1}
