"""Writes GGUF files of given keys and tensors: with random weights, or with no data at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hollow_gguf import write_infos
from random_gguf import byte_tokens, finish

# Name of a tensor: its shape as numpy has it, and how it is filled.
Tensors = dict[str, tuple[tuple[int, ...], str]]
Keys = dict[str, Any]
_FILL: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "normal": lambda source, shape: source.normal(0.0, shape[-1] ** -0.5, shape),
    "sharp": lambda source, shape: source.normal(0.0, 8 * shape[-1] ** -0.5, shape),  # of a head
    "ones": lambda _source, shape: np.ones(shape),
    "zeros": lambda _source, shape: np.zeros(shape),
    "decay": lambda _source, shape: np.full(shape, -0.2),
}


def begun(path: Path, arch: str, keys: Keys) -> Any:
    """A file with these keys."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{arch}.{key}", value)
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{arch}.{key}", value)
    return writer


def add_vocabulary(writer: Any, size: int) -> None:
    """Bytes, then names of numbers; the last one is an end."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    names = [*byte_tokens(), *(f"<{i}>" for i in range(256, size))]
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for one in messages %}{{ one.content }}. {% endfor %}")


def add_tensor(writer: Any, name: str, data: Any, kind: Any) -> None:
    """A tensor, of a kind where it is a matrix that may be."""
    data = np.ascontiguousarray(data, np.float32)
    if is_quantized(name, data.shape):
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, data)


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    is_matrix = len(shape) > 1 and shape[-1] % 32 == 0
    return is_matrix and not any(
        word in name for word in ("conv", "norm", "ssm_a", "ssm_d", "gate_inp", ".bias")
    )


# What blocks add to what goes on beside them.
_LAST_PRODUCTS = (
    "attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight",
    "ssm_out.weight",
)  # fmt: skip


def write_random(
    path: Path,
    arch: str,
    keys: Keys,
    tensors: Tensors,
    kind: Any,
    seed: int,
    say: float,
    *,
    is_left_out: Callable[[str], bool] = lambda _name: False,
    known: Mapping[str, Any] | None = None,
) -> Path:
    """A file with these keys and tensors, those left out drawn like the others, or `known`."""
    source = np.random.default_rng(seed)
    writer = begun(path, arch, keys)
    add_vocabulary(writer, keys["vocab_size"])
    for name, (size, fill) in tensors.items():
        data = np.ascontiguousarray(_FILL[fill](source, size), np.float32)
        if say < 1.0 and name.endswith(_LAST_PRODUCTS):
            data *= say
        if say < 1.0 and "eh_proj" in name:
            data = np.eye(*size, dtype=np.float32)
        if fill == "sharp":
            data[-1] = 0.0  # an end that never comes
        if is_left_out(name):
            continue
        if known and name in known:
            data = np.ascontiguousarray(known[name], np.float32)
        add_tensor(writer, name, data, kind)
    finish(writer)
    return path


def write_hollow_file(path: Path, arch: str, keys: Keys, tensors: Tensors, kind: str) -> Path:
    """A whole file but for the data, which reads as zeros and takes no room on the disk."""
    writer = begun(path, arch, keys)
    writer.add_tokenizer_model("no_vocab")
    kinds = {
        name: kind if is_quantized(name, size) else "F32" for name, (size, _) in tensors.items()
    }
    write_infos(writer, path, {name: (size, kinds[name]) for name, (size, _) in tensors.items()})
    return path
