"""The graphs of heads: one block more, fed tokens and rows of the model.

In the model's file they follow `graph_mtp` of `llama.cpp: src/models/qwen35.cpp` and
`glm4-moe.cpp`: the embedding of a token and a row, both normalised, side by side through a matrix,
then a block as the model's own. In a file of its own, `src/models/eagle3.cpp`: the block attends to
both side by side. In `src/models/dflash.cpp` several blocks read tokens alone. One that looks into
its model's cache (`src/models/gemma4-assistant.cpp`) has several blocks, which attend to what is
there.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.memory.bytes.arena import Graph, Tensor
from edgespec.memory.bytes.graph import BatchShape, Builder, rotated
from edgespec.memory.bytes.recurrent_graph import DeltaNetBuilder
from edgespec.memory.bytes.results import F32, added, fed, over, result, view
from edgespec.models.heads import DRAFTED
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


class _ShowsAll(Builder):
    """A head with logits of all tokens, spread over its model's vocabulary."""

    def _show(self, cur: Tensor) -> Graph:
        spec, count = self.spec, self.shape.num_tokens
        d2t = spec.tensors.get(DRAFTED)
        width = spec.vocab_size if d2t is None else d2t.dims[0]
        logits = result(count, width, cur)
        if d2t is not None:
            everywhere = over(fed(count * spec.vocab_size * F32))
            logits = Tensor(0, None, (logits, everywhere), view_of=everywhere)
        logits.is_output = True
        self.graph.add(logits)
        return self.graph


class _Block(_ShowsAll):
    """A step of a DFlash head over a block of tokens."""

    def build(self) -> Graph:
        """The graph of the largest batch."""
        count, width = self.shape.num_tokens, self.spec.embedding_size
        cur = result(count, width, fed(count * _TOKEN))
        for layer in range(self.spec.num_layers):
            cur = self._layer(cur, layer, last=False)
        cur = self._norm(cur)
        cur.is_output = True
        return self._show(cur)


def block_compute_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the largest batch of a DFlash head."""
    return _Block(spec, shape).build().buffer_bytes()


class _Eagle(_ShowsAll):
    """The decoder of an EAGLE-3 head."""

    def build(self) -> Graph:
        """The graph of the largest batch."""
        spec = self.spec
        count, width = self.shape.num_tokens, spec.embedding_size
        embedding, row = result(count, width, fed(count * _TOKEN)), _rows(count, width)
        normed = self._norm(embedding), self._norm(row)
        joined = result(count, 2 * width, *normed)
        attended = self._attention(joined, 0)
        keeps_normed = spec.reads is not None and spec.reads.keeps_normed
        residual = added(attended, normed[1] if keeps_normed else row)
        cur = added(self._feed_forward(self._norm(residual), 0, count), residual)
        cur.is_output = True
        return self._show(self._norm(cur))


def eagle_compute_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the largest batch of a head in a file of its own."""
    return _Eagle(spec, shape).build().buffer_bytes()


class _Assistant(Builder):
    """One that looks into its model's cache, fed rows of `width` values."""

    def __init__(self, spec: ModelSpec, shape: BatchShape, width: int) -> None:
        super().__init__(spec, shape)
        self._width = width

    def build(self) -> Graph:
        """The graph of the largest batch."""
        count, spec = self.shape.num_tokens, self.spec
        embedding = over(result(count, self._width, fed(count * _TOKEN)))
        joined = result(count, 2 * self._width, embedding, _rows(count, self._width))
        cur = result(count, spec.embedding_size, joined)
        for layer in range(spec.num_layers):
            cur = over(self._layer(cur, layer, last=layer == spec.num_layers - 1))
        cur = self._norm(cur)
        for width in (spec.vocab_size, self._width):  # logits, and a row to go on with
            shown = result(self.shape.num_outputs, width, cur)
            shown.is_output = True
            self.graph.add(shown)
        return self.graph

    def _attention(self, cur: Tensor, layer: int) -> Tensor:
        spec, count = self.spec, self.shape.num_tokens
        inputs = self.attention_inputs[spec.is_sliding[layer]]
        values = spec.num_heads[layer] * spec.key_length[layer]
        query = view(result(count, values, cur))
        query = self._positioned(query, layer, "attn_q_norm.weight", count * values)
        query = self.graph.add(rotated(query, inputs.key_rotation, count * values))
        attended = view(result(count, values, view(query), inputs.mask))
        flat = rotated(self.graph.add(attended), inputs.value_rotation, count * values)
        return result(count, spec.embedding_size, flat)


def assistant_compute_bytes(spec: ModelSpec, shape: BatchShape, width: int) -> int:
    """Bytes of llama.cpp's compute buffer for one that is fed rows of a model of that width."""
    return _Assistant(spec, shape, width).build().buffer_bytes()


_BUILDERS: dict[str, type[Builder]] = {"qwen35": _GatedHead, "qwen35moe": _GatedHead}


def head_compute_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the head's largest batch."""
    return _BUILDERS.get(spec.arch, _Fused)(spec, shape).build().buffer_bytes()
