"""What can be trained for a target, and the shape of its blocks. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.errors import UnsupportedError, imported
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.heads import READABLE
from edgespec.models.spec import ModelSpec

# Whether rotary pairs lie beside each other (llama) or half a head apart (qwen2).
_PAIRED = {"llama": True, "qwen2": False}


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the blocks of a model have in common."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_length: int
    epsilon: float
    rope_base: float
    paired: bool


def check_target(spec: ModelSpec, *, of_head: bool) -> None:
    """Raise UnsupportedError for a model whose exit, or head, cannot be trained or not be used."""
    if of_head and spec.arch not in READABLE:
        raise UnsupportedError(
            f"a head of {spec.path.name} cannot be used: {spec.arch} models do not hand out the "
            f"states that it reads",
            hint="train an early exit: --kind exit",
        )
    metadata = read_gguf_shards(spec.path)[0].metadata
    lengths = {*spec.key_length, *spec.value_length}
    plain = len(lengths) == 1 and len(set(spec.num_kv_heads)) == 1 and not spec.num_experts
    scaled = metadata.get(f"{spec.arch}.rope.scaling.type", "none") != "none"
    if spec.arch not in _PAIRED or not plain or scaled or "rope_freqs.weight" in spec.tensors:
        raise UnsupportedError(
            f"a drafter of {spec.path.name} cannot be trained: its architecture ({spec.arch}) "
            "or its rotary scaling is not known to the trainer",
            hint="models of types llama and qwen2 without scaled positions can be trained",
        )


def layers_read(num_layers: int) -> tuple[int, int, int]:
    """Layers of the target whose inputs a head reads, as llama.cpp: low, middle, high."""
    return min(2, num_layers - 1), num_layers // 2, max(1, num_layers - 3)


def hyperparameters_of(spec: ModelSpec) -> Hyperparameters:
    """Those of a target that `check_target` has passed."""
    metadata = read_gguf_shards(spec.path)[0].metadata

    def number(key: str, default: float) -> float:
        value = metadata.get(f"{spec.arch}.{key}", default)
        return float(value) if isinstance(value, (int, float)) else default

    return Hyperparameters(
        width=spec.embedding_size,
        num_heads=spec.num_heads[0],
        num_kv_heads=spec.num_kv_heads[0],
        head_length=spec.key_length[0],
        epsilon=number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_base=number("rope.freq_base", 10_000.0),
        paired=_PAIRED[spec.arch],
    )


def import_torch() -> Any:
    """torch. Raises MissingDependencyError without it."""
    return imported("torch", "training needs torch", "pip install 'edgespec[train]'")
