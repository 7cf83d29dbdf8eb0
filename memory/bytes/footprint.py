"""How many bytes a run will allocate, by component, before anything is loaded.

Pure arithmetic over a ModelSpec, after `llama.cpp` of llama-cpp-python 0.3.36; docs/memory.md
compares it with what llama.cpp says it allocated. A component is an allocation (llama.cpp takes
exactly that and touches it) or a ceiling (it may grow to that, or is touched as it is used).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from edgespec.memory.bytes.graph import BatchShape
from edgespec.memory.bytes.head_graph import head_compute_bytes
from edgespec.memory.bytes.recurrent_graph import compute_buffer_bytes
from edgespec.memory.device.kernels import (
    attention_work_bytes,
    packed_bytes,
    product_work_bytes,
)
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.onnx.packing import BLOCK, packed_bits
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

HOST, GPU = "host", "gpu"
# Bytes per value of a KV cache; block types store a 2-byte scale per 32 values.
KV_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_KV_BLOCK = {"q8_0": 32, "q4_0": 32}
# Types that llama.cpp's CPU backend rewrites into blocks of rows, by what the processor must have
# (`ggml/src/ggml-cpu/repack.cpp`, `ggml_repack_get_optimal_repack_type`): any one set is enough.
_REPACKED_ON = {
    "Q4_0": ({"avx2"}, {"neon", "dotprod"}),
    "Q4_K": ({"avx2"}, {"neon", "dotprod"}),
    "Q2_K": ({"avx512"},),
    "Q5_K": ({"neon", "dotprod"},),
    "Q6_K": ({"neon", "dotprod"},),
    "Q8_0": ({"neon", "dotprod"},),
    "IQ4_NL": ({"avx2"}, {"neon", "dotprod"}),
    "MXFP4": ({"avx2"}, {"neon", "dotprod"}),
}
_REPACKED_ROWS = 8
_TABLE = "token_embd.weight"
_LOOKUP_TABLES = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")
_CELL_PADDING = 256  # llama.cpp rounds caches up to this many cells
_F32 = 4
_ACTIVATION_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0}  # else Q8_0 or Q8_K blocks
_QUANTIZED_ACTIVATION_BYTES = 292 / 256
_ATTENTION_TILE = 64  # rows of queries and of keys that one thread works on
# Interpreter, numpy, the command line and llama.cpp's library, on Linux x86-64 with Python 3.11:
# between 60 and 71 MiB are resident, depending on what the page cache holds of the libraries;
# then llama.cpp's tables per token: those of a byte-level BPE hold merges too.
RUNTIME_BYTES = 73 << 20
LIBRARY_BYTES = 20 << 20  # of that llama.cpp's library at most, which comes with the first load
_VOCABULARY_ENTRY_BYTES = {"gpt2": 345, "tokenizers": 1000}  # the tokenizers package's own tables
_OTHER_VOCABULARY_ENTRY_BYTES = 165
# onnxruntime's library, its arena and the graph: between 34 and 56 MiB are resident, depending on
# version and the page cache holds of the library.
_ONNX_RUNTIME_BYTES = 58 << 20
_ONNX_8_BIT_FACTOR = 1.06  # measured against the blocks' arithmetic; 4-bit ones are as counted
_ONNX_LIVE_TENSORS = 8  # of embedding width at once
# Exported graphs: a block's scale is stored a second time, or a sum with it; scores, their sum with
# the bias and the shares are alive at once, and keys and values joined and for every head; the
# arena rounds what it takes.
_FOLDER_PACKED = 1.2
_FOLDER_ARENA = 1.4
# Of a vocabulary, to pick a token of it: work arrays, the sorted row and its weights where filters
# keep nearly all tokens, and what a grammar asks of each. Measured: up to 53 bytes a token.
SAMPLING_TOKEN_BYTES = 64
HEAD_NODES, HEAD_UNREAD = 8, 65  # tokens of a head's steps, and rows that wait to be fed to it
_PAGES_AROUND = 1 << 16  # what reading one row of a mapped table may bring into memory


@dataclass(frozen=True, slots=True)
class Component:
    """Some bytes with a name and a place: `host` or `gpu`."""

    name: str
    nbytes: int
    is_ceiling: bool = False
    device: str = HOST


@dataclass(frozen=True, slots=True)
class RunShape:
    """The settings that decide how much is allocated; sizes are in tokens.

    `context_size` is what the cache has room for, of all its sequences together. `max_nodes` bounds
    one verification step, and with it the rows of logits. `mapped` weights are
    pages of the file, which repacked copies come on top of; others are read into memory once.
    """

    context_size: int
    batch_size: int
    max_nodes: int
    type_k: str = "f16"
    type_v: str = "f16"
    threads: int = 1
    gpu_layers: int = 0  # negative: all
    mapped: bool = True
    features: frozenset[str] = frozenset()  # of the processor
    kernels: bool = False  # edgespec's own, where they fit
    snapshots: int = 0  # of a recurrent state, besides the one behind the last token
    sequences: int = 1  # that share the cache
    head: bool = False  # whether the block that predicts further tokens is loaded


def padded(cells: int) -> int:
    """Cells llama.cpp allocates for a context of `cells` tokens."""
    return -(-cells // _CELL_PADDING) * _CELL_PADDING


def window_cells(spec: ModelSpec, shape: RunShape) -> int:
    """Cells of a sliding-window layer: what the windows of all can see, and one batch."""
    seen = shape.sequences * spec.sliding_window
    return padded(min(padded(shape.context_size), seen + shape.batch_size))


def kv_cache_bytes(spec: ModelSpec, shape: RunShape, layers: range | None = None) -> int:
    """Bytes of K and V over `layers` (all of them by default)."""
    total = 0.0
    for layer in range(spec.num_layers) if layers is None else layers:
        sliding = spec.is_sliding[layer]
        cells = window_cells(spec, shape) if sliding else padded(shape.context_size)
        key = spec.key_length[layer] * KV_TYPE_BYTES[shape.type_k]
        value = spec.value_length[layer] * KV_TYPE_BYTES[shape.type_v]
        total += cells * spec.num_kv_heads[layer] * (key + value)
    return int(total)


def state_bytes(spec: ModelSpec, shape: RunShape, layers: range | None = None) -> int:
    """Bytes of recurrent state over `layers`: the one behind the last token, and snapshots."""
    values = spec.state_values
    if layers is not None:
        recurring = sum(spec.is_recurrent_layer[layers.start :])
        values = values * recurring // max(1, sum(spec.is_recurrent_layer))
    return _F32 * values * (1 + shape.snapshots)


def is_block_type(kind: str) -> bool:
    """Whether a cache type stores blocks of values with a scale."""
    return kind in _KV_BLOCK


def kv_type_fits(spec: ModelSpec, kind: str) -> bool:
    """Whether the heads of all layers are whole blocks of a cache type."""
    block = _KV_BLOCK.get(kind, 1)
    return all(length % block == 0 for length in (*spec.key_length, *spec.value_length))


def compute_bytes(spec: ModelSpec, shape: RunShape) -> int:
    """Bytes of llama.cpp's buffer for intermediate results of one batch."""
    return compute_buffer_bytes(spec, _batch_shape(spec, shape, shape.max_nodes))


