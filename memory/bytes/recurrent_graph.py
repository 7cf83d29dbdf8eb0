"""The graphs of models with recurrent layers, as `edgespec.memory.bytes.graph` describes others.

Order and shapes follow `llama.cpp: src/models/qwen35.cpp`, `delta-net-base.cpp`, `lfm2.cpp`,
`nemotron-h.cpp` and `mamba-base.cpp`. A recurrent layer reads the state it left, mixes it with the
batch and writes back the state behind the last token, and with snapshots those before it.
"""

from __future__ import annotations

from edgespec.memory.bytes.arena import Tensor
from edgespec.memory.bytes.gemma_graph import Gemma4Builder
from edgespec.memory.bytes.graph import BatchShape, Builder
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

_STATE_IDS, _POSITION = 4, 16  # bytes of the index of a state, and of a place in time and space

# llama.cpp makes room for so many objects a tensor of the file, and ends the process where a graph
# has more (`llama.cpp: src/llama-context.cpp`, `graph_max_nodes`). Other kinds have room enough.
_OBJECTS_A_TENSOR, _LEAST_OBJECTS = 8, 1024
_OTHER_OBJECTS = 32  # inputs, and what stands before and behind the layers
_OBJECTS_A_SNAPSHOT = 3  # of a recurrent layer: two views and a copy
# Of a layer without snapshots: a recurrent one, one that attends, a feed-forward one.
_OBJECTS = {"lfm2": (35, 47, 0), "nemotron_h": (56, 28, 12)}
# What experts have more than the network in their place, and each one that a token goes to.
_OBJECTS_OF_EXPERTS, _OBJECTS_AN_EXPERT = {"lfm2": 15, "nemotron_h": 22}, 2
_MOST_SNAPSHOTS = 255


