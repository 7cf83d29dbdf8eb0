"""LoRA adapters of random matrices, and models that they are merged into."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_gguf import finish

from edgespec.models.spec import read_model_spec

RANK, ALPHA = 4, 8.0
CHANGED = ("attn_q.weight", "attn_output.weight", "ffn_down.weight")


def write_adapter(path: Path, model: Path, seed: int = 3, **changes: Any) -> Path:
    """An adapter of some matrices of each block.

    With `changes`: the `arch` and `kind` that it says, tensors to `leave` out by the ends of their
    names, a `row` more in those of a name.
    """
    spec, source = read_model_spec(model), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, changes.get("arch", spec.arch))
    writer.add_type("adapter")
    writer.add_string("adapter.type", changes.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, tensor in spec.tensors.items():
        if not name.endswith(CHANGED):
            continue
        columns, rows = tensor.dims
        rows += name == changes.get("row")
        for end, shape in ((".lora_a", (RANK, columns)), (".lora_b", (rows, RANK))):
            if not (name + end).endswith(changes.get("leave", "nothing")):
                values = source.normal(0.0, 0.15, shape).astype(np.float32)
                writer.add_tensor(name + end, values)
    finish(writer)
    return path


def write_merged(path: Path, model: Path, adapter: Path, scale: float) -> Path:
    """The model, in F32, with what the adapter adds in its weights."""
    shutil.copy(model, path)
    parts = {one.name: one.data for one in gguf.GGUFReader(adapter).tensors}
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if (a := parts.get(f"{tensor.name}.lora_a")) is not None:
            tensor.data[...] += scale * ALPHA / RANK * (parts[f"{tensor.name}.lora_b"] @ a)
    return path
