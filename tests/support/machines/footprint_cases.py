"""A small model whose footprint is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.memory.bytes.config import RunConfig
from edgespec.models.gguf.ggml_types import GGML_TYPES, GgmlType
from edgespec.models.gguf.reader import GgufTensor
from edgespec.models.spec import ModelSpec

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


def tensor(name: str, dims: tuple[int, ...], kind: GgmlType | str) -> GgufTensor:
    """As in a file: `dims` fastest first."""
    kind = TYPES[kind] if isinstance(kind, str) else kind
    values = 1
    for size in dims:
        values *= size
    return GgufTensor(name, kind, dims, 0, values // kind.block_size * kind.block_bytes)


def model(*tensors: GgufTensor, **changes: Any) -> ModelSpec:
    """Two layers, embedding 64, 4 heads of 16, 2 of them for keys and values."""
    spec = ModelSpec(
        path=Path("tiny.gguf"), files=(Path("tiny.gguf"),), file_bytes=0,
        weight_bytes=sum(one.data_bytes for one in tensors), fingerprint="f00d", arch="llama",
        name="tiny", file_type="Q4_0", notes=(), num_layers=2, num_prediction_layers=0,
        embedding_size=64, vocab_size=1000, context_length=32768, feed_forward_size=(96, 96),
        num_heads=(4, 4), num_kv_heads=(2, 2), key_length=(16, 16), value_length=(16, 16),
        sliding_window=0, is_sliding=(False, False), num_experts=0, num_experts_used=0,
        expert_feed_forward_size=0, keeps_state=False,
        is_recurrent_layer=(False, False),
        tied_embeddings=all(one.name != "output.weight" for one in tensors), table_bytes=0,
        expert_bytes=0, type_bytes=(), chat_template=None, bos_id=None, eos_id=None,
        tokenizer_model="gpt2", tokenizer_hash="",
        tensors={one.name: one for one in tensors},
    )  # fmt: skip
    return replace(spec, **changes)


def shape(context_size: int = 1000, batch_size: int = 256, **changes: Any) -> RunConfig:
    return RunConfig(context_size, batch_size, **{"max_nodes": 32, **changes})


# 64 x 1000 values of Q4_0, 18 bytes in 32: 36,000 bytes. A layer: 64 x 64, 2,304 bytes. Its norm:
# 256 bytes. A head of its own in Q6_K needs rows of 256, so that one is made of Q8_0: 68,000.
TABLE = tensor("token_embd.weight", (64, 1000), "Q4_0")
HEAD = tensor("output.weight", (64, 1000), "Q8_0")
NORM = tensor("output_norm.weight", (64,), "F32")
LAYERS = [
    one
    for number in range(2)
    for one in (
        tensor(f"blk.{number}.attn_norm.weight", (64,), "F32"),
        tensor(f"blk.{number}.attn_q.weight", (64, 64), "Q4_0"),
    )
]
UNTIED = model(TABLE, HEAD, NORM, *LAYERS)
TIED = model(TABLE, NORM, *LAYERS)
SPEC = model()
