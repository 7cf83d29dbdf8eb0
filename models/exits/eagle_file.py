"""Files of heads that edgespec trained: what is in them beside what llama.cpp reads.

An ordinary GGUF file of llama.cpp's architecture `eagle3`: a norm and `fc`, one block, a final
norm, rows of a head for V' tokens, and `d2t`, which says which tokens these are. Embeddings are the
target's. Such a file drafts for the one model it was made for.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.models.exits.eagle_start import ROWS_NORM
from edgespec.models.exits.early_exit import HEAD_PREFIX, MadeFor, read_made_for, target_hash
from edgespec.models.exits.network import Hyperparameters, Tensor, read_tensor
from edgespec.models.exits.writer import add_tokenizer, add_trained, import_gguf, save_gguf
from edgespec.models.gguf.reader import Gguf, GgufTensor
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.values import read_ids, read_numbers
from edgespec.models.heads import DRAFTED
from edgespec.models.spec import ModelSpec

ARCHITECTURE, VERSION = "eagle3", 1
_OUTSIDE = ("fc.weight", ROWS_NORM)  # tensors that are not the block's


@dataclass(frozen=True, slots=True)
class HeadInfo(MadeFor):
    """All that a head's file says of itself."""

    file: Gguf
    layers: tuple[int, ...]  # of the target, whose inputs it reads
    token_ids: NDArray[np.int32]  # [V'], ascending

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """By name."""
        return {tensor.name: tensor for tensor in self.file.tensors}


def read_head(path: str | os.PathLike[str]) -> HeadInfo | None:
    """What a head's file says of itself; None for other files and other people's heads.

    Raises ModelNotFoundError and ModelFileError.
    """
    file, made = read_gguf_shards(path)[0], read_made_for(path)
    if made is None or file.text("general.architecture") != ARCHITECTURE:
        return None
    layers: array[int] = read_numbers(file.path, file.metadata.get(f"{ARCHITECTURE}.target_layers"))
    ids = read_ids(file, DRAFTED)
    assert ids is not None, "written with one"
    return HeadInfo(
        made.target_hash,
        made.target_name,
        made.report,
        file,
        tuple(layers),
        np.array(ids, np.int32),
    )


def values_of(info: HeadInfo) -> dict[str, Tensor]:
    """A head's tensors in float32, those of its block by their names within it."""
    return {
        name.removeprefix("blk.0."): read_tensor(info.file.path, tensor)
        for name, tensor in info.tensors.items()
        if name != DRAFTED
    }


def check_made_for(target: ModelSpec, info: HeadInfo) -> None:
    """Raise UnsupportedError unless a head was made for `target`."""
    if info.target_hash != target_hash(target):
        raise UnsupportedError(
            f"{info.file.path.name} is a head of {info.target_name}, not of {target.path.name}",
            hint=f"make one with `edgespec draft train {target.path.name} --kind eagle3 -o FILE`",
        )


def write_head(
    target: ModelSpec,
    path: str | os.PathLike[str],
    *,
    shape: Hyperparameters,
    layers: Sequence[int],
    token_ids: NDArray[np.int32],
    head: NDArray[np.float32],
    block: Mapping[str, NDArray[np.float32]],
    norm: NDArray[np.float32],
    report: Mapping[str, Any],
) -> None:
    """Write a head for `target`; the file appears only when complete.

    Args:
        layers: of the target, whose inputs it reads.
        token_ids: [V'], ascending: what the head's rows stand for.
        head: [V', width].
        block: tensors of its block, named as within a block, and those in front of it.
        norm: the final norm, [width].

    Raises MissingDependencyError without the gguf package, UnsupportedError where it cannot be
    written.
    """
    gguf = import_gguf()
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_name(f"head of {target.name}")
    _add_shape(writer, target, shape, block)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(layers))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", target.embedding_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", False)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", True)
    everything = np.arange(target.vocab_size, dtype=np.int32)
    add_tokenizer(writer, read_gguf_shards(target.path)[0], everything)
    writer.add_uint32(f"{HEAD_PREFIX}.version", VERSION)
    writer.add_string(f"{HEAD_PREFIX}.target", target_hash(target))
    writer.add_string(f"{HEAD_PREFIX}.target_name", target.path.name)
    writer.add_string(f"{HEAD_PREFIX}.report", json.dumps(dict(report)))
    for name, values in {"output_norm.weight": norm, "output.weight": head, **block}.items():
        is_inside = name in block and name not in _OUTSIDE
        add_trained(gguf, writer, f"blk.0.{name}" if is_inside else name, values)
    writer.add_tensor(DRAFTED, token_ids.astype(np.int64))
    save_gguf(writer, Path(path))


def _add_shape(
    writer: Any,
    target: ModelSpec,
    shape: Hyperparameters,
    block: Mapping[str, NDArray[np.float32]],
) -> None:
    integers = {
        "block_count": 1,
        "context_length": target.context_length,
        "embedding_length": shape.width,
        "feed_forward_length": len(block["ffn_up.weight"]),
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_length,
        "attention.value_length": shape.head_length,
        "rope.dimension_count": shape.head_length,
        "vocab_size": target.vocab_size,
    }
    for key, value in integers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", shape.epsilon)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", shape.rope_base)
