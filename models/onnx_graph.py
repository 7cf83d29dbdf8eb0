"""A GGUF model as an ONNX graph for ONNX Runtime's CPU kernels.

One graph does prompts, chains and trees: GroupQueryAttention with the KV cache shared in place,
positions and an additive attention bias as inputs, MatMulNBits for every matrix. Embeddings are
looked up outside (in the GGUF itself), so the table is not stored twice, and rows of logits are
chosen before the head. Built from the tensors the file has: llama, qwen2, qwen3 and gemma3 kinds.

Inputs, n tokens of which r want logits, over `total` cells of a cache with room for C:

    embeddings [1, n, E], positions [1, n], rows [r], seqlens_k [1] = total - 1,
    total_sequence_length [], attention_bias [1, 1, n, total] (and one for sliding windows),
    cos, sin [C, rotary / 2] (and a pair for sliding windows), past_key.i, past_value.i [1, H, C, D]

Outputs: logits [r, V], present_key.i and present_value.i (bind them to the past's memory).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.errors import MissingDependencyError, UnsupportedError
from edgespec.models.gguf import GgufTensor, read_gguf
from edgespec.models.onnx_weights import dequantize, packed_rows, raw_rows
from edgespec.models.packing import BLOCK, check_supported, packed_bits
from edgespec.models.spec import ModelSpec

GRAPH_FILE, WEIGHTS_FILE = "model.onnx", "weights.bin"
GRAPH_VERSION = 3
_ACCURACY_LEVEL = 4  # activations in 8 bits, as llama.cpp's kernels have them
_ALIGNMENT = 4096  # of external data, so that it can be mapped
_CONTRIB = "com.microsoft"


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph needs to know beyond a ModelSpec, from the same metadata."""

    epsilon: float
    attention_scale: float
    softcap: float
    logit_softcap: float
    rotary_interleaved: bool  # llama's own files pair neighbouring dimensions
    activation: str  # "silu" or "gelu"
    embedding_scale: float
    rope_base: float
    rope_factor: float  # positions are divided by it
    window_rope_base: float  # of sliding-window layers


def read_facts(spec: ModelSpec) -> GraphFacts:
    """The facts of a file. Raises UnsupportedError for what the graph cannot express."""
    check_supported(spec)
    values = read_gguf(spec.path).metadata

    def number(name: str, default: float) -> float:
        value = values.get(f"{spec.arch}.{name}", default)
        return float(value) if isinstance(value, int | float) else default

    length = spec.key_length[0]
    is_gemma = spec.arch == "gemma3"
    scaling = values.get(f"{spec.arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear") or number("rope.dimension_count", length) != length:
        raise UnsupportedError(
            f"the ONNX backend does not know this rotation of positions ({scaling})",
            hint="leave out --backend onnx: llama.cpp knows it",
        )
    factor = number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    base = number("rope.freq_base", 10_000.0)
    # The largest Gemma scales by its embedding; see llama.cpp: src/models/gemma3.cpp.
    per_head = spec.embedding_size / spec.num_heads[0] if spec.num_layers == 62 else length
    return GraphFacts(
        epsilon=number("attention.layer_norm_rms_epsilon", 1e-6),
        attention_scale=(per_head if is_gemma else length) ** -0.5,
        softcap=number("attn_logit_softcapping", 0.0),
        logit_softcap=number("final_logit_softcapping", 0.0),
        rotary_interleaved=spec.arch == "llama",
        activation="gelu" if is_gemma else "silu",
        embedding_scale=spec.embedding_size**0.5 if is_gemma else 1.0,
        rope_base=base,
        rope_factor=factor or 1.0,
        window_rope_base=number("rope.freq_base_swa", 10_000.0) if is_gemma else base,
    )


