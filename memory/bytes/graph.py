"""The graph llama.cpp evaluates for one batch, as far as its intermediate results go.

Describes decoder-only transformers (dense and mixture of experts, with or without biases, norms of
queries and keys, norms after a block, fused QKV, sliding windows) by the tensors the file has, not
by the architecture's name. Order and shapes follow `llama.cpp: src/llama-graph.cpp` and
`src/models/*.cpp` with flash attention on; only what needs room in the compute buffer is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.memory.bytes.arena import HOST_PLACE, Graph, Tensor
from edgespec.memory.bytes.results import F32, added, fed, over, result, stored, view
from edgespec.models.spec import ModelSpec

_I32, _F16, _I64 = 4, 2, 8  # bytes


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the compute buffer is reserved for."""

    num_tokens: int  # largest batch evaluated at once
    num_outputs: int  # tokens of it whose logits are wanted
    cells: int  # of the KV cache
    window_cells: int  # of the layers with a sliding window
    # Quantized caches store K or V rotated by a Hadamard matrix; F32 ones are cast when read.
    rotates_keys: bool = False
    rotates_values: bool = False
    casts_keys: bool = False
    casts_values: bool = False
    snapshots: int = 0  # of a recurrent state
    hands_out: tuple[int, ...] = ()  # layers whose inputs are kept for a head


def compute_buffer_sizes(
    spec: ModelSpec, shape: BatchShape, devices: Sequence[range]
) -> tuple[int, ...]:
    """Bytes of the compute buffer of the host, then of each device, by the layers it has.

    The head counts as a layer after the last one.
    """
    return tuple(Builder(spec, shape, devices).build().buffer_sizes(1 + len(devices)))


