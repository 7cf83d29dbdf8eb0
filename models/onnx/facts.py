"""What an ONNX graph needs to know about a GGUF beyond its ModelSpec, from the same metadata, and
how it stores tensors: the facts that planning needs, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import UnsupportedError
from edgespec.models.gguf.reader import GgufTensor, read_gguf
from edgespec.models.spec import ModelSpec

BLOCK = 32
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
EXACTLY_PACKED = {"Q4_0": 4, "Q8_0": 8}  # types whose blocks are taken over, and their bits


def packed_bits(tensor: GgufTensor) -> int:
    """Bits a weight in which a matrix is stored: 4 for Q4_0, else 8."""
    return EXACTLY_PACKED.get(tensor.type.name, 8)


def check_supported(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model this graph cannot express."""
    if spec.arch not in _ARCHITECTURES:
        raise UnsupportedError(
            f"the ONNX backend knows {', '.join(_ARCHITECTURES)}, not {spec.arch}",
            hint="leave out --backend onnx: llama.cpp runs it",
        )
    if spec.num_experts or len(spec.files) > 1:
        what = "mixtures of experts" if spec.num_experts else "split files"
        raise UnsupportedError(
            f"the ONNX backend does not do {what}", hint="leave out --backend onnx"
        )


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Numbers and kinds that a graph is built from."""

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


GQA, SPLIT = "gqa", "split"


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Which graph is written.

    Args:
        flavour: `gqa` for ONNX Runtime's own CPU kernels, `split` for everything else.
        plain: matrices in float32 instead of MatMulNBits' blocks.
        step: nodes of a step where shapes are fixed, else 0.
        capacity: cells of the cache where shapes are fixed.
    """

    flavour: str = GQA
    plain: bool = False
    step: int = 0
    capacity: int = 0
