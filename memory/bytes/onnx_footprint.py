"""How many bytes a run on ONNX Runtime takes, by component, as `footprint` has it for llama.cpp."""

from __future__ import annotations

from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import F32, TEXT_TOKEN_BYTES, Component, runtime_bytes
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.onnx.facts import BLOCK, packed_bits
from edgespec.models.spec import LOOKUP_TABLES, ONNX_FORMAT, ModelSpec

# onnxruntime's library, its arena, the graph and our modules for it: 42 to 48 MiB were measured,
# with what the C library keeps of freed memory, which `runtime_bytes` counts.
_ONNX_RUNTIME_BYTES = 47 << 20
# By how much a matrix takes more than it keeps while it is read, in parts of that: 1.4 and 1.5 were
# measured, of heads of 49,152 and 262,144 tokens.
_LOADED_AT_ONCE = 1.6
_ONNX_8_BIT_FACTOR = 1.06  # measured against the blocks' arithmetic; 4-bit ones are as counted
_ONNX_LIVE_TENSORS = 8  # of embedding width at once
# Exported graphs: a block's scale is stored a second time, or a sum with it; scores, their sum with
# the bias and the shares are alive at once, and keys and values joined and for every head; the
# arena rounds what it takes.
_FOLDER_PACKED = 1.2
_FOLDER_ARENA = 1.4
_PAGES_AROUND = 1 << 16  # what reading one row of a mapped table may bring into memory


def onnx_footprint(
    spec: ModelSpec, config: RunConfig, *, drafter_bytes: int = 0
) -> tuple[Component, ...]:
    """The components of a run on ONNX Runtime's CPU kernels, whose cache is float32.

    Weights of a GGUF are mapped from the converted file: a block of 32 takes its 4- or 8-bit
    numbers, a scale and a sum, and another scale that is read while loading. Those of a folder are
    copied as the kernels want them, and of the embedding's table pages with rows that were read
    stay in memory; each of its steps joins the past with the new rows, layer by layer.
    """
    is_folder = spec.format == ONNX_FORMAT
    widest = max(config.batch_size, config.max_nodes)
    inside = 3 * max(spec.feed_forward_size, default=0)
    live = widest * (_ONNX_LIVE_TENSORS * spec.embedding_size + inside)
    if is_folder:
        cells, joined_cells, loading = config.context_size, config.context_size + widest, 0.0
        weights = int(_FOLDER_PACKED * spec.weight_bytes)
        heads, length = max(spec.num_heads), max(spec.key_length) + max(spec.value_length)
        scores, joined = 3 * heads * widest * joined_cells, joined_cells * length * 2 * heads
        compute = int(_FOLDER_ARENA * F32 * (scores + joined + live))
    else:
        cells = config.context_size + config.max_nodes + 1
        tensors = [
            tensor
            for tensor in spec.tensors.values()
            if not tensor.name.startswith(LOOKUP_TABLES) or spec.tied_embeddings
        ]
        sizes = [_matrix_bytes(one) for one in tensors if len(one.dims) > 1]
        loading = _LOADED_AT_ONCE * max(sizes, default=0)
        weights = sum(sizes) + sum(one.data_bytes for one in tensors if len(one.dims) < 2)
        slides = any(spec.is_sliding)
        rope = (1 + slides) * cells * max(spec.key_length, default=0)
        bias = (widest if slides else config.max_nodes) * cells
        compute = F32 * (live + rope + bias)
    rows_read = min(spec.table_bytes, config.context_size * _PAGES_AROUND) * is_folder
    parts: tuple[Component, ...] = (
        Component("weights", weights, is_ceiling=True),
        Component("embeddings", rows_read, is_ceiling=True),
        Component("kv_cache", cells * spec.kv_values_per_token * F32),
        Component("compute", compute, is_ceiling=True),
        Component("logits", config.max_nodes * spec.vocab_size * F32, is_ceiling=True),
        Component("drafter_tables", drafter_bytes, is_ceiling=True),
        Component("text", TEXT_TOKEN_BYTES * config.context_size, is_ceiling=True),
    )
    others = sum(part.nbytes for part in parts[1:])  # which come behind the weights
    parts += (
        Component("loading", max(0, int(loading) - others), is_ceiling=True),
        Component("runtime", runtime_bytes(spec) + _ONNX_RUNTIME_BYTES, is_ceiling=True),
    )
    return tuple(part for part in parts if part.nbytes)


def _matrix_bytes(tensor: GgufTensor) -> int:
    values, bits = tensor.dims[0] * tensor.dims[1], packed_bits(tensor)
    # Numbers, a scale and a sum with them, and the scale again as it was written.
    counted = values * bits // 8 + values // BLOCK * 3 * F32
    return int(counted * _ONNX_8_BIT_FACTOR) if bits == 8 else counted
