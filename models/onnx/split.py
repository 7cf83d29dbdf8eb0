"""The `split` flavour: standard operations and fixed shapes where wanted, for any provider.

The past goes in and only the new rows of K and V come out; the host writes those it accepts, so
nothing is ever rolled back. Inputs, n tokens of which r want logits, over a past of P cells:

    embeddings [1, n, E] (or hidden), cos, sin [n, D / 2] of the tokens' positions,
    attention_bias [1, 1, n, P + n] (0, or -1e4 where a token must not look), rows [r],
    past_key.i, past_value.i [1, H, P, D]; a bias, cos and sin of their own for sliding windows

Outputs: logits [r, V] (or hidden), new_key.i and new_value.i [1, H, n, D]. A graph of fixed shapes
has no `rows` and gives logits of all n.

Scores of the past and of the new cells are computed apart and joined, so the past is not copied.
Half-precision devices get no overflow: norms square a 64th of their input, and scores are scaled
before they are multiplied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.models.onnx.decoder import Decoder
from edgespec.models.onnx.facts import GraphFacts, GraphOptions
from edgespec.models.onnx.writer import RowOrder, WeightsFile
from edgespec.models.spec import ModelSpec

_NORM_SCALE = 1 / 64  # activations reach 25,000 on a model of 135M: their squares overflow float16
_TO_THE_END = (1 << 31) - 1


class SplitDecoder(Decoder):
    """One graph for prompts, chains and trees; the cache is the host's."""

    def __init__(
        self, spec: ModelSpec, facts: GraphFacts, options: GraphOptions, weights: WeightsFile
    ) -> None:
        super().__init__(spec, facts, options, weights)
        self._rotations: dict[tuple[str, float], tuple[str, str]] = {}
        self._ends: tuple[str, str, str] | None = None

    def norm(self, hidden: str, weight: str) -> str:
        """x / sqrt(mean(x^2) + e) w, with x s in place of x and e s^2 in place of e."""
        scaled = self.op("Mul", hidden, self.scalar(_NORM_SCALE))
        squares = self.op("Pow", scaled, self.scalar(2.0))
        mean = self.op("ReduceMean", squares, self.integers((-1,)), keepdims=1)
        shifted = self.op("Add", mean, self.scalar(self.facts.epsilon * _NORM_SCALE**2))
        normed = self.op("Div", scaled, self.op("Sqrt", shifted))
        return self.op("Mul", normed, self.floats(weight))

    def add_norm(self, hidden: str, skip: str, weight: str) -> tuple[str, str]:
        total = self.op("Add", hidden, skip) if skip else hidden
        return self.norm(total, weight), total

    def activate(self, gate: str) -> str:
        if self.facts.activation == "gelu":
            return self.op("Gelu", gate, approximate="tanh")
        return self.op("Mul", gate, self.op("Sigmoid", gate))

    def row_order(self, layer: int, name: str) -> RowOrder:
        """Pairs of dimensions that are rotated lie in two halves of a head, not side by side."""
        if name == "v" or not self.facts.rotary_interleaved:
            return None
        heads = (self.spec.num_heads if name == "q" else self.spec.num_kv_heads)[layer]
        length = self.spec.key_length[layer]
        rows = np.arange(heads * length, dtype=np.int64).reshape(heads, length // 2, 2)
        order: NDArray[np.int64] = rows.swapaxes(1, 2).reshape(-1)
        return order

    # -- attention -------------------------------------------------------------------------

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """The G heads that share K and V are rows of one product: [G n, D] by [D, P], Hkv times."""
        spec, facts = self.spec, self.facts
        heads, kv_heads = spec.num_heads[layer], spec.num_kv_heads[layer]
        length, value_length = spec.key_length[layer], spec.value_length[layer]
        window = "_window" if spec.is_sliding[layer] else ""
        query = self._rotated(
            self._heads(query, heads, length), window, scale=facts.attention_scale
        )
        query = self.op("Reshape", query, self.integers((1, kv_heads, -1, length)))
        new_key = self._rotated(
            self._heads(key, kv_heads, length), window, output=f"new_key.{layer}"
        )
        new_value = self._heads(value, kv_heads, value_length, output=f"new_value.{layer}")
        parts = [self._scores(query, keys) for keys in (f"past_key.{layer}", new_key)]
        scores = self.op("Concat", *parts, axis=-1)
        shares = self._shares(scores, kv_heads, heads // kv_heads, f"attention_bias{window}")
        start, middle, end = self._cells(layer)
        of_past = self._weighted(shares, start, middle, f"past_value.{layer}")
        attended = self.op("Add", of_past, self._weighted(shares, middle, end, new_value))
        attended = self.op("Reshape", attended, self.integers((1, heads, -1, value_length)))
        attended = self.op("Transpose", attended, perm=[0, 2, 1, 3])
        return self.op("Reshape", attended, self.integers((1, -1, heads * value_length)))

    def _heads(self, tensor: str, heads: int, length: int, output: str = "") -> str:
        """[1, n, heads * D] as [1, heads, n, D]."""
        apart = self.op("Reshape", tensor, self.integers((1, -1, heads, length)))
        return self.op("Transpose", apart, perm=[0, 2, 1, 3], output=output)

    def _rotated(self, tensor: str, window: str, output: str = "", scale: float = 1.0) -> str:
        """The halves (a, b) of each head as (a cos - b sin, b cos + a sin), times a scale."""
        cos, sin = self._tables(window, scale)
        first, second = self.fresh("half"), self.fresh("half")
        self.node("Split", (tensor,), (first, second), axis=-1, num_outputs=2)
        crossed = self.op("Mul", self.op("Concat", second, first, axis=-1), sin)
        return self.op("Add", self.op("Mul", tensor, cos), crossed, output=output)

    def _tables(self, window: str, scale: float) -> tuple[str, str]:
        """(cos, cos) and (-sin, sin) times a scale, once for all layers."""
        if (window, scale) not in self._rotations:
            cos, sin = (
                self.op("Mul", f"{name}{window}", self.scalar(scale)) for name in ("cos", "sin")
            )
            halves = ((cos, cos), (self.op("Neg", sin), sin))
            both = [self.op("Concat", *pair, axis=-1) for pair in halves]
            self._rotations[window, scale] = (both[0], both[1])
        return self._rotations[window, scale]

    def _scores(self, query: str, keys: str) -> str:
        return self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 3, 2]))

    def _shares(self, scores: str, kv_heads: int, group: int, bias: str) -> str:
        """Softmax over the cells; each head of a group gets the bias of the token."""
        if cap := self.facts.softcap:
            scores = self.softcapped(scores, cap)
        apart = self.op("Reshape", scores, self.integers((kv_heads, group, -1, 0)))
        shares = self.op("Softmax", self.op("Add", apart, bias), axis=-1)
        return self.op("Reshape", shares, self.integers((1, kv_heads, -1, 0)))

    def _weighted(self, shares: str, start: str, end: str, values: str) -> str:
        axes = self.integers((3,))
        return self.op("MatMul", self.op("Slice", shares, start, end, axes), values)

    def _cells(self, layer: int) -> tuple[str, str, str]:
        """Where the past and the new cells begin and end among all; the same in every layer."""
        if self._ends is None:
            zero, end = self.integers((0,)), self.integers((_TO_THE_END,))
            if self.options.step:
                middle = self.integers((self.options.capacity,))
            else:
                middle = self.op("Shape", f"past_key.{layer}", start=2, end=3)
            self._ends = (zero, middle, end)
        return self._ends

    # -- inputs and outputs ----------------------------------------------------------------

    @property
    def has_rows(self) -> bool:
        return not self.options.step

    def inputs(self) -> list[Any]:
        nodes: int | str = self.options.step or "n"
        past: int | str = self.options.capacity if self.options.step else "past"
        cells = past + nodes if isinstance(past, int) and isinstance(nodes, int) else "cells"
        half = max(self.spec.key_length) // 2
        infos = [self.floats_info("embeddings", 1, nodes, self.spec.embedding_size)]
        for window in self.windows():
            infos.append(self.floats_info(f"attention_bias{window}", 1, 1, nodes, cells))
            infos += [self.floats_info(f"{name}{window}", nodes, half) for name in ("cos", "sin")]
        if self.has_rows:
            infos.append(self.integers_info("rows", "r"))
        return [*infos, *self.cache_infos("past", past)]

    def outputs(self) -> list[Any]:
        nodes = self.options.step or "n"
        rows = "r" if self.has_rows else nodes
        return [self.main_output(rows), *self.cache_infos("new", nodes)]
