"""Heads that predict further tokens from a model's own states: in its file, or beside it.

A file's last layers may be such a head (multi-token prediction, called MTP or NextN); others are
files of their own, next to the model and named after their kind. Knows files alone.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.models.hub.choice import heads_of
from edgespec.models.spec import ModelSpec

# Architectures whose head llama.cpp computes (`LLM_GRAPH_TYPE_DECODER_MTP` in `src/models/*.cpp`);
# it skips that of other files.
MTP = {
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe",
    "glm5-next", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
}  # fmt: skip


def has_head(spec: ModelSpec) -> bool:
    """Whether a file has a head that llama.cpp computes."""
    return spec.num_prediction_layers > 0 and spec.arch in MTP


def heads_beside(spec: ModelSpec) -> list[Path]:
    """Files of heads in a model's folder, one of each kind, the nearest in bits."""
    folder = spec.path.parent
    names = sorted(one.name for one in folder.glob("*.gguf"))
    return [folder / name for name in heads_of(names, spec.path.name)]
