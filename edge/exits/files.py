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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError, imported
from edgespec.exits.target import Hyperparameters
from edgespec.models.early_exit import (
    CONTEXT,
    HEAD_PREFIX,
    PREFIX,
    VERSION,
    MadeFor,
    file_hash,
    made_for,
)
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import Gguf, read_ids, read_numbers, read_strings
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.writer import Raw, Value, key_bytes, write_raw
from edgespec.models.heads import DRAFTED
from edgespec.models.onnx.weights import raw_rows
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import refusing, whole_file

_BLOCK = 32  # values of a Q8_0 block
_CONTROL, _BYTE = 3, 6  # kinds of tokens
_SPECIAL = ("bos", "eos", "eot", "unknown", "padding")
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_SCORES, _MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
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


class Trained(NamedTuple):
    """What a drafter has of its own. V' tokens can be drafted."""

    token_ids: NDArray[np.int32]  # [V'], ascending: what the head's rows stand for
    head: NDArray[np.float32]  # [V', width]
    # By name within the block; of a head's, what stands in front of it, too.
    block: Mapping[str, NDArray[np.float32]]
    norm: NDArray[np.float32]  # the final one, [width]


def write_exit(
    target: ModelSpec, path: Path, trained: Trained, report: Mapping[str, Any], *, exit_layer: int
) -> None:
    """Write a drafter for `target` that begins with `exit_layer` of its blocks, and one trained.

    The file appears only when complete. Raises MissingDependencyError without the gguf package,
    UnsupportedError where it cannot be written.
    """
    keys: dict[str, Value] = {
        **_metadata(target, exit_layer + 1, trained.token_ids),
        **_about(PREFIX, target, report),
        f"{PREFIX}.exit_layer": exit_layer,
        f"{PREFIX}.token_ids": trained.token_ids,
    }
    tensors: list[Raw] = []
    for shard in read_gguf_shards(target.path):
        for tensor in shard.tensors:  # of which some are the target's, byte for byte
            first, number, *_ = f"{tensor.name}.".split(".")
            is_shallow = first == "blk" and int(number) < exit_layer
            if is_shallow or tensor.name == "rope_freqs.weight":
                rows = np.ascontiguousarray(raw_rows(shard.path, tensor)).reshape(-1)
                kind = GGML_NUMBERS[tensor.type.name]
                tensors.append((tensor.name, tensor.dims, kind, rows.data))
    own = {f"blk.{exit_layer}.{name}": values for name, values in trained.block.items()}
    own |= {"token_embd.weight": trained.head, "output_norm.weight": trained.norm}
    _save(path, keys, [*tensors, *map(_tensor, own.items())])


def _about(prefix: str, target: ModelSpec, report: Mapping[str, Any]) -> dict[str, Value]:
    """The model that a file drafts for, and how it was made."""
    return {
        f"{prefix}.version": VERSION,
        f"{prefix}.target": file_hash(target.path),
        f"{prefix}.target_name": target.path.name,
        f"{prefix}.report": json.dumps(dict(report)),
    }


def _save(path: Path, keys: Mapping[str, Value], tensors: Sequence[Raw]) -> None:
    """Write a file that appears only when complete. Raises UnsupportedError where it cannot."""
    with refusing(path, "name another file"), whole_file(path) as partial:
        write_raw(partial, *key_bytes(keys), tensors)


def _metadata(target: ModelSpec, num_blocks: int, token_ids: NDArray[np.int32]) -> dict[str, Value]:
    file = read_gguf_shards(target.path)[0]
    changed = {"block_count": num_blocks, "vocab_size": len(token_ids)}
    changed["context_length"] = min(CONTEXT, target.context_length or CONTEXT)
    kept = {
        key: _scalar(key, value)
        for key, value in file.metadata.items()
        if key.startswith(f"{target.arch}.") and key[len(target.arch) + 1 :] not in changed
    }
    return {
        "general.architecture": target.arch,
        "general.name": f"early exit of {target.name}",
        **kept,
        **{f"{target.arch}.{name}": number for name, number in changed.items()},
        **_tokenizer(file, token_ids),
    }


def _scalar(key: str, value: Any) -> Value:
    if isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"an early exit cannot be made: '{key}' differs by layer")