def write_graph(
    spec: ModelSpec,
    facts: GraphFacts,
    folder: Path,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> None:
    """Write `model.onnx` and `weights.bin` into an existing folder.

    Raises UnsupportedError for a model that cannot be expressed, OSError when the disk is full.
    """
    check_supported(spec)
    onnx = _onnx()
    with (folder / WEIGHTS_FILE).open("wb") as weights:
        builder = _Builder(onnx, spec, facts, weights, progress)
        model = builder.model()
    onnx.save_model(model, str(folder / GRAPH_FILE))


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise MissingDependencyError(
            "converting a GGUF for ONNX Runtime needs the onnx package",
            hint="pip install 'edgespec[onnx]'",
        ) from error
    return onnx


@dataclass
class _Builder:
    onnx: Any
    spec: ModelSpec
    facts: GraphFacts
    weights: BinaryIO
    progress: Callable[[float], None]
    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    _count: int = 0
    _done_bytes: int = 0

    def model(self) -> Any:
        helper, spec = self.onnx.helper, self.spec
        hidden, skip = "embeddings", ""
        for layer in range(spec.num_layers):
            hidden, skip = self._layer(layer, hidden, skip)
        hidden = self._op("Add", hidden, skip) if skip else hidden
        hidden = self._op("Gather", hidden, "rows", axis=1)
        hidden = self._norm(hidden, "output_norm.weight")
        self._logits(hidden)
        graph = helper.make_graph(
            self.nodes, "decoder", self._inputs(), self._outputs(), self.initializers
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(_CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    # -- layers ----------------------------------------------------------------------------

    def _layer(self, layer: int, hidden: str, skip: str) -> tuple[str, str]:
        """One block; the residual stream is the sum of the two tensors it takes and gives."""
        normed, stream = self._add_norm(hidden, skip, f"blk.{layer}.attn_norm.weight")
        attended = self._attention(layer, normed)
        if (name := f"blk.{layer}.post_attention_norm.weight") in self.spec.tensors:
            attended = self._norm(attended, name)
        normed, stream = self._add_norm(attended, stream, f"blk.{layer}.ffn_norm.weight")
        out = self._feed_forward(layer, normed)
        if (name := f"blk.{layer}.post_ffw_norm.weight") in self.spec.tensors:
            out = self._norm(out, name)
        return out, stream

    def _attention(self, layer: int, normed: str) -> str:
        spec, facts = self.spec, self.facts
        heads, kv_heads = spec.num_heads[layer], spec.num_kv_heads[layer]
        query = self._matrix(normed, f"blk.{layer}.attn_q")
        key = self._matrix(normed, f"blk.{layer}.attn_k")
        value = self._matrix(normed, f"blk.{layer}.attn_v")
        length = spec.key_length[layer]
        query = self._head_norm(query, f"blk.{layer}.attn_q_norm.weight", heads, length)
        key = self._head_norm(key, f"blk.{layer}.attn_k_norm.weight", kv_heads, length)
        window = "_window" if spec.is_sliding[layer] else ""
        out = f"attended.{layer}"
        attributes = {"softcap": facts.softcap} if facts.softcap else {}
        self.nodes.append(
            self.onnx.helper.make_node(
                "GroupQueryAttention",
                [
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
                ],
                [out, f"present_key.{layer}", f"present_value.{layer}"],
                domain=_CONTRIB,
                num_heads=heads,
                kv_num_heads=kv_heads,
                scale=facts.attention_scale,
                do_rotary=1,
                rotary_interleaved=int(facts.rotary_interleaved),
                **attributes,
            )
        )
        return self._matrix(out, f"blk.{layer}.attn_output")

    def _head_norm(self, tensor: str, weight: str, heads: int, length: int) -> str:
        if weight not in self.spec.tensors:
            return tensor
        apart = self._op("Reshape", tensor, self._shape((1, -1, heads, length)))
        normed = self._norm(apart, weight)
        return self._op("Reshape", normed, self._shape((1, -1, heads * length)))

    def _feed_forward(self, layer: int, normed: str) -> str:
        gate = self._matrix(normed, f"blk.{layer}.ffn_gate")
        up = self._matrix(normed, f"blk.{layer}.ffn_up")
        if self.facts.activation == "gelu":
            gate = self._op("FastGelu", gate, domain=_CONTRIB)
        else:
            gate = self._op("QuickGelu", gate, domain=_CONTRIB, alpha=1.0)  # x sigmoid(x)
        return self._matrix(self._op("Mul", gate, up), f"blk.{layer}.ffn_down")

    def _logits(self, hidden: str) -> None:
        name = "token_embd" if self.spec.tied_embeddings else "output"
        logits = self._matrix(hidden, name)
        if cap := self.facts.logit_softcap:
            scaled = self._op("Mul", logits, self._scalar(1.0 / cap))
            logits = self._op("Mul", self._op("Tanh", scaled), self._scalar(cap))
        self.nodes.append(
            self.onnx.helper.make_node("Squeeze", [logits, self._shape((0,))], ["logits"])
        )

    # -- operations ------------------------------------------------------------------------

    def _op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = self._fresh(kind)
        make = self.onnx.helper.make_node
        self.nodes.append(make(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def _norm(self, hidden: str, weight: str) -> str:
        return self._op(
            "SimplifiedLayerNormalization",
            hidden,
            self._floats(weight),
            axis=-1,
            epsilon=self.facts.epsilon,
        )

    def _add_norm(self, hidden: str, skip: str, weight: str) -> tuple[str, str]:
        """RMS norm of the sum, and the sum."""
        if not skip:
            return self._norm(hidden, weight), hidden
        normed, total = self._fresh("normed"), self._fresh("stream")
        self.nodes.append(
            self.onnx.helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [hidden, skip, self._floats(weight)],
                [normed, "", "", total],
                domain=_CONTRIB,
                epsilon=self.facts.epsilon,
            )
        )
        return normed, total

    def _matrix(self, hidden: str, name: str) -> str:
        """Product with a weight matrix, and its bias where there is one."""
        tensor = self.spec.tensors[f"{name}.weight"]
        columns, rows = tensor.dims
        if columns % BLOCK:
            raise UnsupportedError(
                f"the ONNX backend needs rows of a multiple of {BLOCK} values; {tensor.name} has "
                f"{columns}",
                hint="leave out --backend onnx",
            )
        bits = packed_bits(tensor)
        blocks, scales = self._packed(tensor, bits)
        product = self._op(
            "MatMulNBits",
            hidden,
            blocks,
            scales,
            domain=_CONTRIB,
            K=columns,
            N=rows,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_ACCURACY_LEVEL,
        )
        bias = f"{name}.bias"
        return self._op("Add", product, self._floats(bias)) if self._has(bias) else product

    # -- constants -------------------------------------------------------------------------

    def _packed(self, tensor: GgufTensor, bits: int) -> tuple[str, str]:
        """Write a matrix; the names of its blocks and scales."""
        columns, rows = tensor.dims
        size = BLOCK * bits // 8
        start = self._aligned()
        scales = []
        for part in packed_rows(self.spec.path, tensor):
            part.blocks.tofile(self.weights)
            scales.append(part.scales)
            self._done_bytes += part.blocks.nbytes
            self.progress(min(1.0, self._done_bytes / self.spec.weight_bytes))
        types = self.onnx.TensorProto
        count = columns // BLOCK
        blocks = self._external(f"{tensor.name}.blocks", types.UINT8, (rows, count, size), start)
        start = self._aligned()
        np.concatenate(scales).tofile(self.weights)
        return blocks, self._external(f"{tensor.name}.scales", types.FLOAT, (rows * count,), start)

    def _aligned(self) -> int:
        """The next place in the weights file where a tensor may begin."""
        place = self.weights.seek(0, os.SEEK_END)
        padding = -place % _ALIGNMENT
        self.weights.write(bytes(padding))
        return place + padding

    def _external(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> str:
        tensor = self.onnx.TensorProto(name=name, data_type=kind, dims=shape)
        tensor.data_location = self.onnx.TensorProto.EXTERNAL
        length = self.weights.tell() - start
        for key, value in (("location", WEIGHTS_FILE), ("offset", start), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def _floats(self, name: str) -> str:
        """A small tensor of the file, in float32, inside the graph."""
        if not any(known.name == name for known in self.initializers):
            tensor = self.spec.tensors[name]
            values = dequantize(tensor, raw_rows(self.spec.path, tensor)).reshape(-1)
            self.initializers.append(self.onnx.numpy_helper.from_array(values, name))
        return name

    def _scalar(self, value: float) -> str:
        name = self._fresh("scalar")
        array = np.array(value, np.float32)
        self.initializers.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def _shape(self, dims: tuple[int, ...]) -> str:
        name = self._fresh("shape")
        array = np.array(dims, np.int64)
        self.initializers.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def _has(self, name: str) -> bool:
        return name in self.spec.tensors

    def _fresh(self, kind: str) -> str:
        self._count += 1
        return f"{kind}.{self._count}"

    # -- inputs and outputs ----------------------------------------------------------------

    def _inputs(self) -> list[Any]:
        spec, types = self.spec, self.onnx.TensorProto
        make = self.onnx.helper.make_tensor_value_info
        infos = [
            make("embeddings", types.FLOAT, [1, "n", spec.embedding_size]),
            make("positions", types.INT64, [1, "n"]),
            make("rows", types.INT64, ["r"]),
            make("seqlens_k", types.INT32, [1]),
            make("total_sequence_length", types.INT32, []),
        ]
        for window in ("", "_window") if any(spec.is_sliding) else ("",):
            infos.append(make(f"attention_bias{window}", types.FLOAT, [1, 1, "n", "total"]))
            for name in ("cos", "sin"):
                infos.append(make(f"{name}{window}", types.FLOAT, ["C", "half"]))
        return infos + self._caches("past")

    def _outputs(self) -> list[Any]:
        make, types = self.onnx.helper.make_tensor_value_info, self.onnx.TensorProto
        logits = make("logits", types.FLOAT, ["r", self.spec.vocab_size])
        return [logits, *self._caches("present")]

    def _caches(self, when: str) -> list[Any]:
        spec, kind = self.spec, self.onnx.TensorProto.FLOAT
        make = self.onnx.helper.make_tensor_value_info
        return [
            make(f"{when}_{what}.{layer}", kind, [1, spec.num_kv_heads[layer], "C", length[layer]])
            for layer in range(spec.num_layers)
            for what, length in (("key", spec.key_length), ("value", spec.value_length))
        ]
