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
# Architectures that hand out what their blocks take in, which EAGLE-3 heads read. llama.cpp has
# some others (`t_layer_inp` in `src/models/*.cpp`), and ends the process for the rest.
HANDS_OUT = {"llama", "qwen3", "qwen3moe"}
_BLOCKS_READ = 3  # by an EAGLE-3 head


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
    raise UnsupportedError(
        f"{spec.path.name} has {kind}",
        hint="name one with --draft-model, or leave out the drafter 'head'",
    )


def check_head(target: ModelSpec, head: ModelSpec) -> None:
    """Raise UnsupportedError unless a head in a file of its own can read this model's states."""
    reads = head.reads
    assert reads is not None, "a head"
    problem = ""
    if target.arch not in HANDS_OUT:
        problem = f"{target.arch} models do not hand out the states that it reads"
    elif reads.width != target.embedding_size:
        problem = (
            f"it reads {reads.width} values a layer, and the model has {target.embedding_size}"
        )
    elif len(reads.layers) != _BLOCKS_READ or not set(reads.layers) < {*range(target.num_layers)}:
        numbers = ", ".join(map(str, reads.layers))
        problem = f"it reads layers {numbers} of a model that has {target.num_layers}"
    elif head.vocab_size != target.vocab_size:
        problem = f"it is made for {head.vocab_size} tokens, and the model has {target.vocab_size}"
    elif not _is_complete(head) and head.embedding_size != target.embedding_size:
        problem = "it has no table of its own, and the model's has another width"
    if problem:
        raise UnsupportedError(
            f"{head.path.name} cannot draft for {target.path.name}: {problem}",
            hint="name a head that was trained for this model, or leave out --draft-model",
        )


def _is_complete(head: ModelSpec) -> bool:
    """Whether a head takes neither embeddings nor its last product from its model."""
    return {"token_embd.weight", "output.weight"} <= head.tensors.keys()


def heads_beside(spec: ModelSpec) -> list[Path]:
    """Files of heads in a model's folder, one of each kind, the nearest in bits."""
    folder = spec.path.parent
    names = sorted(one.name for one in folder.glob("*.gguf"))
    return [folder / name for name in heads_of(names, spec.path.name)]