class Builder:
    """Builds the graph layer by layer, in the order of llama.cpp's own builders."""

    narrows_at_the_end = False  # to the tokens whose logits are wanted: after all layers

    def __init__(self, spec: ModelSpec, shape: BatchShape, devices: Sequence[range] = ()) -> None:
        self.spec = spec
        self.shape = shape
        self.devices = devices
        self.place = HOST_PLACE  # of the layer that is built
        self.graph = Graph()
        self.positions = fed(shape.num_tokens * _I32)
        self.out_ids = fed(shape.num_outputs * _I32)
        self.attention_inputs = {
            sliding: self._attention_inputs(sliding) for sliding in (False, True)
        }

    def build(self) -> Graph:
        """The graph of the largest batch."""
        layers, spec = self._layers(), self.spec
        cur = self._embeddings()
        for layer in layers:
            self.place = self._place_of(layer)
            cur.is_output = layer in self.shape.hands_out
            narrows = layer == layers[-1] and not self.narrows_at_the_end
            cur = self._layer(cur, layer, last=narrows)
        self.place = self._place_of(spec.num_layers)
        cur = self._norm(cur)
        cur.is_output = True
        outputs = self.shape.num_outputs
        if self.narrows_at_the_end:
            cur = result(outputs, spec.embedding_size, cur, self.out_ids)
            cur.is_output = True
        logits = self._here(result(outputs, spec.vocab_size, cur))
        logits.is_output = True
        self.graph.add(logits)
        return self.graph

    def _layers(self) -> list[int]:
        """Those that decide the sizes, in order."""
        return _telling_layers(self.spec, self.devices, self.shape.hands_out)

    def _place_of(self, layer: int) -> int:
        places = (i for i, layers in enumerate(self.devices, HOST_PLACE + 1) if layer in layers)
        return next(places, HOST_PLACE)

    def _here(self, tensor: Tensor) -> Tensor:
        """A result of this layer's weights, or of its part of the cache."""
        tensor.place = self.place
        return tensor

    # -- pieces ----------------------------------------------------------------------------

    def _embeddings(self) -> Tensor:
        count, width = self.shape.num_tokens, self.spec.embedding_size
        looked_up = self._here(result(count, width, fed(count * _I32)))
        self.graph.add(looked_up)
        self.graph.add(fed(count * width * F32))  # embeddings could be fed instead of ids
        return looked_up

    def _attention_inputs(self, sliding: bool) -> _AttentionInputs:
        shape, spec = self.shape, self.spec
        cells = shape.window_cells if sliding else shape.cells
        return _AttentionInputs(
            keys=fed(shape.num_tokens * _I64),
            values=fed(shape.num_tokens * _I64),
            mask=fed(cells * shape.num_tokens * _F16),
            key_rotation=_rotation(max(spec.key_length)) if shape.rotates_keys else None,
            value_rotation=_rotation(64, smallest=True) if shape.rotates_values else None,
        )

    def _layer(self, inputs: Tensor, layer: int, *, last: bool) -> Tensor:
        cur = self._norm(inputs) if self._has(layer, "attn_norm.weight") else inputs
        cur = self._attention(cur, layer)
        residual = inputs
        if last:  # only the tokens whose logits are wanted go on
            cur = result(self.shape.num_outputs, self.spec.embedding_size, cur, self.out_ids)
            residual = result(
                self.shape.num_outputs, self.spec.embedding_size, residual, self.out_ids
            )
        if self._has(layer, "post_attention_norm.weight"):
            cur = self._norm(cur)
        after_attention = added(cur, residual)
        cur = self._norm(after_attention)
        rows = self.shape.num_outputs if last else self.shape.num_tokens
        cur = self._feed_forward(cur, layer, rows)
        if self._has(layer, "post_ffw_norm.weight"):
            cur = self._norm(cur)
        return added(cur, after_attention)

    def _attention(self, cur: Tensor, layer: int) -> Tensor:
        spec, count = self.spec, self.shape.num_tokens
        inputs = self.attention_inputs[spec.is_sliding[layer]]
        heads, kv_heads = spec.num_heads[layer], spec.num_kv_heads[layer]
        key, value = spec.key_length[layer], spec.value_length[layer]
        if self._has(layer, "attn_qkv.weight"):
            fused = self._here(result(count, heads * key + kv_heads * (key + value), cur))
            if self._has(layer, "attn_qkv.bias"):
                fused = over(fused)
            query, keys, values = (view(fused) for _ in range(3))
        else:
            query = self._projection(cur, layer, "attn_q", heads * key)
            keys = self._projection(cur, layer, "attn_k", kv_heads * key)
            values = self._projection(cur, layer, "attn_v", kv_heads * value)
        query = self._positioned(query, layer, "attn_q_norm.weight", count * heads * key)
        keys = self._positioned(keys, layer, "attn_k_norm.weight", count * kv_heads * key)
        query = rotated(query, inputs.key_rotation, count * heads * key)
        keys = rotated(keys, inputs.key_rotation, count * kv_heads * key)
        values = rotated(values, inputs.value_rotation, count * kv_heads * value)
        for tensor in (query, values, keys):
            self.graph.add(tensor)
        for tensor, places in ((keys, inputs.keys), (values, inputs.values)):
            self.graph.add(self._here(stored(view(tensor), places)))
        cells = self.shape.window_cells if spec.is_sliding[layer] else self.shape.cells
        casts = [
            Tensor(cells * kv_heads * width * _F16, "cast")
            for width, needed in ((key, self.shape.casts_keys), (value, self.shape.casts_values))
            if needed
        ]
        attended = self._here(result(count, heads * value, view(query), *casts, inputs.mask))
        flat = self.graph.add(view(attended))
        mixed = rotated(flat, inputs.value_rotation, count * heads * value)
        out = self._here(result(count, spec.embedding_size, mixed))
        return over(out) if self._has(layer, "attn_output.bias") else out

    def _projection(self, cur: Tensor, layer: int, name: str, width: int) -> Tensor:
        made = self._here(result(self.shape.num_tokens, width, cur))
        if self._has(layer, f"{name}.bias"):
            made = over(made)
        return view(made)

    def _positioned(self, tensor: Tensor, layer: int, norm: str, values: int) -> Tensor:
        """Normalised where the file has weights for it, then rotated by position (RoPE)."""
        if self._has(layer, norm):
            tensor = over(Tensor(values * F32, ("heads", values), (tensor,), in_place=True))
        return Tensor(values * F32, ("heads", values), (tensor, self.positions), in_place=True)

    def _feed_forward(self, cur: Tensor, layer: int, rows: int) -> Tensor:
        if self._has(layer, "ffn_gate_inp.weight"):
            return self._experts(cur, layer, rows)
        width = self.spec.feed_forward_size[layer]
        return self._dense(cur, rows, width, self._has(layer, "ffn_gate.weight"))

    def _dense(self, cur: Tensor, rows: int, width: int, gated: bool) -> Tensor:
        if gated:
            gate, up = (self._here(result(rows, width, cur)) for _ in range(2))
            cur = result(rows, width, gate, up)
        else:
            cur = over(self._here(result(rows, width, cur)))
        return self._here(result(rows, self.spec.embedding_size, cur))

    def _experts(self, cur: Tensor, layer: int, rows: int) -> Tensor:
        spec = self.spec
        used, width = spec.num_experts_used, self._expert_width(layer)
        probabilities = over(self._here(result(rows, spec.num_experts, cur)))
        ranked = probabilities  # which stay as they are beside those with a bias
        if self._has(layer, "exp_probs_b.bias"):
            ranked = Tensor(rows * spec.num_experts * F32, "ranked", (probabilities,))
        order = Tensor(rows * spec.num_experts * _I32, "order", (ranked,))
        chosen = view(order)
        weights = view(result(rows, used, view(probabilities), chosen))
        if spec.normalises_experts:
            weights = view(result(rows, used, weights, over(result(rows, 1, weights))))
        self.graph.add(weights)
        tokens = view(cur)
        up = self._here(result(rows, used * width, tokens, chosen))
        hidden = over(over(up))
        if self._has(layer, "ffn_gate_exps.weight"):
            gate = self._here(result(rows, used * width, tokens, chosen))
            hidden = result(rows, used * width, gate, up)
        down = self._here(result(rows, used * spec.embedding_size, hidden, chosen))
        weighted = Tensor(down.nbytes, down.shape, (down, weights), in_place=True)
        self.graph.add(weighted)
        outputs = [self.graph.add(view(weighted)) for _ in range(used)]
        mixed = outputs[0]
        for output in outputs[1:]:
            mixed = Tensor(
                rows * spec.embedding_size * F32,
                (rows, spec.embedding_size),
                (mixed, output),
                in_place=True,
            )
            self.graph.add(mixed)
        if self._has(layer, "ffn_up_shexp.weight"):
            mixed = self._shared_expert(cur, mixed, layer, rows)
        return mixed

    def _expert_width(self, layer: int) -> int:
        """Of one expert; files without `expert_feed_forward_length` tell it by their tensors."""
        up = self.spec.tensors.get(f"blk.{layer}.ffn_up_exps.weight")
        return up.dims[1] if up else self.spec.expert_feed_forward_size

    def _shared_expert(self, cur: Tensor, mixed: Tensor, layer: int, rows: int) -> Tensor:
        width = self.spec.tensors[f"blk.{layer}.ffn_up_shexp.weight"].dims[1]
        gated = self._has(layer, "ffn_gate_shexp.weight")
        shared = self._dense(cur, rows, width, gated=gated)
        if self._has(layer, "ffn_gate_inp_shexp.weight"):
            shared = added(shared, over(self._here(result(rows, 1, cur))))
        return added(mixed, shared)

    def _norm(self, cur: Tensor) -> Tensor:
        """RMS norm, then its weights."""
        normed = over(cur)
        # llama.cpp keeps it with its layer only where everything is on devices.
        if self.devices and len(self.devices[0]) and self.devices[0].start == 0:
            normed = self._here(normed)
        return self._here(over(normed))

    def _has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}" in self.spec.tensors


