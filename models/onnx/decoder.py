"""The layers of a decoder as ONNX nodes, whatever flavour of graph they end up in.

Built from the tensors the file has: llama, qwen2, qwen3 and gemma3 kinds. A flavour says how
norms, attention and the activation are expressed and what goes in and out; the rest is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from edgespec.models.onnx.facts import GraphFacts, GraphOptions
from edgespec.models.onnx.writer import GraphWriter, RowOrder, WeightsFile
from edgespec.models.spec import ModelSpec


class Decoder(GraphWriter, ABC):
    """All layers and the head."""

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
        attended = self._attention(layer, normed)
        if self.has(name := f"blk.{layer}.post_attention_norm.weight"):
            attended = self.norm(attended, name)
        normed, stream = self.add_norm(attended, stream, f"blk.{layer}.ffn_norm.weight")
        out = self._feed_forward(layer, normed)
        if self.has(name := f"blk.{layer}.post_ffw_norm.weight"):
            out = self.norm(out, name)
        return out, stream

    def _attention(self, layer: int, normed: str) -> str:
        spec = self.spec
        query, key, value = (
            self.product(normed, f"blk.{layer}.attn_{name}", self.row_order(layer, name))
            for name in "qkv"
        )
        length = spec.key_length[layer]
        query = self._head_norm(layer, query, "q", spec.num_heads[layer], length)
        key = self._head_norm(layer, key, "k", spec.num_kv_heads[layer], length)
        attended = self.attend(layer, query, key, value)
        return self.product(attended, f"blk.{layer}.attn_output")

    def _head_norm(self, layer: int, tensor: str, name: str, heads: int, length: int) -> str:
        weight = f"blk.{layer}.attn_{name}_norm.weight"
        if not self.has(weight):
            return tensor
        apart = self.op("Reshape", tensor, self.integers((1, -1, heads, length)))
        normed = self.norm(apart, weight)
        return self.op("Reshape", normed, self.integers((1, -1, heads * length)))

    def _feed_forward(self, layer: int, normed: str) -> str:
        gate = self.product(normed, f"blk.{layer}.ffn_gate")
        up = self.product(normed, f"blk.{layer}.ffn_up")
        gated = self.op("Mul", self.activate(gate), up)
        return self.product(gated, f"blk.{layer}.ffn_down")

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

    def main_output(self, rows: int | str) -> Any:
        """Logits of `rows`."""
        return self.floats_info("logits", rows, self.spec.vocab_size)

    def cache_infos(self, when: str, cells: int | str) -> Iterator[Any]:
        """A key and a value a layer, [1, heads, cells, D]."""
        for layer in range(self.spec.num_layers):
            for what, length in (("key", self.spec.key_length), ("value", self.spec.value_length)):
                shape = (1, self.spec.num_kv_heads[layer], cells, length[layer])
                yield self.floats_info(f"{when}_{what}.{layer}", *shape)
