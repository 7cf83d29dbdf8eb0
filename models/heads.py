"""Heads that predict further tokens from a model's own states: in its file, or beside it.

A file's last layers may be such a head (multi-token prediction, called MTP or NextN); others are
files of their own, next to the model and named after their kind. Knows files alone.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import UnsupportedError
from edgespec.models.hub.choice import heads_of
from edgespec.models.spec import ModelSpec

# Architectures whose head edgespec drafts with: llama.cpp computes it, it has a cache of keys and
# values of its own, and it was tried. llama.cpp computes that of some others, too
# (`LLM_GRAPH_TYPE_DECODER_MTP` in `src/models/*.cpp`).
MTP = {"qwen35", "qwen35moe", "glm4moe"}


def has_head(spec: ModelSpec) -> bool:
    """Whether a file has a head that drafts."""
    if spec.num_prediction_layers != 1 or spec.arch not in MTP:
        return False
    names = (f"blk.{spec.num_layers - 1}.attn_{part}.weight" for part in ("k", "v"))
    return all(name in spec.tensors and len(spec.tensors[name].dims) == 2 for name in names)


def require_head(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a file without a head that drafts."""
    if has_head(spec):
        return
    kind = "no head that predicts further tokens"
    if spec.num_prediction_layers:
        kind = f"a head that {spec.arch} files are not drafted with"
    raise UnsupportedError(f"{spec.path.name} has {kind}", hint="leave out the drafter 'head'")


def heads_beside(spec: ModelSpec) -> list[Path]:
    """Files of heads in a model's folder, one of each kind, the nearest in bits."""
    folder = spec.path.parent
    names = sorted(one.name for one in folder.glob("*.gguf"))
    return [folder / name for name in heads_of(names, spec.path.name)]
