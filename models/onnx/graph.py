"""A GGUF model as ONNX graphs for ONNX Runtime, in one of two flavours: `GqaDecoder` for its own
CPU kernels, `SplitDecoder` for any provider. Built from the tensors the file has: llama, qwen2,
qwen3 and gemma3 kinds.

Embeddings are looked up outside (in the GGUF itself), so the table is not stored twice, and rows of
logits are chosen before the head. Graphs that are written together share one file of weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.models.onnx.facts import GQA, SPLIT, GraphFacts, GraphOptions, check_supported
from edgespec.models.onnx.writer import (
    CONTRIB,
    WEIGHTS_FILE,
    GraphWriter,
    RowOrder,
    WeightsFile,
    onnx_module,
)
from edgespec.models.spec import ModelSpec


class Decoder(GraphWriter, ABC):
    """All layers and the head. A flavour says how norms, attention and the activation are expressed
    and what goes in and out.
    """

    def __init__(
        self, spec: ModelSpec, facts: GraphFacts, options: GraphOptions, weights: WeightsFile
    ) -> None:
        super().__init__(spec, weights)
        self.facts = facts
        self.options = options

    def build(self) -> Any:
        """The ModelProto."""
        hidden, skip = "embeddings", ""
        for layer in range(self.spec.num_layers):
            hidden, skip = self._layer(layer, hidden, skip)
        self._head(self.op("Add", hidden, skip) if skip else hidden)
        return self.model(self.inputs(), self.outputs())

    # -- what a flavour says ---------------------------------------------------------------

    @abstractmethod
    def norm(self, hidden: str, weight: str) -> str:
        """RMS norm over the last dimension, times a weight."""

    @abstractmethod
    def add_norm(self, hidden: str, skip: str, weight: str) -> tuple[str, str]:
        """RMS norm of the sum, and the sum; without `skip`, of `hidden`."""

    @abstractmethod
    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """Attention of [1, n, heads * D] tensors over the cache and themselves, rotated."""

    @abstractmethod
    def activate(self, gate: str) -> str:
        """SiLU or GELU."""

    @abstractmethod
    def inputs(self) -> list[Any]:
        """Value infos of everything that goes in."""

    @abstractmethod
    def outputs(self) -> list[Any]:
        """Value infos of everything that comes out."""

    @property
    def has_rows(self) -> bool:
        """Whether the host chooses the rows that get logits."""
        return True

    def row_order(self, layer: int, name: str) -> RowOrder:
        """The order in which rows of a query or key matrix are taken."""
        return None

    # -- layers ----------------------------------------------------------------------------

    def _layer(self, layer: int, hidden: str, skip: str) -> tuple[str, str]:
        """One block; the residual stream is the sum of the two tensors it takes and gives."""
        normed, stream = self.add_norm(hidden, skip, f"blk.{layer}.attn_norm.weight")
        query, key, value = (
            self.product(normed, f"blk.{layer}.attn_{name}", self.row_order(layer, name))
            for name in "qkv"
        )
        length = self.spec.key_length[layer]
        query = self._head_norm(layer, query, "q", self.spec.num_heads[layer], length)
        key = self._head_norm(layer, key, "k", self.spec.num_kv_heads[layer], length)
        attended = self.attend(layer, query, key, value)
        attended = self.product(attended, f"blk.{layer}.attn_output")
        if self.has(name := f"blk.{layer}.post_attention_norm.weight"):
            attended = self.norm(attended, name)
        normed, stream = self.add_norm(attended, stream, f"blk.{layer}.ffn_norm.weight")
        gate = self.product(normed, f"blk.{layer}.ffn_gate")
        up = self.product(normed, f"blk.{layer}.ffn_up")
        out = self.product(self.op("Mul", self.activate(gate), up), f"blk.{layer}.ffn_down")
        if self.has(name := f"blk.{layer}.post_ffw_norm.weight"):
            out = self.norm(out, name)
        return out, stream

    def _head_norm(self, layer: int, tensor: str, name: str, heads: int, length: int) -> str:
        weight = f"blk.{layer}.attn_{name}_norm.weight"
        if not self.has(weight):
            return tensor
        apart = self.op("Reshape", tensor, self.integers((1, -1, heads, length)))
        normed = self.norm(apart, weight)
        return self.op("Reshape", normed, self.integers((1, -1, heads * length)))

    def _head(self, hidden: str) -> None:
        if self.has_rows:
            hidden = self.op("Gather", hidden, "rows", axis=1)
        hidden = self.norm(hidden, "output_norm.weight")
        logits = self.product(hidden, "token_embd" if self.spec.tied_embeddings else "output")
        if cap := self.facts.logit_softcap:
            logits = self.softcapped(logits, cap)
        self.op("Squeeze", logits, self.integers((0,)), output="logits")

    def softcapped(self, tensor: str, cap: float) -> str:
        """cap tanh(x / cap)"""
        scaled = self.op("Mul", tensor, self.scalar(1.0 / cap))
        return self.op("Mul", self.op("Tanh", scaled), self.scalar(cap))

    def product(self, hidden: str, name: str, order: RowOrder = None) -> str:
        return self.matrix(hidden, name, order=order, plain=self.options.plain)

    # -- inputs and outputs ----------------------------------------------------------------

    def windows(self) -> tuple[str, ...]:
        """Suffixes of inputs there are for each kind of attention."""
        return ("", "_window") if any(self.spec.is_sliding) else ("",)

    def cache_infos(self, when: str, cells: int | str) -> Iterator[Any]:
        """A key and a value a layer, [1, heads, cells, D]."""
        for layer in range(self.spec.num_layers):
            for what, length in (("key", self.spec.key_length), ("value", self.spec.value_length)):
                shape = (1, self.spec.num_kv_heads[layer], cells, length[layer])
                yield self.floats_info(f"{when}_{what}.{layer}", *shape)


# -- ONNX Runtime's own fused operations -----------------------------------------------


class GqaDecoder(Decoder):
    """One graph for prompts, chains and trees, with the cache updated inside.

    GroupQueryAttention with the KV cache shared in place, positions and an additive attention bias
    as inputs. Inputs, n tokens of which r want logits, over `total` of a cache's C cells:

        embeddings [1, n, E], positions [1, n], rows [r], seqlens_k [1] = total - 1,
        total_sequence_length [], attention_bias [1, 1, n, total] (and one for sliding windows),
        cos, sin [C, rotary / 2] (and a pair for sliding windows),
        past_key.i, past_value.i [1, H, C, D]

    Outputs: logits [r, V], present_key.i and present_value.i (bind them to the past's memory).
    """

    def norm(self, hidden: str, weight: str) -> str:
        return self.op(
            "SimplifiedLayerNormalization",
            hidden,
            self.floats(weight),
            axis=-1,
            epsilon=self.facts.epsilon,
        )

    def add_norm(self, hidden: str, skip: str, weight: str) -> tuple[str, str]:
        if not skip:
            return self.norm(hidden, weight), hidden
        normed, total = self.fresh("normed"), self.fresh("stream")
        self.node(
            "SkipSimplifiedLayerNormalization",
            (hidden, skip, self.floats(weight)),
            (normed, "", "", total),
            domain=CONTRIB,
            epsilon=self.facts.epsilon,
        )
        return normed, total

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        window = "_window" if self.spec.is_sliding[layer] else ""
        facts, out = self.facts, f"attended.{layer}"
        attributes = {"softcap": facts.softcap} if facts.softcap else {}
        self.node(
            "GroupQueryAttention",
            (
                query,
                key,
                value,
                f"past_key.{layer}",
                f"past_value.{layer}",
                "seqlens_k",
                "total_sequence_length",
                f"cos{window}",
                f"sin{window}",
                "positions",
                f"attention_bias{window}",
            ),
            (out, f"present_key.{layer}", f"present_value.{layer}"),
            domain=CONTRIB,
            num_heads=self.spec.num_heads[layer],
            kv_num_heads=self.spec.num_kv_heads[layer],
            scale=facts.attention_scale,
            do_rotary=1,
            rotary_interleaved=int(facts.rotary_interleaved),
            **attributes,
        )
        return out

    def activate(self, gate: str) -> str:
        if self.facts.activation == "gelu":
            return self.op("FastGelu", gate, domain=CONTRIB)
        return self.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0)  # x sigmoid(x)

    def inputs(self) -> list[Any]:
        infos = [
            self.floats_info("embeddings", 1, "n", self.spec.embedding_size),
            self.integers_info("positions", 1, "n"),
            self.integers_info("rows", "r"),
            self.integers_info("seqlens_k", 1, bits=32),
            self.integers_info("total_sequence_length", bits=32),
        ]
        for window in self.windows():
            infos.append(self.floats_info(f"attention_bias{window}", 1, 1, "n", "total"))
            infos += [self.floats_info(f"{name}{window}", "C", "half") for name in ("cos", "sin")]
        return [*infos, *self.cache_infos("past", "C")]

    def outputs(self) -> list[Any]:
        logits = self.floats_info("logits", "r", self.spec.vocab_size)
        return [logits, *self.cache_infos("present", "C")]


# -- standard operations, and fixed shapes where wanted --------------------------------

_NORM_SCALE = 1 / 64  # activations reach 25,000 on a model of 135M: their squares overflow float16
_TO_THE_END = (1 << 31) - 1


class SplitDecoder(Decoder):
    """One graph for prompts, chains and trees; the cache is the host's.

    The past goes in and only the new rows of K and V come out; the host writes those it accepts, so
    nothing is ever rolled back. Inputs, n tokens of which r want logits, over a past of P cells:

        embeddings [1, n, E] (or hidden), cos, sin [n, D / 2] of the tokens' positions,
        attention_bias [1, 1, n, P + n] (0, or -1e4 where a token must not look), rows [r],
        past_key.i, past_value.i [1, H, P, D]; a bias, cos and sin of their own for sliding windows

    Outputs: logits [r, V] (or hidden), new_key.i and new_value.i [1, H, n, D]. A graph of fixed
    shapes has no `rows` and gives logits of all n.

    Scores of the past and of the new cells are computed apart and joined, so the past is not
    copied. Half-precision devices get no overflow: norms square a 64th of their input, and scores
    are scaled before they are multiplied.
    """

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
        parts = [
            self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 3, 2]))
            for keys in (f"past_key.{layer}", new_key)
        ]
        scores = self.op("Concat", *parts, axis=-1)
        shares = self._softmax(scores, kv_heads, heads // kv_heads, f"attention_bias{window}")
        start, middle, end = self._slice_bounds(layer)
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

    def _softmax(self, scores: str, kv_heads: int, group: int, bias: str) -> str:
        """Over the cells; each head of a group gets the bias of the token."""
        if cap := self.facts.softcap:
            scores = self.softcapped(scores, cap)
        apart = self.op("Reshape", scores, self.integers((kv_heads, group, -1, 0)))
        shares = self.op("Softmax", self.op("Add", apart, bias), axis=-1)
        return self.op("Reshape", shares, self.integers((1, kv_heads, -1, 0)))

    def _weighted(self, shares: str, start: str, end: str, values: str) -> str:
        axes = self.integers((3,))
        return self.op("MatMul", self.op("Slice", shares, start, end, axes), values)

    def _slice_bounds(self, layer: int) -> tuple[str, str, str]:
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
        logits = self.floats_info("logits", rows, self.spec.vocab_size)
        return [logits, *self.cache_infos("new", nodes)]


GRAPH_VERSION = 3
# -- files -----------------------------------------------------------------------------

_FLAVOURS: dict[str, type[Decoder]] = {GQA: GqaDecoder, SPLIT: SplitDecoder}


def write_graphs(
    spec: ModelSpec,
    facts: GraphFacts,
    folder: Path,
    graphs: Mapping[str, GraphOptions],
    progress: Callable[[float], None] = lambda _fraction: None,
) -> None:
    """Write several graphs of one flavour, by file name, that share `weights.bin`.

    Both are written into an existing folder. Raises UnsupportedError for a model that cannot be
    expressed, OSError when the disk is full.
    """
    check_supported(spec)
    onnx = onnx_module()
    with (folder / WEIGHTS_FILE).open("w+b") as file:
        weights = WeightsFile(spec, file, progress)
        models = {
            name: _FLAVOURS[options.flavour](spec, facts, options, weights).build()
            for name, options in graphs.items()
        }
    for name, model in models.items():
        onnx.save_model(model, str(folder / name))


def bucket_graphs(
    steps: tuple[int, ...], capacity: int, options: GraphOptions
) -> dict[str, GraphOptions]:
    """Graphs of fixed shapes: one for each number of nodes, over a cache of `capacity` cells."""
    return {f"step-{step}.onnx": replace(options, step=step, capacity=capacity) for step in steps}
