"""How much longer steps get behind many tokens, by a model's shapes: what is likely at first.

Behind a token of context a step reads that token's keys and values, and each of its nodes
multiplies with them. Reading takes as long a byte as the weights do in a step of one token, and
multiplying as long as further tokens take with the weights, both times a factor: caches are of
wider types than weights and their rows are short. It was 1.4 and 9 with SmolLM2 135M, 2.5 and 6
with Qwen2.5 1.5B (Q4_0, 2 CPU cores, edgespec's kernels). llama.cpp's attention takes about twice
as long.
"""

from __future__ import annotations

from edgespec.memory.times.curve import CostCurve
from edgespec.models.spec import ModelSpec

_READ_FACTOR = 2.0
_MULTIPLY_FACTOR = 8.0
_ERROR = 1.0  # relative standard error; 0.4 of these two models, more with llama.cpp's attention
_CACHE_BYTES = 2  # of a number
_COMPARED = 8  # nodes whose step says what further tokens take


def expect_slopes(curve: CostCurve, spec: ModelSpec) -> None:
    """Let a curve begin with the slopes that are likely for this model."""
    whole = _whole_layers(spec)
    per_head = {layer: spec.key_length[layer] + spec.value_length[layer] for layer in whole}
    values = sum(spec.num_kv_heads[layer] * both for layer, both in per_head.items())
    products = sum(spec.num_heads[layer] * both for layer, both in per_head.items())
    weights = _weights(spec)
    if not (values and weights and spec.weight_bytes):
        return
    first_ms, many = curve.base[1], min(_COMPARED, curve.max_nodes)
    read_ms = first_ms * values * _CACHE_BYTES / spec.weight_bytes
    node_ms = first_ms
    if many > 1:
        node_ms = max(0.0, curve.estimated_ms(many, 0) - first_ms) / (many - 1)
    multiply_ms = node_ms * products / weights
    curve.expect_slopes(_READ_FACTOR * read_ms, _MULTIPLY_FACTOR * multiply_ms, _ERROR)


def _whole_layers(spec: ModelSpec) -> list[int]:
    """Layers that attend to the whole context."""
    sliding = spec.is_sliding or (False,) * spec.num_layers
    return [i for i in range(spec.num_layers) if not sliding[i] and spec.num_kv_heads[i]]


def _weights(spec: ModelSpec) -> int:
    """Multiplications of one token with the weights of the blocks and the head."""
    width, total = spec.embedding_size, spec.embedding_size * spec.vocab_size
    used = max(1, spec.num_experts_used)
    for layer in range(spec.num_layers):
        keys, values = spec.key_length[layer], spec.value_length[layer]
        heads = spec.num_heads[layer] * (keys + values)
        forward = spec.expert_feed_forward_size * used if spec.num_experts else 0
        forward = forward or spec.feed_forward_size[layer]
        total += width * (heads + spec.num_kv_heads[layer] * (keys + values) + 3 * forward)
    return total
