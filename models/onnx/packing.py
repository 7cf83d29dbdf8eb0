"""How a GGUF tensor is stored for ONNX Runtime: the facts that planning needs, without numpy."""

from __future__ import annotations

from edgespec.errors import UnsupportedError
from edgespec.models.gguf.reader import GgufTensor
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
