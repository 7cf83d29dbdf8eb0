"""Files of early exits and heads: what is written, and what of a head's is read to go on with it.

`edgespec.models.early_exit` says what is in an exit's. A head's is an ordinary GGUF file of
llama.cpp's architecture `eagle3`: a norm and `fc`, one block, a final norm, rows of a head for V'
tokens, and `d2t`, which says which tokens these are. Embeddings are the target's. Either drafts for
the one model it was made for.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import MissingDependencyError, UnsupportedError
from edgespec.exits.target import Hyperparameters
from edgespec.models.early_exit import (
    CONTEXT,
    HEAD_PREFIX,
    PREFIX,
    VERSION,
    MadeFor,
    read_made_for,
    target_hash,
)
from edgespec.models.gguf.reader import Gguf
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.values import read_ids, read_numbers, read_strings
from edgespec.models.heads import DRAFTED
from edgespec.models.onnx.weights import raw_rows
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import reason, whole_file

_BLOCK = 32  # values of a Q8_0 block
_CONTROL, _BYTE = 3, 6  # kinds of tokens
_SPECIAL = ("bos", "eos", "eot", "unknown", "padding")
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_COPIED = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")


def choose_tokens(spec: ModelSpec, counts: NDArray[np.int64], size: int) -> NDArray[np.int32]:
    """The `size` most frequent tokens by `counts` [V], ascending; control tokens come first.

    So do single characters and bytes, which a tokenizer needs to be loaded. Ties go to the smaller
    id, which in vocabularies made by merging is the more frequent token.
    """
    file = read_gguf_shards(spec.path)[0]
    needed = np.zeros(spec.vocab_size, bool)
    for number, text in enumerate(read_strings(file.path, file.metadata.get(_TOKENS))):
        needed[number] = len(text.decode(errors="replace")) == 1
    kinds = np.array(read_numbers(file.path, file.metadata.get(_TYPES)))
    needed[: len(kinds)] |= (kinds == _CONTROL) | (kinds == _BYTE)
    for key in _SPECIAL:
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < spec.vocab_size:
            needed[token] = True
    order = np.lexsort((np.arange(spec.vocab_size), -counts, ~needed))
    return np.sort(order[: max(size, int(needed.sum()))]).astype(np.int32)


def write_exit(
    target: ModelSpec,
    path: Path,
    *,
    exit_layer: int,
    token_ids: NDArray[np.int32],
    head: NDArray[np.float32],
    block: Mapping[str, NDArray[np.float32]],
    norm: NDArray[np.float32],
    report: Mapping[str, Any],
) -> None:
    """Write a drafter for `target`; the file appears only when complete.

    Args:
        exit_layer: how many of the target's blocks it begins with.
        token_ids: [V'], ascending: what the head's rows stand for.
        head: [V', width].
        block: tensors of the one after them, named as within a block.
        norm: the final norm, [width].

    Raises MissingDependencyError without the gguf package, UnsupportedError where it cannot be
    written.
    """
    gguf = _import_gguf()
    writer = gguf.GGUFWriter(None, target.arch)
    _add_metadata(writer, target, exit_layer + 1, token_ids)
    _add_target(writer, PREFIX, target)
    writer.add_uint32(f"{PREFIX}.exit_layer", exit_layer)
    writer.add_array(f"{PREFIX}.token_ids", token_ids.tolist())
    writer.add_string(f"{PREFIX}.report", json.dumps(dict(report)))
    for shard in read_gguf_shards(target.path):
        for tensor in shard.tensors:
            if _is_copied(tensor.name, exit_layer):
                shape = (*reversed(tensor.dims[1:]), -1)
                rows = np.ascontiguousarray(raw_rows(shard.path, tensor).reshape(shape))
                kind = getattr(gguf.GGMLQuantizationType, tensor.type.name)
                writer.add_tensor(tensor.name, rows, raw_dtype=kind)
    for name, values in block.items():
        _add_trained(gguf, writer, f"blk.{exit_layer}.{name}", values)
    _add_trained(gguf, writer, "token_embd.weight", head)
    _add_trained(gguf, writer, "output_norm.weight", norm)
    _save(writer, path)


def _add_target(writer: Any, prefix: str, target: ModelSpec) -> None:
    """The model that a file drafts for."""
    writer.add_uint32(f"{prefix}.version", VERSION)
    writer.add_string(f"{prefix}.target", target_hash(target))
    writer.add_string(f"{prefix}.target_name", target.path.name)


def _is_copied(name: str, exit_layer: int) -> bool:
    """Whether an exit has a tensor of the target as it is, byte for byte."""
    first, number, *_ = f"{name}.".split(".")
    return name == "rope_freqs.weight" or (first == "blk" and int(number) < exit_layer)


def _save(writer: Any, path: Path) -> None:
    """Write what a GGUFWriter was given; the file appears only when complete.

    Raises UnsupportedError where it cannot be written.
    """
    try:
        with whole_file(path) as partial:
            try:
                writer.write_header_to_file(partial)
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            finally:
                writer.close()
    except OSError as problem:
        raise UnsupportedError(
            f"cannot write {path}: {reason(problem)}", hint="name another file"
        ) from problem


def _add_metadata(
    writer: Any, target: ModelSpec, num_blocks: int, token_ids: NDArray[np.int32]
) -> None:
    file = read_gguf_shards(target.path)[0]
    writer.add_name(f"early exit of {target.name}")
    changed = {"block_count": num_blocks, "vocab_size": len(token_ids)}
    changed["context_length"] = min(CONTEXT, target.context_length or CONTEXT)
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{target.arch}.")
        if name == key or name in changed:
            continue
        _add_scalar(writer, key, value)
    for name, number in changed.items():
        writer.add_uint32(f"{target.arch}.{name}", number)
    _add_tokenizer(writer, file, token_ids)


def _add_scalar(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        raise UnsupportedError(f"an early exit cannot be made: '{key}' differs by layer")


def _add_tokenizer(writer: Any, file: Gguf, token_ids: NDArray[np.int32]) -> None:
    """The target's tokenizer with the chosen tokens alone, so that llama.cpp loads it."""
    metadata = file.metadata
    for key in (*_COPIED, *(f"tokenizer.ggml.{flag}" for flag in _FLAGS)):
        if key in metadata:
            _add_scalar(writer, key, metadata[key])
    tokens = list(read_strings(file.path, metadata.get(_TOKENS)))
    chosen = [tokens[token] for token in token_ids]
    writer.add_token_list(chosen)
    kinds = read_numbers(file.path, metadata.get(_TYPES))
    if len(kinds):
        writer.add_token_types([int(kinds[token]) for token in token_ids])
    scores = read_numbers(file.path, metadata.get("tokenizer.ggml.scores"))
    if len(scores):
        writer.add_token_scores([float(scores[token]) for token in token_ids])
    there = set(chosen)
    merges = list(read_strings(file.path, metadata.get("tokenizer.ggml.merges")))
    kept = [merge for merge in merges if {merge.replace(b" ", b""), *merge.split(b" ")} <= there]
    if merges:
        writer.add_token_merges(kept or merges[:1])
    for key in _SPECIAL:
        name = f"tokenizer.ggml.{key}_token_id"
        place = np.flatnonzero(token_ids == metadata.get(name, -1))
        if len(place):
            writer.add_uint32(name, int(place[0]))


def _add_trained(gguf: Any, writer: Any, name: str, values: NDArray[np.float32]) -> None:
    """Matrices in 8 bits, which cost nothing and have a kernel of ours; vectors as they are."""
    kinds = gguf.GGMLQuantizationType
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    kind = kinds.F16 if values.shape[1] % _BLOCK else kinds.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _import_gguf() -> Any:
    """The package that writes GGUF files. Raises MissingDependencyError without it."""
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError(
            "writing a drafter needs the gguf package", hint="pip install 'edgespec[train]'"
        ) from error
    return gguf


# -- heads ---------------------------------------------------------------------------------

ARCHITECTURE = "eagle3"
ROWS_NORM = "enc.output_norm.weight"  # in front of `fc`
_OUTSIDE = ("fc.weight", ROWS_NORM)  # tensors that are not the block's


@dataclass(frozen=True, slots=True)
class HeadInfo(MadeFor):
    """All that a head's file says of itself."""

    file: Gguf
    layers: tuple[int, ...]  # of the target, whose inputs it reads
    token_ids: NDArray[np.int32]  # [V'], ascending


def read_head(path: Path) -> HeadInfo | None:
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


def check_made_for(target: ModelSpec, info: HeadInfo) -> None:
    """Raise UnsupportedError unless a head was made for `target`."""
    if info.target_hash != target_hash(target):
        raise UnsupportedError(
            f"{info.file.path.name} is a head of {info.target_name}, not of {target.path.name}",
            hint="make one with "
            f"`edgespec draft train {quote(str(target.path))} --kind eagle3 -o FILE`",
        )


def write_head(
    target: ModelSpec,
    path: Path,
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
    gguf = _import_gguf()
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_name(f"head of {target.name}")
    _add_shape(writer, target, shape, block)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(layers))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", target.embedding_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", False)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", True)
    everything = np.arange(target.vocab_size, dtype=np.int32)
    _add_tokenizer(writer, read_gguf_shards(target.path)[0], everything)
    _add_target(writer, HEAD_PREFIX, target)
    writer.add_string(f"{HEAD_PREFIX}.report", json.dumps(dict(report)))
    for name, values in {"output_norm.weight": norm, "output.weight": head, **block}.items():
        is_inside = name in block and name not in _OUTSIDE
        _add_trained(gguf, writer, f"blk.0.{name}" if is_inside else name, values)
    writer.add_tensor(DRAFTED, token_ids.astype(np.int64))
    _save(writer, path)


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