@dataclass(frozen=True, slots=True)
class _AttentionInputs:
    keys: Tensor
    values: Tensor
    mask: Tensor
    key_rotation: Tensor | None
    value_rotation: Tensor | None


def _telling_layers(
    spec: ModelSpec, devices: Sequence[range], hands_out: Sequence[int]
) -> list[int]:
    """Layers that decide the sizes: in each place all where they differ, else a few of each kind.

    A buffer stops growing once every kind of layer was followed by every other one.
    """
    if hands_out:  # what is kept lies between what is not
        return list(range(spec.num_layers))
    first = min((layers.start for layers in devices), default=spec.num_layers)
    places = [range(first), *(range(one.start, min(one.stop, spec.num_layers)) for one in devices)]
    return sorted(layer for place in places for layer in _telling(spec, place))


def _telling(spec: ModelSpec, layers: range) -> set[int]:
    kinds = {
        i: (spec.is_sliding[i], spec.num_heads[i], spec.num_kv_heads[i], spec.feed_forward_size[i])
        for i in layers
    }
    if len(set(kinds.values())) > 2:
        return set(layers)
    changes = [i for i in layers[1:] if kinds[i] != kinds[i - 1]]
    ends = {*layers[:2], *layers[-2:]}
    return {*ends, *changes[:4], *(i - 1 for i in changes[:4])}


def _rotation(size: int, smallest: bool = False) -> Tensor:
    """A Hadamard matrix: as large as a power of two that divides the head."""
    side = 64
    while not smallest and size % (2 * side) == 0:
        side *= 2
    return fed(side * side * F32)


def rotated(tensor: Tensor, rotation: Tensor | None, values: int) -> Tensor:
    """As quantized caches want it: by a matrix, if there is one."""
    if rotation is None:
        return tensor
    return view(Tensor(values * F32, "rotated", (rotation, view(tensor))))
