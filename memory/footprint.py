"""How many bytes a run will allocate, by component, before anything is loaded.

Pure arithmetic over a ModelSpec. Every number is a ceiling: buffers are touched lazily, so the
resident bytes can be smaller.
"""

from __future__ import annotations

from edgespec.models.spec import ModelSpec

# Bytes per value of a KV cache; block types store a 2-byte scale per 32 values.
KV_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
# Tensor types that llama.cpp's CPU backend rewrites into blocks of rows. The copy stays in memory
# beside the mapped file.
_REPACKED_TYPES = ("Q4_0", "Q4_K", "IQ4_NL", "Q2_K")
_CELL_PADDING = 256  # llama.cpp rounds caches up to this many cells
_RUNTIME_BYTES = 72 << 20  # interpreter, numpy, llama.cpp's library, tokenizer of 50k entries
_VOCABULARY_ENTRY_BYTES = 320  # llama.cpp's tables per token


def padded(cells: int) -> int:
    """Cells llama.cpp allocates for a context of `cells` tokens."""
    return -(-cells // _CELL_PADDING) * _CELL_PADDING


def kv_cache_bytes(
    spec: ModelSpec, context_size: int, batch_size: int, type_k: str = "f16", type_v: str = "f16"
) -> int:
    """Bytes of K and V over all layers.

    A sliding-window layer keeps as many cells as its window can see, plus one batch.
    """
    total = 0.0
    for layer in range(spec.num_layers):
        cells = padded(context_size)
        if spec.is_sliding[layer]:
            cells = min(cells, padded(spec.sliding_window + batch_size))
        key = spec.key_length[layer] * KV_TYPE_BYTES[type_k]
        value = spec.value_length[layer] * KV_TYPE_BYTES[type_v]
        total += cells * spec.num_kv_heads[layer] * (key + value)
    return int(total) + 4 * spec.state_values


def compute_bytes(spec: ModelSpec, batch_size: int, output_rows: int, context_size: int) -> int:
    """Bytes of intermediate results: the widest layer over one batch, masks, and logits rows."""
    widest = max(spec.feed_forward_size, default=0) or 4 * spec.embedding_size
    activations = batch_size * (2 * widest + 6 * spec.embedding_size) * 4
    mask = batch_size * padded(context_size) * (4 + 2)  # as numbers, and again in half precision
    return activations + mask + output_rows * spec.vocab_size * 4


def weights_bytes(spec: ModelSpec, gpu_layers: int) -> dict[str, int]:
    """Bytes of the weights: the file's own, and the copies the CPU backend repacks."""
    parts = {"weights": spec.weight_bytes}
    if gpu_layers == 0:
        embedding = dict(spec.group_bytes).get("token_embd", 0)
        repacked = sum(size for kind, size in spec.type_bytes if kind in _REPACKED_TYPES)
        if spec.file_type.startswith(_REPACKED_TYPES) and not spec.tied_embeddings:
            repacked = max(0, repacked - embedding)  # the lookup table is never repacked
        parts["weights_repacked"] = repacked
    return parts


def footprint(
    spec: ModelSpec,
    *,
    context_size: int,
    batch_size: int,
    max_nodes: int,
    type_k: str,
    type_v: str,
    gpu_layers: int,
    drafter_bytes: int,
) -> dict[str, int]:
    """Bytes by component of a whole run, each a ceiling."""
    return {
        **weights_bytes(spec, gpu_layers),
        "kv_cache": kv_cache_bytes(spec, context_size, batch_size + max_nodes, type_k, type_v),
        "compute": compute_bytes(spec, batch_size + max_nodes, max_nodes, context_size),
        "logits": max_nodes * spec.vocab_size * 4,
        "drafter_tables": drafter_bytes,
        "runtime": _RUNTIME_BYTES + spec.vocab_size * _VOCABULARY_ENTRY_BYTES,
    }