def most_snapshots(spec: ModelSpec) -> int:
    """How many snapshots of its recurrent state llama.cpp can keep of a model; 0 for none at all.

    LFM2 1.2B: 149 tensors make room for 1,192 objects, and its graph has 680 and 30 a snapshot.
    """
    if not spec.has_snapshots:
        return 0
    kind = spec.arch.removesuffix("moe").removesuffix("_")
    objects = _OBJECTS.get(kind)
    if objects is None:
        return _MOST_SNAPSHOTS
    recurrent, attending, feeding = objects
    room = max(_LEAST_OBJECTS, _OBJECTS_A_TENSOR * len(spec.tensors)) - _OTHER_OBJECTS
    trunk = spec.num_layers - spec.num_prediction_layers
    recurring = sum(spec.is_recurrent_layer)
    attends = sum(heads > 0 for heads in spec.num_kv_heads)
    room -= recurrent * recurring + attending * attends
    room -= feeding * (trunk - recurring - attends)
    routed = sum(f"blk.{layer}.ffn_gate_inp.weight" in spec.tensors for layer in range(trunk))
    room -= routed * (_OBJECTS_OF_EXPERTS[kind] + _OBJECTS_AN_EXPERT * spec.num_experts_used)
    return max(0, min(_MOST_SNAPSHOTS, room // (_OBJECTS_A_SNAPSHOT * max(1, recurring)) - 2))


class _RecurrentBuilder(Builder):
    """What the kinds have in common; `kept` states, the one behind the last token included."""

    narrows_at_the_end = True

    def __init__(self, spec: ModelSpec, shape: BatchShape) -> None:
        super().__init__(spec, shape)
        self.kept = 1 + shape.snapshots
        self.state_ids = fed(_STATE_IDS)

    def _layers(self) -> list[int]:
        """All but those that predict, since kinds take turns."""
        return list(range(self.spec.num_layers - self.spec.num_prediction_layers))

    def _dims(self, layer: int, name: str) -> tuple[int, ...]:
        return self.spec.tensors[f"blk.{layer}.{name}"].dims

    def _state(self, values: int) -> Tensor:
        """The state that the step before has left."""
        return self.graph.add(result(1, values, self.state_ids))

    def _rolled(self, rolling: Tensor, mixed: Tensor, kernel: int, channels: int) -> Tensor:
        """The batch behind the last tokens that a convolution still needs; the newest are kept."""
        rows = self.shape.num_tokens + kernel - 1
        joined = result(rows, channels, view(rolling), view(mixed))
        self.graph.add(stored(view(joined), self.state_ids))
        return joined

    def _scanned(self, width: int, state: int, *sources: Tensor) -> Tensor:
        """What a recurrence gives for each token, and the states it leaves; these are kept."""
        count = self.shape.num_tokens
        nbytes = (count * width + self.kept * state) * F32
        scanned = Tensor(nbytes, "scanned", sources)
        self.graph.add(stored(view(scanned), self.state_ids))
        return scanned

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        """Flash attention over the cache, which the keys and values go to."""
        spec, inputs = self.spec, self.attention_inputs[self.spec.is_sliding[layer]]
        for tensor in (query, values, keys):
            self.graph.add(tensor)
        for tensor, places in ((keys, inputs.keys), (values, inputs.values)):
            self.graph.add(stored(view(tensor), places))
        width = spec.num_heads[layer] * spec.value_length[layer]
        return result(self.shape.num_tokens, width, view(query), inputs.mask)

    def _product(self, cur: Tensor, width: int) -> Tensor:
        """A matrix product for each token, seen in another shape."""
        count = self.shape.num_tokens
        return reshaped(result(count, width, cur), count, width)

    def _turned(self, heads: Tensor) -> Tensor:
        """Rotated by position."""
        assert isinstance(heads.shape, tuple)
        return Tensor(
            heads.shape[0] * heads.shape[1] * F32,
            heads.shape,
            (heads, self.positions),
            in_place=True,
        )


class DeltaNetBuilder(_RecurrentBuilder):
    """Qwen 3.5: gated delta nets, and attention with a gate."""

    def __init__(self, spec: ModelSpec, shape: BatchShape) -> None:
        super().__init__(spec, shape)
        self.positions = fed(shape.num_tokens * _POSITION)

    def _layer(self, inputs: Tensor, layer: int, *, last: bool) -> Tensor:
        cur = self.graph.add(self._norm(inputs))
        recurs = self.spec.is_recurrent_layer[layer]
        cur = self._delta_net(cur, layer) if recurs else self._gated_attention(cur, layer)
        after = added(cur, inputs)
        return added(
            self._feed_forward(self._norm(after), layer, self.shape.num_tokens),
            after,
        )

    def _delta_net(self, cur: Tensor, layer: int) -> Tensor:
        count = self.shape.num_tokens
        kernel, channels = self._dims(layer, "ssm_conv1d.weight")
        inner, heads = self._dims(layer, "ssm_out.weight")[0], self._dims(layer, "ssm_dt.bias")[0]
        keys, state = (channels - inner) // 2, inner // heads * inner
        rolling = self._state((kernel - 1) * channels)
        joined = self._rolled(rolling, view(result(count, channels, cur)), kernel, channels)
        before = self._state(state)
        mixed = over(result(count, channels, joined))
        query, key = (over(result(count, keys, view(mixed))) for _ in range(2))
        value = view(mixed)
        gate = over(over(over(self._product(cur, heads))))
        beta = over(self._product(cur, heads))
        scanned = self._scanned(inner, state, query, key, value, view(gate), beta, view(before))
        normed = over(over(reshaped(scanned, count, inner)))
        shown = over(self._product(cur, inner))
        gated = added(normed, shown)
        return self._product(view(gated), self.spec.embedding_size)

    def _gated_attention(self, cur: Tensor, layer: int) -> Tensor:
        spec, count = self.spec, self.shape.num_tokens
        width = spec.num_heads[layer] * spec.key_length[layer]
        kv_width = spec.num_kv_heads[layer] * spec.key_length[layer]
        full = result(count, 2 * width, cur)
        query = self._turned(over(result(count, width, view(full))))
        keys = self._turned(over(over(self._product(cur, kv_width))))
        values = self._product(cur, kv_width)
        attended = self._attended(query, keys, values, layer)
        gate = over(result(count, width, view(full)))
        look = reshaped(attended, count, width)
        gated = Tensor(look.nbytes or attended.nbytes, look.shape, (look, gate), in_place=True)
        return result(count, spec.embedding_size, gated)


class ShortConvolutionBuilder(_RecurrentBuilder):
    """LFM 2: short convolutions, and attention."""

    narrows_at_the_end = False

    def _layer(self, inputs: Tensor, layer: int, *, last: bool) -> Tensor:
        recurs = self.spec.is_recurrent_layer[layer]
        cur = self._convolution(inputs, layer) if recurs else self._plain_attention(inputs, layer)
        rows = self.shape.num_tokens
        if last:
            rows = self.shape.num_outputs
            inputs, cur = (
                result(rows, self.spec.embedding_size, one, self.out_ids) for one in (inputs, cur)
            )
        after = added(inputs, cur)
        return added(after, self._feed_forward(self._norm(after), layer, rows))

    def _convolution(self, inputs: Tensor, layer: int) -> Tensor:
        count, width = self.shape.num_tokens, self.spec.embedding_size
        kernel = self._dims(layer, "shortconv.conv.weight")[0]
        rolling = self._state((kernel - 1) * width)
        parts = result(count, 3 * width, view(self._norm(inputs)))
        product = result(count, width, view(parts), view(parts))
        joined = self._rolled(rolling, product, kernel, width)
        mixed = result(count, width, joined)
        gated = Tensor(mixed.nbytes, mixed.shape, (view(parts), mixed), in_place=True)
        return self._product(gated, width)

    def _plain_attention(self, inputs: Tensor, layer: int) -> Tensor:
        spec, cur = self.spec, self._norm(inputs)
        width = spec.num_heads[layer] * spec.key_length[layer]
        kv_width = spec.num_kv_heads[layer] * spec.key_length[layer]
        query, keys = (
            self._turned(over(over(self._product(cur, size)))) for size in (width, kv_width)
        )
        values = self._product(cur, kv_width)
        attended = self.graph.add(view(self._attended(query, keys, values, layer)))
        return result(self.shape.num_tokens, spec.embedding_size, attended)


class OnePartBuilder(_RecurrentBuilder):
    """Nemotron H: each layer is one of Mamba 2, attention without positions, and feed-forward."""

    def _layer(self, inputs: Tensor, layer: int, *, last: bool) -> Tensor:
        count = self.shape.num_tokens
        if self.spec.is_recurrent_layer[layer]:
            cur = self._mamba2(inputs, layer)
        elif self.spec.feed_forward_size[layer]:
            cur = self._feed_forward(self._norm(inputs), layer, count)
        else:
            cur = self._still_attention(self._norm(inputs), layer)
        return added(cur, inputs)

    def _mamba2(self, inputs: Tensor, layer: int) -> Tensor:
        count = self.shape.num_tokens
        kernel, channels = self._dims(layer, "ssm_conv1d.weight")
        inner, heads = self._dims(layer, "ssm_out.weight")[0], self._dims(layer, "ssm_dt.bias")[0]
        norms = self._dims(layer, "ssm_norm.weight")
        groups = norms[1] if len(norms) > 1 else 1
        state = (channels - inner) // (2 * groups) * inner
        rolling = self._state((kernel - 1) * channels)
        projected = result(count, self._dims(layer, "ssm_in.weight")[1], self._norm(inputs))
        joined = self._rolled(rolling, projected, kernel, channels)
        mixed = over(over(result(count, channels, joined)))
        times = over(result(count, heads, view(projected)))
        inputs_view = view(mixed)
        scanned = self._scanned(inner, state, inputs_view, times, view(mixed), view(mixed))
        shown = result(count, inner, view(projected))
        skipped = result(count, inner, inputs_view)
        look = reshaped(scanned, count, inner)
        summed = Tensor(skipped.nbytes, look.shape, (look, skipped), in_place=True)
        gated = result(count, inner, shown, summed)
        normed = over(over(reshaped(gated, count, inner)))
        return result(count, self.spec.embedding_size, view(normed))

    def _still_attention(self, cur: Tensor, layer: int) -> Tensor:
        spec = self.spec
        width = spec.num_heads[layer] * spec.key_length[layer]
        kv_width = spec.num_kv_heads[layer] * spec.key_length[layer]
        query, keys, values = (self._product(cur, size) for size in (width, kv_width, kv_width))
        attended = self.graph.add(view(self._attended(query, keys, values, layer)))
        return result(self.shape.num_tokens, spec.embedding_size, attended)


_BUILDERS: dict[str, type[Builder]] = {
    "gemma4": Gemma4Builder,
    "qwen35": DeltaNetBuilder,
    "qwen35moe": DeltaNetBuilder,
    "lfm2": ShortConvolutionBuilder,
    "lfm2moe": ShortConvolutionBuilder,
    "nemotron_h": OnePartBuilder,
    "nemotron_h_moe": OnePartBuilder,
}


def compute_buffer_bytes(spec: ModelSpec, shape: BatchShape) -> int:
    """Bytes of llama.cpp's compute buffer for the largest batch of a run.

    Of a file that lacks tensors of its kind it is that of another one: llama.cpp will refuse it.
    """
    try:
        return _BUILDERS.get(spec.arch, Builder)(spec, shape).build().buffer_bytes()
    except (KeyError, ValueError, ZeroDivisionError):
        return Builder(spec, shape).build().buffer_bytes()
