"""How many bytes a run will allocate, by component, before anything is loaded.

Pure arithmetic over a ModelSpec, after `llama.cpp` of llama-cpp-python 0.3.36; docs/memory.md
compares it with what llama.cpp says it allocated. A component is an allocation (llama.cpp takes
exactly that and touches it) or a ceiling (it may grow to that, or is touched as it is used).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from edgespec.memory.bytes.graph import BatchShape, compute_buffer_sizes
from edgespec.memory.bytes.places import (
    HEAD,
    LOOKUP_TABLES,
    TABLE,
    device_layers,
    holder,
    is_taken,
    layer_of,
    loaded_tensors,
    takes_all,
)
from edgespec.memory.bytes.recurrent_graph import compute_buffer_bytes
from edgespec.memory.device.kernels import (
    attention_work_bytes,
    packed_bytes,
    product_work_bytes,
)
from edgespec.memory.device.taking import Weight
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import ModelSpec

HOST, GPU, WORKER = "host", "gpu", "worker"  # labels; of several with a number
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
# What edgespec's kernels keep as it is. They read such matrices beside quantized ones, and none
# of a file that has no others.
_FLOATS = ("F32", "F16", "BF16")
_DOWN_EXPERTS = "ffn_down_exps.weight"  # whose inputs are as many as a token has experts
_MULTIPLIED_VECTOR = "ffn_gate_inp_shexp.weight"  # the gate of a shared expert
_CELL_PADDING = 256  # llama.cpp rounds caches up to this many cells
_F32 = 4
_ACTIVATION_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0}  # else Q8_0 or Q8_K blocks
_QUANTIZED_ACTIVATION_BYTES = 292 / 256
# What llama.cpp multiplies in tiles on x86-64 where weights are not rearranged, and its scratch for
# a thread (`ggml/src/ggml-cpu/tiled/tiled.cpp`, `ggml_tiled_supported`).
_TILED = frozenset(
    "Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ3_XXS IQ3_S IQ2_XXS IQ2_XS IQ2_S IQ1_S IQ1_M".split()
)
_TILE_BYTES = 512 << 10
_CACHE_LINE = 64
_COUNT_BYTES = 8  # of a number of tokens, and of a token with its place among an expert's
_ATTENTION_TILE = 64  # rows of queries and of keys that one thread works on
# Interpreter, numpy, the command line and llama.cpp's library, on Linux x86-64 with Python 3.11:
# between 60 and 71 MiB are resident, depending on what the page cache holds of the libraries;
# then llama.cpp's tables per token: those of a byte-level BPE hold merges too.
RUNTIME_BYTES = 73 << 20
# Of that llama.cpp's library at most, and our modules that decode: both come with the first load.
LIBRARY_BYTES = 26 << 20
_VOCABULARY_ENTRY_BYTES = {"gpt2": 345, "tokenizers": 1000}  # the tokenizers package's own tables
_OTHER_VOCABULARY_ENTRY_BYTES = 165
# Of a vocabulary, to pick a token of it: work arrays, the sorted row and its weights where filters
# keep nearly all tokens, and what a grammar asks of each. Measured: up to 53 bytes a token.
SAMPLING_TOKEN_BYTES = 64
# Of a vocabulary, for schemas and grammars: what is known of each token and of usual strings, built
# at the first use. Measured: 285 to 403 bytes a token. The state of an answer: of 185 public
# schemas under 3 MiB, mostly far less; 8 MiB of one with ten long patterns.
GRAMMAR_TOKEN_BYTES = 410
GRAMMAR_STATE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Component:
    """Some bytes with a name and a place: `host`, or the label of another device."""

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
    Several devices, or those of workers, have `split`: their labels, and how many of the last
    layers each has, the head being one; those of the first one come first.
    """

    context_size: int
    batch_size: int
    max_nodes: int
    type_k: str = "f16"
    type_v: str = "f16"
    threads: int = 1
    gpu_layers: int = 0  # negative: all
    split: tuple[tuple[str, int], ...] = ()
    takes: Callable[[str, Weight], bool] = takes_all  # whether a device has a weight of its layers
    mapped: bool = True
    features: frozenset[str] = frozenset()  # of the processor
    kernels: bool = False  # edgespec's own, where they fit
    snapshots: int = 0  # of a recurrent state, besides the one behind the last token
    sequences: int = 1  # that share the cache
    leaves: int = 1  # of the largest tree: each but the first is a sequence for one step
    head: bool = False  # whether the block that predicts further tokens is loaded
    hands_out: tuple[int, ...] = ()  # layers whose inputs a head in a file of its own reads

    def counts(self, everything: int) -> tuple[tuple[str, int], ...]:
        """How many of all layers each device has, the last ones, by its label."""
        all_there = self.gpu_layers < 0 or self.gpu_layers > everything
        return self.split or ((GPU, everything if all_there else self.gpu_layers),)


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
        recurring = sum(spec.is_recurrent_layer[layers.start : layers.stop])
        values = values * recurring // max(1, sum(spec.is_recurrent_layer))
    return _F32 * values * (1 + shape.snapshots)


