"""The graph of the head in a model's file: one block more, fed tokens and rows of the model.

Follows `graph_mtp` of `llama.cpp: src/models/qwen35.cpp` and `glm4-moe.cpp`: the embedding of a
token and a row, both normalised, side by side through a matrix, then a block as the model's own.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.memory.bytes.arena import Graph, Tensor
from edgespec.memory.bytes.graph import BatchShape, Builder
from edgespec.memory.bytes.recurrent_graph import DeltaNetBuilder
from edgespec.memory.bytes.results import F32, fed, result
from edgespec.models.spec import ModelSpec

_TOKEN = 4  # bytes of an id


class _Fused(Builder):
    """What both kinds have in common."""

    def __init__(self, spec: ModelSpec, shape: BatchShape) -> None:
        keys = spec.tensors[f"blk.{spec.num_layers - 1}.attn_k.weight"].dims[1]
        heads = *spec.num_kv_heads[:-1], keys // spec.key_length[-1]  # its cache is its own
        super().__init__(replace(spec, num_kv_heads=heads), shape)

    def build(self) -> Graph:
        """The graph of the largest batch."""
        count, width = self.shape.num_tokens, self.spec.embedding_size
        looked_up = result(count, width, fed(count * _TOKEN))
        joined = result(count, 2 * width, self._norm(looked_up), self._norm(_rows(count, width)))
        cur = self._layer(result(count, width, joined), self.spec.num_layers - 1, last=False)
        cur = self._norm(cur)
        cur.is_output = True
        outputs = self.shape.num_outputs
        shown = result(outputs, width, cur, self.out_ids)
        logits = result(outputs, self.spec.vocab_size, shown)
        logits.is_output = True
        self.graph.add(logits)
        return self.graph


class _GatedHead(_Fused, DeltaNetBuilder):
    """Qwen 3.5: the block attends with a gate."""


def _rows(count: int, width: int) -> Tensor:
    return Tensor(count * width * F32, (count, width), is_input=True)


_BUILDERS: dict[str, type[Builder]] = {"qwen35": _GatedHead, "qwen35moe": _GatedHead}


def head_compute_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the head's largest batch."""
    return _BUILDERS.get(spec.arch, _Fused)(spec, shape).build().buffer_bytes()