def _tokenizer(file: Gguf, token_ids: NDArray[np.int32]) -> dict[str, Value]:
    """The target's tokenizer with the chosen tokens alone, so that llama.cpp loads it."""
    metadata = file.metadata
    copied = (*_COPIED, *(f"tokenizer.ggml.{flag}" for flag in _FLAGS))
    keys = {key: _scalar(key, metadata[key]) for key in copied if key in metadata}
    tokens = list(read_strings(file.path, metadata.get(_TOKENS)))
    keys[_TOKENS] = chosen = [tokens[token] for token in token_ids]
    kinds = read_numbers(file.path, metadata.get(_TYPES))
    if len(kinds):
        keys[_TYPES] = np.array([kinds[token] for token in token_ids], np.int32)
    scores = read_numbers(file.path, metadata.get(_SCORES))
    if len(scores):
        keys[_SCORES] = np.array([scores[token] for token in token_ids], np.float32)
    there = set(chosen)
    merges = list(read_strings(file.path, metadata.get(_MERGES)))
    kept = [merge for merge in merges if {merge.replace(b" ", b""), *merge.split(b" ")} <= there]
    if merges:
        keys[_MERGES] = kept or merges[:1]
    for special in _SPECIAL:
        name = f"tokenizer.ggml.{special}_token_id"
        place = np.flatnonzero(token_ids == metadata.get(name, -1))
        if len(place):
            keys[name] = int(place[0])
    return keys


def _tensor(named: tuple[str, NDArray[np.float32]]) -> Raw:
    """Matrices in 8 bits, which cost nothing and have a kernel of ours; vectors as they are."""
    name, values = named
    dims = values.shape[::-1]
    if values.ndim == 1:
        return name, dims, GGML_NUMBERS["F32"], values.astype(np.float32).tobytes()
    if values.shape[1] % _BLOCK:
        return name, dims, GGML_NUMBERS["F16"], values.astype(np.float16).tobytes()
    needed = "writing a drafter needs the gguf package"
    quants = imported("gguf.quants", needed, "pip install 'edgespec[train]'")
    rows = quants.quantize(values, quants.GGMLQuantizationType.Q8_0)
    return name, dims, GGML_NUMBERS["Q8_0"], rows.tobytes()


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
    file = read_gguf_shards(path)[0]
    arch, is_ours = file.text("general.architecture"), f"{HEAD_PREFIX}.version" in file.metadata
    if arch != ARCHITECTURE or not is_ours:
        return None
    layers: array[int] = read_numbers(file.path, file.metadata.get(f"{ARCHITECTURE}.target_layers"))
    ids = read_ids(file, DRAFTED)
    assert ids is not None, "written with one"
    return HeadInfo(*made_for(file, HEAD_PREFIX), file, tuple(layers), np.array(ids, np.int32))


def check_made_for(target: ModelSpec, info: HeadInfo) -> None:
    """Raise UnsupportedError unless a head was made for `target`."""
    if info.target_hash != file_hash(target.path):
        raise UnsupportedError(
            f"{info.file.path.name} is a head of {info.target_name}, not of {target.path.name}",
            hint="make one with "
            f"`edgespec draft train {quote(str(target.path))} --kind eagle3 -o FILE`",
        )


def write_head(
    target: ModelSpec,
    path: Path,
    trained: Trained,
    report: Mapping[str, Any],
    *,
    shape: Hyperparameters,
    layers: Sequence[int],
) -> None:
    """Write a head for `target`, of which it reads the inputs of `layers`, as `write_exit`."""
    everything = np.arange(target.vocab_size, dtype=np.int32)
    keys: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.name": f"head of {target.name}",
        **_shape(target, shape, trained.block),
        f"{ARCHITECTURE}.target_layers": np.array(layers, np.int32),
        f"{ARCHITECTURE}.target_hidden_size": target.embedding_size,
        f"{ARCHITECTURE}.norm_before_residual": False,
        f"{ARCHITECTURE}.norm_before_fc": True,
        **_tokenizer(read_gguf_shards(target.path)[0], everything),
        **_about(HEAD_PREFIX, target, report),
    }
    own = {"output_norm.weight": trained.norm, "output.weight": trained.head}
    for name, values in trained.block.items():
        own[name if name in _OUTSIDE else f"blk.0.{name}"] = values
    ids = trained.token_ids.astype(np.int64)
    drafted = DRAFTED, ids.shape, GGML_NUMBERS["I64"], ids.tobytes()
    _save(path, keys, [*map(_tensor, own.items()), drafted])


def _shape(
    target: ModelSpec, shape: Hyperparameters, block: Mapping[str, NDArray[np.float32]]
) -> dict[str, Value]:
    found: dict[str, Value] = {
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
        "attention.layer_norm_rms_epsilon": float(shape.epsilon),
        "rope.freq_base": float(shape.rope_base),
    }
    return {f"{ARCHITECTURE}.{name}": value for name, value in found.items()}