def is_block_type(kind: str) -> bool:
    """Whether a cache type stores blocks of values with a scale."""
    return kind in _KV_BLOCK


def kv_type_fits(spec: ModelSpec, kind: str) -> bool:
    """Whether the heads of all layers are whole blocks of a cache type."""
    block = _KV_BLOCK.get(kind, 1)
    return all(length % block == 0 for length in (*spec.key_length, *spec.value_length))


def compute_sizes(spec: ModelSpec, shape: RunShape, devices: Sequence[range]) -> tuple[int, ...]:
    """Bytes of llama.cpp's buffers for a batch's results: the host's, and each device's by layers.

    Of models with recurrent layers the whole buffer on each: a ceiling.
    """
    batch = batch_shape(spec, shape, shape.max_nodes)
    if spec.is_recurrent or spec.is_hybrid or not devices:
        return (compute_buffer_bytes(spec, batch),) * (1 + len(devices))
    return compute_buffer_sizes(spec, batch, devices)


def batch_shape(spec: ModelSpec, shape: RunShape, outputs: int) -> BatchShape:
    """The largest batch of a run, with logits of at most `outputs` of its tokens."""
    tokens = min(shape.batch_size, shape.context_size)
    sequences = shape.sequences + shape.leaves - 1
    rotatable = all(length % 64 == 0 for length in spec.key_length)
    return BatchShape(
        num_tokens=-(-tokens // sequences) * sequences,  # as many of each
        num_outputs=min(tokens, outputs),
        cells=padded(shape.context_size),
        window_cells=window_cells(spec, shape),
        rotates_keys=rotatable and is_block_type(shape.type_k),
        rotates_values=rotatable and is_block_type(shape.type_v),
        casts_keys=shape.type_k == "f32",
        casts_values=shape.type_v == "f32",
        snapshots=shape.snapshots,
        hands_out=shape.hands_out,
    )


def work_bytes(spec: ModelSpec, shape: RunShape) -> int:
    """Bytes the CPU kernels share: one batch of activations in the weights' number format.

    (`ggml/src/ggml-cpu/ggml-cpu.c`, `ggml_graph_plan`; with flash attention, tiles by thread.)
    """
    tokens = min(shape.batch_size, shape.context_size)
    outputs = min(tokens, shape.max_nodes)
    products = (
        product_bytes(
            tensor,
            outputs if tensor.name in (TABLE, HEAD) else tokens,
            shape,
            spec.num_experts_used,
        )
        for tensor in multiplied_tensors(spec)
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
    """Bytes of the weights: in the file's format, repacked for the CPU, and on other devices."""
    host = repacked = 0
    devices = device_layers(spec, shape)
    there = dict.fromkeys(devices, 0)
    is_alone = not any(count for _, count in shape.counts(spec.num_layers + 1))
    packs_table = is_alone and _packs_table(spec, shape)
    for tensor in loaded_tensors(spec, shape):
        device = holder(devices, layer_of(spec, tensor))
        if device is not None and is_taken(spec, shape, device, tensor):
            there[device] += tensor.data_bytes
        elif tensor.name == TABLE and packs_table:
            repacked += _packed_bytes(tensor)
        elif copy := _repacked_bytes(tensor, shape):
            repacked += copy
        else:
            host += tensor.data_bytes
    on_devices = sum(there.values())
    if spec.tied_embeddings and (table := spec.tensors.get(TABLE)):
        # The head reads the table in its own format or place, so it gets a copy of it there.
        head = replace(table, name=HEAD)
        if (device := holder(devices, spec.num_layers)) is not None:
            there[device] += head.data_bytes
            on_devices += head.data_bytes
        elif not packs_table:
            repacked += _repacked_bytes(head, shape)
    if shape.mapped:
        host = spec.weight_bytes - on_devices
    parts = (Component("weights", size, device=label) for label, size in there.items())
    return (
        Component("weights", host, is_ceiling=shape.mapped),
        Component("weights_repacked", repacked),
        *parts,
    )


def runtime_bytes(spec: ModelSpec) -> int:
    """Bytes of the interpreter, the libraries and llama.cpp's vocabulary."""
    entry = _VOCABULARY_ENTRY_BYTES.get(spec.tokenizer_model, _OTHER_VOCABULARY_ENTRY_BYTES)
    return RUNTIME_BYTES + entry * spec.vocab_size


def footprint(spec: ModelSpec, shape: RunShape, *, drafter_bytes: int = 0) -> tuple[Component, ...]:
    """The components of a whole run."""
    devices = device_layers(spec, shape)
    layers = [range(one.start, min(one.stop, spec.num_layers)) for one in devices.values()]
    caches = [kv_cache_bytes(spec, shape, one) for one in layers]
    states = [state_bytes(spec, shape, one) if one else 0 for one in layers]
    compute, *computes = compute_sizes(spec, shape, tuple(devices.values()))
    parts = (
        *weights_bytes(spec, shape),
        Component("kv_cache", kv_cache_bytes(spec, shape) - sum(caches)),
        *_on_devices("kv_cache", devices, caches),
        Component("recurrent_state", state_bytes(spec, shape) - sum(states)),
        *_on_devices("recurrent_state", devices, states),
        Component("compute", compute, is_ceiling=True),
        *_on_devices("compute", devices, computes, is_ceiling=True),
        Component("work", work_bytes(spec, shape), is_ceiling=True),
        Component("logits", shape.max_nodes * spec.vocab_size * _F32, is_ceiling=True),
        Component("drafter_tables", drafter_bytes, is_ceiling=True),
        Component("runtime", runtime_bytes(spec), is_ceiling=True),
    )
    return tuple(part for part in parts if part.nbytes)


def _on_devices(
    name: str, labels: Iterable[str], sizes: Iterable[int], is_ceiling: bool = False
) -> Iterator[Component]:
    for label, size in zip(labels, sizes, strict=True):
        yield Component(name, size, is_ceiling, label)


def draft_model_footprint(spec: ModelSpec, shape: RunShape) -> tuple[Component, ...]:
    """The components that a draft model in llama.cpp adds to a run."""
    return beside_another("draft", spec, footprint(spec, shape))


def beside_another(role: str, spec: ModelSpec, parts: Iterable[Component]) -> tuple[Component, ...]:
    """The components that a model in some `role` adds to a run: there is a runtime already."""
    vocabulary = Component("vocabulary", runtime_bytes(spec) - RUNTIME_BYTES, is_ceiling=True)
    added = (*(part for part in parts if part.name != "runtime"), vocabulary)
    return tuple(replace(part, name=f"{role}_{part.name}") for part in added)


def _repacked_bytes(tensor: GgufTensor, shape: RunShape) -> int:
    """Bytes of the copy that kernels read: of weights that are multiplied by, not looked up in."""
    if not _is_multiplied(tensor):
        return 0
    if shape.kernels and (packed := _packed_bytes(tensor)):
        return packed
    sets = _REPACKED_ON.get(tensor.type.name, ())
    whole = prod(tensor.dims[1:2]) % _REPACKED_ROWS == 0
    return tensor.data_bytes if whole and any(needed <= shape.features for needed in sets) else 0


def _is_multiplied(tensor: GgufTensor) -> bool:
    is_matrix = len(tensor.dims) > 1 and "norm." not in tensor.name
    is_gate = tensor.name.endswith(_MULTIPLIED_VECTOR)
    return (is_matrix or is_gate) and not tensor.name.startswith(LOOKUP_TABLES)


def multiplied_tensors(spec: ModelSpec) -> Iterator[GgufTensor]:
    """Matrices that every step multiplies by: a tied table as well, which is the head."""
    for tensor in spec.tensors.values():
        if _is_multiplied(tensor) or (spec.tied_embeddings and tensor.name == TABLE):
            yield tensor


def has_packed_weights(spec: ModelSpec) -> bool:
    """Whether edgespec's kernels read any quantized matrix of this file."""
    multiplied = multiplied_tensors(spec)
    return any(_packed_bytes(one) for one in multiplied if one.type.name not in _FLOATS)


def _packs_table(spec: ModelSpec, shape: RunShape) -> bool:
    """Whether the embedding table is packed, which is the head, too, and kept once."""
    table = spec.tensors.get(TABLE) if shape.kernels and spec.tied_embeddings else None
    return table is not None and _packed_bytes(table) > 0


def _packed_bytes(tensor: GgufTensor) -> int:
    """As edgespec's kernels read it; 0 for a matrix that they leave to llama.cpp."""
    columns, rows, *others = *tensor.dims, 1
    return packed_bytes(GGML_NUMBERS[tensor.type.name], rows, columns) * prod(others)


def product_bytes(tensor: GgufTensor, tokens: int, shape: RunShape, used: int = 0) -> int:
    """Bytes of work memory for the product of a matrix and `tokens`.

    Of experts' matrices each token is multiplied by those of `used` experts.
    """
    columns, kind = tensor.dims[0], tensor.type.name
    is_packed = shape.kernels and _packed_bytes(tensor) > 0
    experts = tensor.dims[2] if len(tensor.dims) > 2 else 0
    rows = tokens * (max(1, used) if tensor.name.endswith(_DOWN_EXPERTS) else 1)
    if is_packed:
        routing = _COUNT_BYTES * (experts + 1 + tokens * used) + 2 * _CACHE_LINE if experts else 0
        return product_work_bytes(columns, rows) + routing
    activations = int(rows * columns * _ACTIVATION_BYTES.get(kind, _QUANTIZED_ACTIVATION_BYTES))
    if experts:
        places = _COUNT_BYTES * (experts * (1 + tokens * used) + 3)
        activations += places + _CACHE_LINE * (experts + 1)
    is_tiled = kind in _TILED and "avx2" in shape.features and not _repacked_bytes(tensor, shape)
    tiles = _CACHE_LINE + _TILE_BYTES * shape.threads if is_tiled else 0
    return activations + tiles
