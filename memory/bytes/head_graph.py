"""The graphs of heads: one block more, fed tokens and rows of the model.

In the model's file they follow `graph_mtp` of `llama.cpp: src/models/qwen35.cpp` and
`glm4-moe.cpp`: the embedding of a token and a row, both normalised, side by side through a matrix,
then a block as the model's own. In a file of its own, `src/models/eagle3.cpp`: the block attends to
both side by side.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.memory.bytes.arena import Graph, Tensor
from edgespec.memory.bytes.graph import BatchShape, Builder
from edgespec.memory.bytes.recurrent_graph import DeltaNetBuilder
from edgespec.memory.bytes.results import F32, added, fed, over, result
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


class _Eagle(Builder):
    """The decoder of an EAGLE-3 head, with logits of all tokens."""

    def build(self) -> Graph:
        """The graph of the largest batch."""
        spec, graph = self.spec, self.graph
        count, width = self.shape.num_tokens, spec.embedding_size
        embedding, row = result(count, width, fed(count * _TOKEN)), _rows(count, width)
        normed = self._norm(embedding), self._norm(row)
        joined = result(count, 2 * width, *normed)
        attended = self._attention(joined, 0)
        keeps_normed = spec.reads is not None and spec.reads.keeps_normed
        residual = added(attended, normed[1] if keeps_normed else row)
        cur = added(self._feed_forward(self._norm(residual), 0, count), residual)
        cur.is_output = True
        logits = result(count, self._rows_of_head, self._norm(cur))
        if "d2t" in spec.tensors:
            everywhere = over(fed(count * spec.vocab_size * F32))
            logits = Tensor(0, None, (logits, everywhere), view_of=everywhere)
        logits.is_output = True
        graph.add(logits)
        return graph

    @property
    def _rows_of_head(self) -> int:
        d2t = self.spec.tensors.get("d2t")
        return self.spec.vocab_size if d2t is None else d2t.dims[0]


def eagle_compute_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the largest batch of a head in a file of its own."""
    return _Eagle(spec, shape).build().buffer_bytes()


_BUILDERS: dict[str, type[Builder]] = {"qwen35": _GatedHead, "qwen35moe": _GatedHead}


def head_compute_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the head's largest batch."""
    return _BUILDERS.get(spec.arch, _Fused)(spec, shape).build().buffer_bytes()
