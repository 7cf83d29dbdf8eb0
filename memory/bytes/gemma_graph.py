"""The graph of Gemma 4, as `edgespec.memory.bytes.graph` describes others.

Order and shapes follow `llama.cpp: src/models/gemma4.cpp`. All tokens go through all layers, since
an assistant may read their rows. Some layers look into the caches of others, and in the small sizes
each adds what the embedding of a token has for it alone.
"""

from __future__ import annotations

from edgespec.memory.bytes.arena import Tensor
from edgespec.memory.bytes.graph import BatchShape, Builder, rotated
from edgespec.memory.bytes.results import (
    F32,
    added,
    fed,
    over,
    reshaped,
    result,
    stored,
    view,
)
from edgespec.models.spec import ModelSpec

_TOKEN = 4  # bytes of an id


class Gemma4Builder(Builder):
    """On the host alone, without experts."""

    narrows_at_the_end = True

    def __init__(self, spec: ModelSpec, shape: BatchShape) -> None:
        super().__init__(spec, shape)
        gate = spec.tensors.get("blk.0.inp_gate.weight")
        self._own_width = gate.dims[1] if gate else 0
        self._own: Tensor | None = None  # what tokens have for each layer

    def _embeddings(self) -> Tensor:
        inputs = over(super()._embeddings())
        if not self._own_width:
            return inputs
        count, width = self.shape.num_tokens, self._own_width * self.spec.num_layers
        rows = result(count, width, fed(count * _TOKEN))
        looked_up = self.graph.add(over(reshaped(rows, count, width)))
        projected = over(result(count, width, inputs))
        normed = over(over(reshaped(projected, count, width)))
        summed = over(Tensor(normed.nbytes, normed.shape, (normed, looked_up), in_place=True))
        self._own = result(count, width, view(summed))
        return inputs

    def _layer(self, inputs: Tensor, layer: int, *, last: bool) -> Tensor:
        cur = super()._layer(inputs, layer, last=False)
        if self._own is not None:
            count = self.shape.num_tokens
            gated = added(over(result(count, self._own_width, cur)), view(self._own))
            cur = added(cur, self._norm(result(count, self.spec.embedding_size, gated)))
        return over(cur) if self._has(layer, "layer_output_scale.weight") else cur

    def _attention(self, cur: Tensor, layer: int) -> Tensor:
        spec, count = self.spec, self.shape.num_tokens
        inputs = self.attention_inputs[spec.is_sliding[layer]]
        queries = spec.num_heads[layer] * spec.key_length[layer]
        kept = spec.num_kv_heads[layer] * spec.key_length[layer]
        query = rotated(self._turned(cur, queries), inputs.key_rotation, count * queries)
        self.graph.add(query)
        if kept:
            keys = rotated(self._turned(cur, kept), inputs.key_rotation, count * kept)
            values = over(reshaped(result(count, kept, cur), count, kept))
            values = rotated(values, inputs.value_rotation, count * kept)
            for tensor in (keys, values):
                self.graph.add(tensor)
            for tensor, places in ((keys, inputs.keys), (values, inputs.values)):
                self.graph.add(stored(view(tensor), places))
        attended = self.graph.add(view(result(count, queries, view(query), inputs.mask)))
        mixed = rotated(attended, inputs.value_rotation, count * queries)
        return result(count, spec.embedding_size, mixed)

    def _turned(self, cur: Tensor, width: int) -> Tensor:
        """Heads, normalised, then rotated by position."""
        count = self.shape.num_tokens
        normed = over(over(reshaped(result(count, width, cur), count, width)))
        return Tensor(count * width * F32, normed.shape, (normed, self.positions), in_place=True)