def _batch_shape(spec: ModelSpec, shape: RunShape, outputs: int) -> BatchShape:
    """The largest batch of a run, with logits of at most `outputs` of its tokens."""
    tokens = min(shape.batch_size, shape.context_size)
    rotatable = all(length % 64 == 0 for length in spec.key_length)
    return BatchShape(
        num_tokens=-(-tokens // shape.sequences) * shape.sequences,  # as many of each
        num_outputs=min(tokens, outputs),
        cells=padded(shape.context_size),
        window_cells=window_cells(spec, shape),
        rotates_keys=rotatable and is_block_type(shape.type_k),
        rotates_values=rotatable and is_block_type(shape.type_v),
        casts_keys=shape.type_k == "f32",
        casts_values=shape.type_v == "f32",
        snapshots=shape.snapshots,
    )


def work_bytes(spec: ModelSpec, shape: RunShape) -> int:
    """Bytes the CPU kernels share: one batch of activations in the weights' number format.

    (`ggml/src/ggml-cpu/ggml-cpu.c`, `ggml_graph_plan`; with flash attention, tiles by thread.)
    """
    tokens = min(shape.batch_size, shape.context_size)
    products = (
        _activation_bytes(tensor, tokens, shape)
        for tensor in spec.tensors.values()
        if len(tensor.dims) > 1 and not tensor.name.startswith(_LOOKUP_TABLES)
    )
    head = max(spec.key_length, default=0)
    tile = _ATTENTION_TILE
    attention = _F32 * shape.threads * (4 * tile * head + 2 * tile * tile)
    if shape.kernels:
        cells = padded(shape.context_size)
        for heads, kv_heads, length in set(
            zip(spec.num_heads, spec.num_kv_heads, spec.value_length, strict=True)
        ):
            if kv_heads and length:
                work = attention_work_bytes(tokens, heads, kv_heads, length, cells, shape.threads)
                attention = max(attention, work)
    return int(max(attention, *products, 0))


def weights_bytes(spec: ModelSpec, shape: RunShape) -> tuple[Component, ...]:
    """Bytes of the weights: in the file's format, repacked for the CPU, and on the GPU."""
    host = repacked = gpu = 0
    first = _first_gpu_layer(spec, shape.gpu_layers)
    for tensor in _loaded_tensors(spec, shape):
        if _layer_of(spec, tensor) >= first:
            gpu += tensor.data_bytes
        elif tensor.name == _TABLE and _packs_table(spec, shape):
            repacked += _packed_bytes(tensor)
        elif copy := _repacked_bytes(tensor, shape):
            repacked += copy
        else:
            host += tensor.data_bytes
    if spec.tied_embeddings and (table := spec.tensors.get(_TABLE)):
        # The head reads the table in its own format or place, so it gets a copy of it there.
        head = replace(table, name="output.weight")
        if spec.num_layers >= first:
            gpu += head.data_bytes
        elif not _packs_table(spec, shape):
            repacked += _repacked_bytes(head, shape)
    if shape.mapped:
        host = spec.weight_bytes - gpu
    return (
        Component("weights", host, is_ceiling=shape.mapped),
        Component("weights_repacked", repacked),
        Component("weights", gpu, device=GPU),
    )


def runtime_bytes(spec: ModelSpec) -> int:
    """Bytes of the interpreter, the libraries and llama.cpp's vocabulary."""
    entry = _VOCABULARY_ENTRY_BYTES.get(spec.tokenizer_model, _OTHER_VOCABULARY_ENTRY_BYTES)
    return RUNTIME_BYTES + entry * spec.vocab_size


def footprint(spec: ModelSpec, shape: RunShape, *, drafter_bytes: int = 0) -> tuple[Component, ...]:
    """The components of a whole run."""
    first = min(_first_gpu_layer(spec, shape.gpu_layers), spec.num_layers)
    on_gpu = range(first, spec.num_layers)
    gpu_cache, gpu_state = (part(spec, shape, on_gpu) for part in (kv_cache_bytes, state_bytes))
    compute = compute_bytes(spec, shape)
    parts = (
        *weights_bytes(spec, shape),
        Component("kv_cache", kv_cache_bytes(spec, shape) - gpu_cache),
        Component("kv_cache", gpu_cache, device=GPU),
        Component("recurrent_state", state_bytes(spec, shape) - gpu_state),
        Component("recurrent_state", gpu_state, device=GPU),
        Component("compute", compute, is_ceiling=True),
        Component("compute", compute if on_gpu else 0, is_ceiling=True, device=GPU),
        Component("work", work_bytes(spec, shape), is_ceiling=True),
        Component("logits", shape.max_nodes * spec.vocab_size * _F32, is_ceiling=True),
        Component("drafter_tables", drafter_bytes, is_ceiling=True),
        Component("runtime", runtime_bytes(spec), is_ceiling=True),
    )
    return tuple(part for part in parts if part.nbytes)


def head_footprint(spec: ModelSpec, shape: RunShape) -> tuple[Component, ...]:
    """The components that the head in a model's file adds to a run, its weights apart.

    A context of one layer, and rows of the model for a batch: kept by both contexts, and by the
    drafter while it feeds them.
    """
    layer = f"blk.{spec.num_layers - 1}"
    keys, values = (spec.tensors[f"{layer}.attn_{one}.weight"].dims[1] for one in "kv")
    kinds = KV_TYPE_BYTES[shape.type_k], KV_TYPE_BYTES[shape.type_v]
    cache = padded(shape.context_size) * (keys * kinds[0] + values * kinds[1])
    tokens = 3 * (shape.batch_size + HEAD_NODES) + shape.max_nodes + HEAD_UNREAD
    return (
        Component("head_kv_cache", int(cache)),
        Component("head_compute", head_compute_bytes(spec, _batch_shape(spec, shape, 1))),
        Component("head_rows", tokens * spec.embedding_size * _F32, is_ceiling=True),
        Component("head_logits", spec.vocab_size * _F32, is_ceiling=True),
    )


def draft_model_footprint(spec: ModelSpec, shape: RunShape) -> tuple[Component, ...]:
    """The components that a draft model in llama.cpp adds to a run."""
    return beside_another("draft", spec, footprint(spec, shape))


def beside_another(role: str, spec: ModelSpec, parts: Iterable[Component]) -> tuple[Component, ...]:
    """The components that a model in some `role` adds to a run: there is a runtime already."""
    vocabulary = Component("vocabulary", runtime_bytes(spec) - RUNTIME_BYTES, is_ceiling=True)
    added = (*(part for part in parts if part.name != "runtime"), vocabulary)
    return tuple(replace(part, name=f"{role}_{part.name}") for part in added)


def onnx_footprint(
    spec: ModelSpec, shape: RunShape, *, drafter_bytes: int = 0
) -> tuple[Component, ...]:
    """The components of a run on ONNX Runtime's CPU kernels.

    Weights are mapped from the converted file: a block of 32 takes its 4- or 8-bit numbers, a scale
    and a sum, and another scale that is read while loading. The cache is float32.
    """
    if spec.format == ONNX_FORMAT:
        return folder_footprint(spec, shape, drafter_bytes=drafter_bytes)
    cells = shape.context_size + shape.max_nodes + 1
    weights = sum(
        tensor.data_bytes if len(tensor.dims) < 2 else _onnx_matrix_bytes(tensor)
        for tensor in spec.tensors.values()
        if not tensor.name.startswith(_LOOKUP_TABLES) or spec.tied_embeddings
    )
    values = sum(
        heads * (key + value)
        for heads, key, value in zip(
            spec.num_kv_heads, spec.key_length, spec.value_length, strict=True
        )
    )
    tables = 2 if any(spec.is_sliding) else 1
    widest = max(shape.batch_size, shape.max_nodes)
    rope = tables * cells * max(spec.key_length, default=0) * _F32
    bias = widest * cells * _F32 if any(spec.is_sliding) else shape.max_nodes * cells * _F32
    activations = widest * (
        _ONNX_LIVE_TENSORS * spec.embedding_size + 3 * max(spec.feed_forward_size, default=0)
    )
    return (
        Component("weights", weights, is_ceiling=True),
        Component("kv_cache", cells * values * _F32),
        Component("compute", activations * _F32 + rope + bias, is_ceiling=True),
        Component("logits", shape.max_nodes * spec.vocab_size * _F32),
        Component("drafter_tables", drafter_bytes, is_ceiling=True),
        Component("runtime", runtime_bytes(spec) + _ONNX_RUNTIME_BYTES, is_ceiling=True),
    )


def folder_footprint(
    spec: ModelSpec, shape: RunShape, *, drafter_bytes: int = 0
) -> tuple[Component, ...]:
    """The components of a run of an ONNX model folder.

    Weights are copied as the kernels want them, and of the embedding's table pages with rows that
    were read stay in memory. Each step joins the past with the new rows, layer by layer.
    """
    table = dict(spec.group_bytes)["token_embd"]
    widest = max(shape.batch_size, shape.max_nodes)
    cells = shape.context_size + widest
    heads, length = max(spec.num_heads), max(spec.key_length) + max(spec.value_length)
    scores = 3 * heads * widest * cells
    joined = cells * length * 2 * heads
    activations = widest * (
        _ONNX_LIVE_TENSORS * spec.embedding_size + 3 * max(spec.feed_forward_size)
    )
    compute = int(_FOLDER_ARENA * _F32 * (scores + joined + activations))
    return (
        Component("weights", int(_FOLDER_PACKED * spec.weight_bytes), is_ceiling=True),
        Component("embeddings", min(table, shape.context_size * _PAGES_AROUND), is_ceiling=True),
        Component("kv_cache", shape.context_size * spec.kv_values_per_token * _F32),
        Component("compute", compute, is_ceiling=True),
        Component("logits", shape.max_nodes * spec.vocab_size * _F32, is_ceiling=True),
        Component("drafter_tables", drafter_bytes, is_ceiling=True),
        Component("runtime", runtime_bytes(spec) + _ONNX_RUNTIME_BYTES, is_ceiling=True),
    )


def _onnx_matrix_bytes(tensor: GgufTensor) -> int:
    values = tensor.dims[0] * tensor.dims[1]
    bits = packed_bits(tensor)
    # Numbers, a scale and a sum with them, and the scale again as it was written.
    counted = values * bits // 8 + values // BLOCK * 3 * _F32
    return int(counted * _ONNX_8_BIT_FACTOR) if bits == 8 else counted


def _first_gpu_layer(spec: ModelSpec, gpu_layers: int) -> int:
    """llama.cpp offloads the last layers; the output head counts as the very last one."""
    return 0 if gpu_layers < 0 else max(0, spec.num_layers + 1 - gpu_layers)


def _layer_of(spec: ModelSpec, tensor: GgufTensor) -> int:
    """The layer a tensor belongs to; the head comes after all, lookup tables before."""
    if tensor.name.startswith("blk."):
        number = tensor.name.split(".", 2)[1]
        return int(number) if number.isdigit() else 0
    return -1 if tensor.name.startswith(_LOOKUP_TABLES) else spec.num_layers


def _repacked_bytes(tensor: GgufTensor, shape: RunShape) -> int:
    """Bytes of the copy that kernels read: of weights that are multiplied by, not looked up in."""
    if len(tensor.dims) < 2 or tensor.name.startswith(_LOOKUP_TABLES):
        return 0
    if shape.kernels and (packed := _packed_bytes(tensor)):
        return packed
    sets = _REPACKED_ON.get(tensor.type.name, ())
    whole = tensor.dims[1] % _REPACKED_ROWS == 0
    return tensor.data_bytes if whole and any(needed <= shape.features for needed in sets) else 0


def multiplied_tensors(spec: ModelSpec) -> Iterator[GgufTensor]:
    """Matrices that every step multiplies by: a tied table as well, which is the head."""
    for tensor in spec.tensors.values():
        is_head = spec.tied_embeddings and tensor.name == _TABLE
        if len(tensor.dims) > 1 and (is_head or not tensor.name.startswith(_LOOKUP_TABLES)):
            yield tensor


def _loaded_tensors(spec: ModelSpec, shape: RunShape) -> Iterator[GgufTensor]:
    """All but those of layers that predict further tokens, which are skipped unless wanted."""
    trunk = spec.num_layers - spec.num_prediction_layers
    for tensor in spec.tensors.values():
        if shape.head or not tensor.name.startswith("blk.") or _layer_of(spec, tensor) < trunk:
            yield tensor


def has_packed_weights(spec: ModelSpec) -> bool:
    """Whether edgespec's kernels read any matrix of this file."""
    return any(_packed_bytes(tensor) for tensor in multiplied_tensors(spec))


def _packs_table(spec: ModelSpec, shape: RunShape) -> bool:
    """Whether the embedding table is packed, which is the head, too, and kept once."""
    table = spec.tensors.get(_TABLE) if shape.kernels and spec.tied_embeddings else None
    return table is not None and _packed_bytes(table) > 0


def _packed_bytes(tensor: GgufTensor) -> int:
    """As edgespec's kernels read it; 0 for a matrix that they leave to llama.cpp."""
    columns, rows, *others = tensor.dims
    return packed_bytes(GGML_NUMBERS[tensor.type.name], rows, columns) * prod(others)


def _activation_bytes(tensor: GgufTensor, tokens: int, shape: RunShape) -> float:
    """Bytes of `tokens` activations in the format of the kernel that multiplies this tensor."""
    columns = tensor.dims[0]
    if shape.kernels and _packed_bytes(tensor):
        return product_work_bytes(columns, tokens)
    kind = tensor.type.name
    return tokens * columns * _ACTIVATION_BYTES.get(kind, _QUANTIZED_ACTIVATION_BYTES)
